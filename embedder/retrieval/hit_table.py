"""Hits as an Arrow table: one row for each, best first; of several queries, in their order."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa

from embedder.retrieval.hit import Hit
from embedder.storage.printable import readable

SEGMENTS = pa.list_(pa.struct({"start_s": pa.float64(), "end_s": pa.float64(), "score": pa.float64()}))
DUPLICATES = pa.list_(pa.struct({"item_id": pa.string(), "score": pa.float64()}))
QUERY = pa.schema({"query_number": pa.int32(), "query": pa.string()})
HIT = pa.schema(
    {
        "rank": pa.int32(),  # from 1
        "score": pa.float64(),
        "item_id": pa.string(),
        "segment": pa.int32(),
        "modality": pa.string(),
        "uri": pa.string(),
        "start_s": pa.float64(),
        "end_s": pa.float64(),
        "caption": pa.string(),
        "probability": pa.float64(),
        "rank_score": pa.float64(),
        "words_rank": pa.int64(),
        "vector_rank": pa.int64(),
        "segments": SEGMENTS,
        "duplicates": DUPLICATES,
    }
)
PREFIX = "carryover."  # of a carried column that has the name of another


def hit_table(
    answers: Sequence[Sequence[Hit]], types: Mapping[str, pa.DataType], queries: Sequence[str] | None = None
) -> pa.Table:
    """Make the table of the hits of some queries.

    Args:
        answers: hits of each query.
        types: of the columns that were carried over, by name, as far as they are known.
        queries: name of each query; the columns `query_number`, from 0, and `query` then stand before the others.

    Returns:
        The columns of `HIT`, and one for each column that was carried over: of the store's type where it is known,
        else of the type of its values, or the values as JSON where these have none in common.
    """
    rows = [(number, rank, hit) for number, hits in enumerate(answers) for rank, hit in enumerate(hits, 1)]
    fields, names_of_queries = ([*HIT], []) if queries is None else ([*QUERY, *HIT], list(map(readable, queries)))
    columns: dict[str, pa.Array] = {}
    for field in fields:
        if field.name == "query_number":
            values: list[Any] = [number for number, _, _ in rows]
        elif field.name == "query":
            values = [names_of_queries[number] for number, _, _ in rows]
        elif field.name == "rank":
            values = [rank for _, rank, _ in rows]
        else:
            values = [getattr(hit, field.name) for _, _, hit in rows]
            if pa.types.is_list(field.type):
                values = [[each._asdict() for each in several] for several in values]
        columns[field.name] = pa.array(values, field.type)
    names = dict.fromkeys([*types, *(name for _, _, hit in rows for name in hit.carryover)])
    for name in names:
        shown = name
        while shown in columns or (shown != name and shown in names):
            shown = PREFIX + shown
        columns[shown] = _array([hit.carryover.get(name) for _, _, hit in rows], types.get(name))
    return pa.table(columns)


def _array(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    for wanted in (kind, None) if kind is not None else (None,):
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            return pa.array(values, wanted)
    return pa.array([None if value is None else json.dumps(value, default=str) for value in values], pa.string())
