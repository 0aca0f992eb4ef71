"""Facets: what the columns hold, for filters: the most frequent values with their counts, and ranges."""

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import to_json

from embedder.plugins.serve.served_publication import ServedPublication

MAX_VALUES = 50
MAX_DISTINCT = 1000  # of a column whose values are counted; beyond it, each row nearly has its own
SAMPLE_ROWS = 20_000
MAX_REMEMBERED = 50  # conditions of a publication


def facets(publication: ServedPublication, where: str | None, *, timeout_s: float) -> bytes:
    """Describe the columns of the rows that a search can find under a condition; JSON of `schema.FacetsAnswer`.

    What has a caption alone, its picture being broken or missing, is no hit of a search by vectors, so isn't counted.

    Args:
        publication: whose rows.
        where: SQL condition, or None for all rows.
        timeout_s: seconds in which the condition has to be evaluated.

    Raises:
        ConfigError: it is no condition over the columns.
    """
    if where is not None:
        publication.remember_condition(where, timeout_s)
    known = publication.facets.get(where)
    if known is not None:
        return known
    snapshot = publication.store.searcher.snapshot
    rows, computed = snapshot.metadata.rows, publication.file_columns
    for name in computed.column_names:
        rows = rows.append_column(name, computed[name])
    matching = snapshot.is_found if where is None else snapshot.is_found & snapshot.metadata.filter.matching(where)
    rows = rows.filter(pa.array(matching))
    described = [
        column
        for name in rows.column_names
        if name not in publication.hidden and (column := describe_column(name, rows[name])) is not None
    ]
    if "file_name" in snapshot.metadata.filter.computed:
        described.append({"name": "file_name", "type": "text", "num_null": 0, "values": None, "min": None, "max": None})
    if "folder" in computed.column_names:
        described[[each["name"] for each in described].index("folder")]["values"] = folder_values(
            computed["folder"].take(_first_rows(publication, where))
        )
    answer = to_json(
        {"version": publication.version, "num_rows": rows.num_rows, "columns": described}, inf_nan_mode="null"
    )
    if len(publication.facets) < MAX_REMEMBERED:
        publication.facets[where] = answer
    return answer


def _first_rows(publication: ServedPublication, where: str | None) -> pa.Array:
    """First row of each item that can be found and fulfils a condition: a folder counts items, not segments."""
    snapshot = publication.store.searcher.snapshot
    is_found = snapshot.is_found
    if where is not None:
        is_found = is_found & snapshot.metadata.filter.matching(where)
    rows = np.flatnonzero(is_found)
    _, first = np.unique(publication.item_numbers[rows], return_index=True)
    return pa.array(rows[first])


def describe_column(name: str, column: pa.ChunkedArray) -> dict[str, Any] | None:
    """Describe one column, a list by its elements; None of a type that no filter is made of (bytes, structs).

    Args:
        name: of the column.
        column: its values.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = _kind(column.type)
    if kind is None:
        return None
    described: dict[str, Any] = {"name": name, "type": kind, "num_null": column.null_count}
    if kind == "list":
        return described | {"values": _values(pc.list_flatten(column)), "min": None, "max": None}
    is_range = kind in ("number", "time")
    bounds = pc.min_max(column).as_py() if is_range and len(column) > column.null_count else {"min": None, "max": None}
    return described | {"values": _values(column)} | {end: _plain(bounds[end]) for end in ("min", "max")}


def _kind(kind: pa.DataType) -> str | None:
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if pa.types.is_temporal(kind):
        return "time"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return "list" if is_list and _kind(kind.value_type) == "text" else None


def folder_values(column: pa.ChunkedArray) -> list[dict[str, Any]]:
    """Folders with the items that lie in each itself; where they are too many, those of fewer levels, with all below.

    Args:
        column: folder of each item, its levels divided by slashes.
    """
    names = column.cast(pa.string())
    counts = {each["values"]: each["counts"] for each in pc.value_counts(names).to_pylist()}
    depth = max((name.count("/") for name in counts), default=0)
    while len(counts) > MAX_DISTINCT and depth > 0:
        cut: Counter[str] = Counter()
        for name, count in counts.items():
            cut["/".join(name.split("/")[:depth])] += count
        counts, depth = dict(cut), depth - 1
    return [{"value": name, "count": counts[name]} for name in sorted(counts)[:MAX_DISTINCT]]


def _values(column: pa.ChunkedArray) -> list[dict[str, Any]] | None:
    """The most frequent values, most frequent first, equal counts by value; None where there are too many."""
    for part in (column.slice(0, SAMPLE_ROWS), column):
        if pc.count_distinct(part, mode="only_valid").as_py() > MAX_DISTINCT:
            return None
    counts = pc.value_counts(column.drop_null()).to_pylist()
    counts.sort(key=lambda each: (-each["counts"], each["values"]))
    if _kind(column.type) in ("number", "time") and len(counts) > MAX_VALUES:
        return None
    return [{"value": _plain(each["values"]), "count": each["counts"]} for each in counts[:MAX_VALUES]]


def _plain(value: Any) -> Any:
    """Value as JSON has it; a decimal as a number."""
    return float(value) if type(value).__name__ == "Decimal" else value
