"""Tables and sizes, as all commands show them."""

from collections.abc import Collection

from rich.table import Table

MIB = 1 << 20


def new_table(*columns: str, left: Collection[str] | None = None) -> Table:
    """Make an empty table without lines; what is too long for its column goes on below.

    Args:
        columns: the headings.
        left: headings of the columns that are aligned left, the others right; by default all of them.
    """
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if left is None or name in left else "right", overflow="fold")
    return table


def size_text(size_bytes: int) -> str:
    """Bytes as a person reads them."""
    return f"{size_bytes / MIB:,.1f} MiB" if size_bytes >= MIB else f"{size_bytes / 1024:,.0f} KiB"
