"""Dialect of a CSV: the one that its first line shows, unless only another one reads the file's beginning."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SAMPLE_CHARACTERS = 1 << 18
MAX_CUT_LINES = 9  # at a sample's end, of the value that it cuts: DuckDB finds nothing in a file that ends in quotes
SEPARATORS = ",;\t|"
_SEPARATOR_LINE = re.compile(r"sep=(.)\r?\n?\Z")  # Excel's own first line


@dataclass(frozen=True)
class Dialect:
    """How a CSV is written.

    `num_before` counts the lines before the header; with `has_comments` they and other lines that begin with `#` and
    don't have the header's number of fields are no rows. `is_sniffed`: messages say which separator was found.
    """

    delimiter: str
    quote: str = '"'
    escape: str | None = None
    skips_spaces: bool = False
    num_before: int = 0
    has_comments: bool = False
    is_sniffed: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `csv.reader`."""
        return {
            "delimiter": self.delimiter,
            "quotechar": self.quote,
            "escapechar": self.escape,
            "doublequote": self.escape is None,
            "skipinitialspace": self.skips_spaces,
            "strict": True,
        }

    def is_comment(self, row: Sequence[str], width: int) -> bool:
        """Return whether a row is a comment, where the header has `width` fields; with commas, it may be a row."""
        return self.has_comments and len(row) == 1 != width and row[0].startswith("#")


def find_dialect(sample: str, *, is_whole: bool, delimiter: str | None = None) -> Dialect:
    """Find the dialect of a CSV from its beginning.

    The first line decides: a comma, else a semicolon or tab, quoted by `"`. Only if the sample's rows then differ in
    their number of fields, or have one, what DuckDB's sniffer finds is taken, and only if with it all rows, the header
    included, have the same number, two or more. So no caption's punctuation changes how a readable file is read.

    Args:
        sample: The first `SAMPLE_CHARACTERS`.
        is_whole: Whether that is the whole file; else its last row may be cut.
        delimiter: The one that the file's suffix names.
    """
    lines = list(io.StringIO(sample, newline=""))
    first = Dialect(delimiter or _separator_of(lines[0] if lines else ""))
    named = _SEPARATOR_LINE.match(lines[0]) if lines else None
    if named is None and _width(lines, first, is_whole) > 1:
        return first
    num_before = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
    rest = lines[num_before or int(named is not None) :]
    if not rest:
        return first
    before = Dialect(
        named[1] if named else delimiter or _separator_of(rest[0]),
        num_before=len(lines) - len(rest),
        has_comments=num_before > 0,
    )
    if _width(rest, before, is_whole) > 1:
        return before
    for num_cut in (0,) if is_whole else range(1, MAX_CUT_LINES):
        found = _sniff(rest[: len(rest) - num_cut], before)
        if found is not None and _width(rest, found, is_whole) > 1:
            return found
    return first


def _separator_of(header: str) -> str:
    """Return the separator that a header shows: a comma, or a semicolon or tab if it has no comma."""
    unquoted = re.sub(r'"[^"]*("|$)', "", header)
    return next((separator for separator in ",;\t" if separator in unquoted), ",")


def _width(lines: list[str], dialect: Dialect, is_whole: bool) -> int:
    """Return the number of fields that all rows have; 0 if they differ or are not valid."""
    rows: list[list[str]] = []
    try:
        rows.extend(row for row in csv.reader(lines, **dialect.options) if row)
    except csv.Error as error:
        if is_whole or "unexpected end" not in str(error):
            return 0
    if not is_whole and len(rows) > 1:
        rows.pop()
    widths = {len(row) for row in rows if not dialect.is_comment(row, len(rows[0]))}
    return widths.pop() if len(widths) == 1 else 0


def _sniff(lines: list[str], before: Dialect) -> Dialect | None:
    """Ask DuckDB for separator, quote and escape; None if it finds none."""
    import duckdb

    with TemporaryDirectory() as folder, duckdb.connect() as connection:
        path = Path(folder) / "sample.csv"
        kept = (line for line in lines if not (before.has_comments and line.startswith("#")))
        path.write_text("".join(line.rstrip("\r\n") + "\n" for line in kept), encoding="utf-8", newline="")
        try:
            found = connection.execute("SELECT Delimiter, Quote, Escape FROM sniff_csv(?)", [str(path)]).fetchone()
        except duckdb.Error:
            return None
    delimiter, quote, escape = found or ("", "", "")
    if not delimiter or delimiter not in SEPARATORS:
        return None
    later = lines[0].split(delimiter)[1:]
    return Dialect(
        delimiter,
        "'" if quote == "'" else '"',
        "\\" if escape == "\\" else None,
        skips_spaces=bool(later) and all(name.startswith(" ") for name in later),
        num_before=before.num_before,
        has_comments=before.has_comments,
        is_sniffed=True,
    )
