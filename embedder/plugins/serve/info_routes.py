"""Routes that describe store and server: facets, rejects, status, versions, metrics, health."""

import time
from collections import Counter
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json

from embedder.errors import ConfigError
from embedder.plugins.serve.api_schema import (
    IMAGE_SIZES,
    MAX_K,
    MAX_QUERIES,
    MAX_TEXT_CHARACTERS,
    FacetsAnswer,
    RejectsAnswer,
    StatusAnswer,
    VersionsAnswer,
)
from embedder.plugins.serve.item_routes import Version, Where
from embedder.plugins.serve.openapi import errors_of
from embedder.plugins.serve.serve_errors import RequestError, busy, mistake
from embedder.plugins.serve.served_publication import ServedPublication, error_without_place
from embedder.plugins.serve.service import Service
from embedder.retrieval.row_metadata import to_rows, to_value
from embedder.store.publish.reject_codes import reject_code

router = APIRouter(tags=["store and server"])

JSON_TYPE = "application/json"


@router.get("/facets", responses={200: {"model": FacetsAnswer}, **errors_of(404, 410, 422, 503)})
async def facets(request: Request, where: Where = None, version: Version = None) -> Response:
    """Describe the columns to filter by: values with their counts, and ranges."""
    service: Service = request.app.state.service
    publication = await service.publication(request, version)
    try:
        answer = await service.conditions.run(
            lambda: describe_facets(publication, where, timeout_s=service.settings.where_timeout_s)
        )
    except ConfigError as error:
        raise mistake(error, "query.where") from None
    return Response(answer, media_type=JSON_TYPE)


@router.get("/rejects", responses={200: {"model": RejectsAnswer}, **errors_of(404, 410, 422, 503)})
async def rejects(
    request: Request,
    start: Annotated[int, Query(ge=0, lt=1 << 31, description="number of the first, from 0")] = 0,
    k: Annotated[int, Query(ge=1, le=MAX_K, description="rejects of the answer")] = 100,
    version: Version = None,
) -> Response:
    """List the items that could not be embedded, or not whole, with the reason."""
    service: Service = request.app.state.service
    publication = await service.publication(request, version)
    answer = await service.lookups.run(_rejects, publication, start, k)
    return Response(answer, media_type=JSON_TYPE)


@router.get("/status", responses={200: {"model": StatusAnswer}, **errors_of(503)})
async def status(request: Request) -> Response:
    """Return what is served: publication, model, index and limits."""
    service: Service = request.app.state.service
    described = await service.lookups.run(_describe, service, service.publications.current)
    return Response(to_json(described, inf_nan_mode="null"), media_type=JSON_TYPE)


@router.get("/versions", responses={200: {"model": VersionsAnswer}, **errors_of(503)})
async def versions(request: Request) -> Response:
    """List the publications that can be asked with `version`, newest first."""
    service: Service = request.app.state.service
    listed = await service.versions.run(service.publications.history)
    shown = [
        {
            "run_id": record.run_id,
            "published_at": record.published_at,
            "kind": record.kind,
            "model": record.model_fingerprint,
            "num_items": record.num_items,
            "num_vectors": record.num_vectors,
            "num_rejected": record.num_rejected,
            "is_current": is_current,
        }
        for record, is_current in listed
    ]
    return Response(to_json({"versions": shown}), media_type=JSON_TYPE)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Give the metrics in Prometheus' format."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


@router.get("/healthz")
@router.head("/healthz", include_in_schema=False)
async def healthz() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses=errors_of(503))
@router.head("/readyz", include_in_schema=False)
async def readyz(request: Request) -> Response:
    """Report whether requests should be sent here: not before the store is open, nor while no text can be encoded.

    Nor once the server drains. Where a text was encoded none is for this, until one fails.
    """
    service: Service = request.app.state.service
    if not service.is_ready:
        raise busy("it ends, or has not begun")
    publication = service.publications.current
    problem = None if publication.encodes_texts else await service.lookups.run(publication.text_problem)
    if problem is not None:
        raise RequestError(503, "model", problem, "a model that encodes texts", "look at the log", retry_after="5")
    return Response(to_json({"status": "ready"}), media_type=JSON_TYPE)


def _rejects(publication: ServedPublication, start: int, k: int) -> bytes:
    table = publication.rejects
    names = ["item_id", "step", "error_type", "attempts", "updated_at"]
    shown = [
        {name: row[name] for name in names}
        | {
            "error": error_without_place(row),
            "code": reject_code(row),
            "has_picture": publication.has_picture(row["item_id"]),
        }
        for row in table.slice(start, k).to_pylist()
    ]
    return to_json({"version": publication.version, "num_rejects": table.num_rows, "rejects": shown})


