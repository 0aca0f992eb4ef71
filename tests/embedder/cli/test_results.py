"""Tables and JSON of the command line: alignment, nothing lost on a narrow terminal, nothing that JSON lacks."""

import io
import json
from decimal import Decimal

from embedder.cli.results import json_line, new_table
from embedder.cli.terminal import Terminal


def lines_of(table, width):
    terminal = Terminal(width=width)
    terminal.file = io.StringIO()
    terminal.print(table)
    return terminal.file.getvalue().splitlines()


def test_figures_are_aligned_right_where_the_columns_of_names_are_given():
    table = new_table("step", "rows", left=("step",))
    table.add_row("decode", "1,234,567")
    table.add_row("embed all", "8")
    assert lines_of(table, 80) == ["step            rows", "decode     1,234,567", "embed all          8"]


def test_what_is_too_long_goes_on_in_the_next_line():
    table = new_table("item", "items/s", left=("item",))
    table.add_row("a" * 30, "123,456,789")
    assert "".join(line.replace(" ", "") for line in lines_of(table, 12)).count("a") == 30
    assert "…" not in "".join(lines_of(table, 12))


def test_json_has_no_word_that_json_lacks_and_bytes_as_in_files_of_hits():
    values = {
        "price": float("nan"),
        "of": [float("inf"), {"least": float("-inf")}],
        "raw": b"\x00\xff",
        "sum": Decimal("1.10"),
    }

    def refuse(word):
        raise AssertionError(word)

    found = json.loads(json_line(values), parse_constant=refuse)
    assert found == {"price": None, "of": [None, {"least": None}], "raw": "AP8=", "sum": "1.10"}
