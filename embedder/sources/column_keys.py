"""The keys of a table's columns as users write them: in a file, or as command line options."""

import json
from collections.abc import Mapping
from shlex import quote

from embedder.config_toml.run_sections import Columns

CONTENT = "content"
FILE_AND_ROW = "file+row"
ROW_IDS = (CONTENT, FILE_AND_ROW)
"""Values of `id` that name no column: rows are identified by their content or by their place."""

_OPTIONS = {"id": "--id-column", "image": "--image-column", "caption": "--caption-column"}


class ColumnOptions(Columns):
    """Names of a table's columns that command line options gave, or would have to give."""


def key_of(columns: Columns, name: str) -> str:
    """Spell a key as the user does: `columns.id` or `--id-column`; keys of other settings as `key` or `--key`."""
    if isinstance(columns, ColumnOptions):
        return _OPTIONS.get(name, f"--{name}")
    return f"columns.{name}" if name in _OPTIONS else name


def setting(columns: Columns, values: Mapping[str, str]) -> str:
    """Return a line that sets columns, ready to be copied."""
    if isinstance(columns, ColumnOptions):
        return " ".join(f"{_OPTIONS[name]} {quote(value)}" for name, value in values.items())
    inner = ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
    return f"columns = {{ {inner} }}"


def format_assignment(columns: Columns, name: str, value: str) -> str:
    """Spell a key with its value: `columns.id = "content"` or `--id-column content`."""
    if isinstance(columns, ColumnOptions):
        return f"{key_of(columns, name)} {quote(value)}"
    return f"{key_of(columns, name)} = {json.dumps(value, ensure_ascii=False)}"