def _describe(service: Service, publication: ServedPublication) -> dict[str, Any]:
    store, settings, error = publication.store, service.settings, service.publications.last_error
    return {
        "name": service.publications.address,
        "publication": publication.run_id,
        "version": publication.version,
        "published_at": store.current.published_at,
        "model": publication.model,
        "model_uri": store.info.model if settings.show_uris else None,
        "dim": publication.dim,
        "encoder": publication.encoder,
        "searched": store.info.searched,
        "colour": store.info.colour,
        "instruction": publication.instruction,
        "models": [
            {
                "name": name,
                "model": own.model_fingerprint,
                "has_vectors": own.has_vectors is not False,
                "searched": own.searched,
                "columns": own.outputs or {},
            }
            for name, own in sorted(store.publication.models.items())
        ],
        "num_items": publication.num_items,
        "num_vectors": len(store.searcher.snapshot.vectors),
        "index": _index(publication),
        "following": {"every_s": settings.follow_s, "last_error": None if error is None else str(error)},
        "uptime_s": round(time.monotonic() - service.started, 3),
        "limits": {
            "k": MAX_K,
            "queries": MAX_QUERIES,
            "depth": settings.max_depth,
            "rerank": service.reranker.num_hits,
            "text_characters": MAX_TEXT_CHARACTERS,
            "body_bytes": settings.max_body_bytes,
            "upload_bytes": settings.max_upload_bytes,
            "image_sizes": IMAGE_SIZES,
        },
    }


def _index(publication: ServedPublication) -> dict[str, Any]:
    """Kind of the index and its measured recall; without an index search is exact."""
    manifest = getattr(publication.store.searcher.snapshot.vectors, "manifest", None)
    if manifest is None:
        return {"kind": "exact", "recall_at_10": 1.0, "image_recall_at_10": 1.0}
    return {
        "kind": manifest.kind,
        "design": manifest.design,
        "recall_at_10": manifest.recall_at_10,
        "image_recall_at_10": manifest.image_recall_at_10,
        "target_recall": manifest.target_recall,
        "num_recall_queries": manifest.num_recall_queries,
        "recall_query_kind": manifest.recall_query_kind,
    }


MAX_VALUES = 50
MAX_DISTINCT = 1000  # in a column whose values are counted; beyond it, nearly each row has its own
SAMPLE_ROWS = 20_000
MAX_REMEMBERED = 50  # conditions of a publication


def describe_facets(publication: ServedPublication, where: str | None, *, timeout_s: float) -> bytes:
    """Describe the columns of the rows that a search can find under a condition; JSON of `schema.FacetsAnswer`.

    An item with only a caption, because its picture is broken or missing, is no hit of a search by vectors, so it isn't
    counted. A condition of None means all rows; it must be evaluated within `timeout_s`.

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
    # Filters of some thirty columns would bury those of the sources.
    left_out = {*publication.hidden, *publication.store.publication.medium_columns}
    described = [
        column
        for name in rows.column_names
        if name not in left_out and (column := describe_column(name, rows[name])) is not None
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
    """Describe one column, a list by its elements; None for a type without filters (bytes, structs)."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = _kind(column.type)
    if kind is None:
        return None
    described: dict[str, Any] = {"name": name, "type": kind, "num_null": column.null_count}
    if kind == "list":
        return described | {"values": _values(pc.list_flatten(column)), "min": None, "max": None}
    is_range = kind in ("number", "time")
    bounds = pc.min_max(column) if is_range and len(column) > column.null_count else {"min": pa.NA, "max": pa.NA}
    return described | {"values": _values(column)} | {end: _plain(to_value(bounds[end])) for end in ("min", "max")}


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
    """Folders with the items directly in each; if there are too many, those of fewer levels, with all items below."""
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
    """The most frequent values first, equal counts by value; None if there are too many."""
    for part in (column.slice(0, SAMPLE_ROWS), column):
        if pc.count_distinct(part, mode="only_valid").as_py() > MAX_DISTINCT:
            return None
    counted = to_rows(pa.Table.from_struct_array(pc.value_counts(column.drop_null())))
    counts = [each for each in counted if each["values"] is not None]
    counts.sort(key=lambda each: (-each["counts"], each["values"]))
    if _kind(column.type) in ("number", "time") and len(counts) > MAX_VALUES:
        return None
    return [{"value": _plain(each["values"]), "count": each["counts"]} for each in counts[:MAX_VALUES]]


def _plain(value: Any) -> Any:
    """Value as in JSON; a decimal as a number."""
    return float(value) if type(value).__name__ == "Decimal" else value
