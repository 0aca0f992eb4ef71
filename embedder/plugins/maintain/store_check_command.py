"""`embedder store`: a store is checked, for what is damaged and what is left over."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from embedder.cli.options import ReadConfig, StoreUri, command
from embedder.cli.results import Result
from embedder.quantities import agree, duration_text, plural, size_text
from embedder.store.files import StoreFiles

if TYPE_CHECKING:
    from embedder.plugins.maintain.store_check.check import StoreCheck

app = typer.Typer(no_args_is_help=True, help="Check a store.")


@app.callback()
def store() -> None:
    """Check a store."""


@app.command()
@command
def check(
    read: ReadConfig,
    store: StoreUri = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every file of what is published, and compare all hashes.")
    ] = False,
) -> Result:
    """Say what is damaged and what is left over, with the cure of each; exit 1 where readers or writers are in the way.

    It reads, takes no lock, and works while a run writes. Warnings are of lost things that can be done without, notes
    of work that is not finished and of files that nothing needs.
    """
    files = StoreFiles(read({"store": store}).required_store)

    from embedder.plugins.maintain.store_check.check import check_store

    found = check_store(files, deep=deep)
    number = found.number("error")
    failure = f"store {files.address}: {plural(number, 'error')} found; each is listed with its cure" if number else ""
    return Result(_data(files.address, found), _lines(files.address, found), failure)


def _data(address: str, found: "StoreCheck") -> dict[str, Any]:
    """Return data for `--json`; the counts next to `models` are of the main model."""
    main = found.models.get("")
    return {
        "store": address,
        "run_id": found.run_id,
        "deep": found.deep,
        "findings": [asdict(each) for each in found.findings],
        "num_errors": found.number("error"),
        "num_warnings": found.number("warning"),
        "num_notes": found.number("note"),
        "num_items": main.num_items if main else 0,
        "num_rejected": main.num_rejected if main else 0,
        "num_vectors": main.num_vectors if main else 0,
        "models": {name: asdict(each) for name, each in found.models.items() if name},
        "publications": found.publications,
        "readable": found.readable,
        "num_files": found.num_files,
        "size_bytes": found.size_bytes,
        "wall_s": round(found.wall_s, 3),
    }


def _lines(address: str, found: "StoreCheck") -> list[RenderableType]:
    lines: list[RenderableType] = [f"{each.severity}: {each.text}" for each in found.findings]
    for name, each in found.models.items():
        model = f"model {name}: " if name else ""
        lines.append(
            f"{model}{plural(each.num_items, 'item')}, {plural(each.num_rejected, 'reject')} among them, "
            f"{plural(each.num_vectors, 'row')} of embeddings, in {plural(each.num_parts, 'part file')}, "
            f"{size_text(each.size_bytes)}"
        )
    if found.publications:
        lines.append(
            f"{plural(len(found.publications), 'publication')}, {len(found.readable):,} of them "
            f"{agree(len(found.readable), 'is', 'are')} readable; published is run {found.run_id}"
        )
    verdict = ", ".join(plural(found.number(each), each) for each in ("error", "warning", "note"))
    how = "every file of the publication read" if found.deep else "without --deep: ids and counts, sizes and records"
    lines.append(
        f"store {address}: {verdict}; {plural(found.num_files, 'file')}, {size_text(found.size_bytes)}, checked in "
        f"{duration_text(found.wall_s)} ({how})"
    )
    return lines
