"""Routes that tell about store and server: facets, rejects, status, versions, metrics, health."""

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json

from embedder.errors import USER_MISTAKES
from embedder.plugins.serve.errors import RequestError, busy, mistake
from embedder.plugins.serve.facets import facets as describe_facets
from embedder.plugins.serve.item_routes import Version, Where
from embedder.plugins.serve.openapi import errors_of
from embedder.plugins.serve.schema import (
    IMAGE_SIZES,
    MAX_K,
    MAX_QUERIES,
    MAX_TEXT_CHARACTERS,
    FacetsAnswer,
    RejectsAnswer,
    StatusAnswer,
    VersionsAnswer,
)
from embedder.plugins.serve.served_publication import ServedPublication, error_without_place
from embedder.plugins.serve.service import Service

router = APIRouter(tags=["store and server"])

JSON_TYPE = "application/json"


@router.get("/facets", responses={200: {"model": FacetsAnswer}, **errors_of(404, 410, 422, 503)})
async def facets(request: Request, where: Where = None, version: Version = None) -> Response:
    """Describe the columns to filter by: values with their counts, and ranges."""
    service: Service = request.app.state.service
    publication = await service.publication(version)
    try:
        answer = await service.conditions.run(
            lambda: describe_facets(publication, where, timeout_s=service.settings.where_timeout_s)
        )
    except USER_MISTAKES as error:
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
    publication = await service.publication(version)
    answer = await service.lookups.run(_rejects, publication, start, k)
    return Response(answer, media_type=JSON_TYPE)


@router.get("/status", responses={200: {"model": StatusAnswer}, **errors_of(503)})
async def status(request: Request) -> Response:
    """Tell what is served: publication, model, index and limits."""
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
async def healthz() -> dict[str, str]:
    """Tell that the process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses=errors_of(503))
async def readyz(request: Request) -> Response:
    """Tell whether requests should be sent here: not before the store is open, nor while no text can be encoded.

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
        | {"error": error_without_place(row), "has_picture": publication.has_picture(row["item_id"])}
        for row in table.slice(start, k).to_pylist()
    ]
    return to_json({"version": publication.version, "num_rejects": table.num_rows, "rejects": shown})


def _describe(service: Service, publication: ServedPublication) -> dict[str, Any]:
    store, settings = publication.store, service.settings
    error = service.publications.last_error
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
            "text_characters": MAX_TEXT_CHARACTERS,
            "body_bytes": settings.max_body_bytes,
            "upload_bytes": settings.max_upload_bytes,
            "image_sizes": IMAGE_SIZES,
        },
    }


def _index(publication: ServedPublication) -> dict[str, Any]:
    """Kind of the index and the recall that was measured; without an index search is exact."""
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
