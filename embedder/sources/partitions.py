"""Partition columns: `lang=de/part.parquet` says that `lang` is `de` in all rows of the file."""

import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote

import pyarrow as pa

_SEGMENT = re.compile(r"([^=]+)=(.*)", re.DOTALL)
_INTEGER = re.compile(r"-?[0-9]{1,18}\Z")
_NULLS = ("__HIVE_DEFAULT_PARTITION__", "")
"""What Hive and Spark write for null, and what an empty value means to them."""


def partition_values(name: str) -> dict[str, str | None]:
    """Return the values that the folders of a path say, percent-escapes decoded; null for Hive's word for it."""
    found = (_SEGMENT.fullmatch(segment) for segment in name.split("/")[:-1])
    return {unquote(match[1]): None if match[2] in _NULLS else unquote(match[2]) for match in found if match}


def partition_schema(files: Iterable[dict[str, str | None]], stored: Sequence[str]) -> pa.Schema:
    """Return the partition columns but those that the files have themselves, `stored`.

    They are int64 where all values are whole numbers (`month=01` is 1, as for pyarrow and Polars), else strings.
    """
    values: dict[str, list[str]] = {}
    for file in files:
        for name, value in file.items():
            values.setdefault(name, []).extend([] if value is None else [value])
    return pa.schema(
        pa.field(name, pa.int64() if texts and all(map(_INTEGER.match, texts)) else pa.string())
        for name, texts in values.items()
        if name not in stored
    )
