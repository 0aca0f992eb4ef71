"""Routes of items: lists of them, row and neighbours, image, clip, the file itself."""

from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote

import numpy as np
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import AfterValidator, BeforeValidator
from pydantic_core import to_json

from embedder.plugins.serve.api_schema import (
    MAX_ID_CHARACTERS,
    MAX_K,
    MAX_TEXT_CHARACTERS,
    ItemAnswer,
    ItemsAnswer,
    Sort,
    none_if_blank,
)
from embedder.plugins.serve.clips import clip_response
from embedder.plugins.serve.item_lists import describe_items, list_items
from embedder.plugins.serve.openapi import errors_of
from embedder.plugins.serve.page_files import is_known
from embedder.plugins.serve.search_batch import as_answer
from embedder.plugins.serve.serve_errors import RequestError
from embedder.plugins.serve.served_publication import ServedPublication, error_without_place, no_item
from embedder.plugins.serve.service import Service
from embedder.plugins.serve.thumbnails import CONTENT_TYPE, Frame
from embedder.retrieval.cities import nearest_city
from embedder.retrieval.hit_files import file_name
from embedder.retrieval.queries import SearchOptions
from embedder.retrieval.row_metadata import to_rows
from embedder.sources.listing_schema import shown_modified
from embedder.storage.web_address import shown_uri

router = APIRouter(tags=["items"])

MAX_NEIGHBOURS = 100
MAX_AGE_S = 60  # then the browser asks again, and gets 304 as long as the content is the same


def _number(text: Any) -> Any:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else text


MAX_PATH_CHARACTERS = 12 * MAX_ID_CHARACTERS  # a character of four bytes takes twelve
ItemId = Annotated[
    str, Path(min_length=1, max_length=MAX_PATH_CHARACTERS, description="id, percent-encoded as one part")
]
Segment = Annotated[int | None, Query(ge=0, lt=1 << 31, description="of a video; by default its first")]
Version = Annotated[str | None, Query(max_length=300, description="publication to ask instead of the newest")]
Where = Annotated[
    str | None,
    Query(max_length=MAX_TEXT_CHARACTERS, description="SQL condition over the columns"),
    AfterValidator(none_if_blank),
]
Size = Annotated[Literal[160, 320, 640, 1280], BeforeValidator(_number), Query(description="pixels of the longer side")]


@router.get("/items", responses={200: {"model": ItemsAnswer}, **errors_of(404, 410, 422, 503)})
async def items(
    request: Request,
    where: Where = None,
    sort: Annotated[Sort, Query(description="order; `embedded` has those first that were embedded last")] = "newest",
    seed: Annotated[int, Query(ge=0, lt=1 << 31, description="of the order at random")] = 0,
    start: Annotated[int, Query(ge=0, lt=1 << 31, description="number of the first item, from 0")] = 0,
    k: Annotated[int, Query(ge=1, le=MAX_K, description="items of the answer")] = 40,
    version: Version = None,
) -> Response:
    """List the items that fulfil a condition, in an order, without a search."""
    service: Service = request.app.state.service
    publication = await service.filtered_publication(request, version, where)
    show_uris = service.settings.show_uris

    def answer() -> bytes:
        rows = list_items(publication, where, sort, seed)
        hits = describe_items(publication, rows[start : start + k])
        found = {
            "version": publication.version,
            "num_items": len(rows),
            "items": [as_answer(hit, publication, show_uris=show_uris) for hit in hits],
            "next": start + k if start + k < len(rows) else None,
        }
        return to_json(found, inf_nan_mode="null", bytes_mode="base64")

    return Response(await service.conditions.run(answer), media_type="application/json")


@router.head("/items/{item_id}/image", include_in_schema=False)
@router.get(
    "/items/{item_id}/image",
    responses={
        200: {"content": {CONTENT_TYPE: {}}, "description": "The image, or the frame in the middle of the segment"},
        304: {"description": "It is the one that the client has"},
        **errors_of(404, 409, 410, 422, 503),
    },
)
async def image(
    request: Request, item_id: ItemId, size: Size = 320, segment: Segment = None, version: Version = None
) -> Response:
    """Show an item as a WebP image of one of the fixed sizes; an image is never enlarged."""
    service, publication, row = await _find_row(request, item_id, segment, version)
    times = (row["start_s"], row["end_s"])
    middle_s = None if None in times else sum(times) / 2
    frame = Frame(row["item_id"], row["uri"], row["content_version"], middle_s, size, publication.files)
    headers = {"ETag": f'"{frame.digest}"', "Cache-Control": f"private, max-age={MAX_AGE_S}"}
    if is_known(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    content = await service.thumbnails.get(frame, keep=publication.is_current)
    return Response(content, headers=headers, media_type=CONTENT_TYPE)


@router.head("/items/{item_id}/clip", include_in_schema=False)
@router.get(
    "/items/{item_id}/clip",
    responses={
        200: {"content": {"video/*": {}}, "description": "The file"},
        206: {"content": {"video/*": {}}, "description": "The range of it that was asked for"},
        **errors_of(404, 409, 410, 416, 422, 503),
    },
)
async def clip(request: Request, item_id: ItemId, segment: Segment = None, version: Version = None) -> Response:
    """Send a video's own bytes, or a range of them; `X-Moment-Start` and `-End` have the segment's seconds."""
    service, publication, row = await _find_row(request, item_id, segment, version)
    if row["start_s"] is None:
        raise RequestError(422, "item", "it is no video", "a video", "ask for its image")
    return await _file(request, service, publication, row)


@router.head("/items/{item_id}/file", include_in_schema=False)
@router.get(
    "/items/{item_id}/file",
    responses={
        200: {"content": {"image/*": {}, "video/*": {}}, "description": "The file, as it was embedded"},
        206: {"content": {"image/*": {}, "video/*": {}}, "description": "The range of it that was asked for"},
        **errors_of(404, 409, 410, 416, 422, 503),
    },
)
async def original(
    request: Request,
    item_id: ItemId,
    download: Annotated[bool, Query(description="whether a browser is to keep it")] = False,
    version: Version = None,
) -> Response:
    """Send an item's own bytes, or a range of them: the file that was embedded, and no other in its place."""
    service, publication, row = await _find_row(request, item_id, None, version)
    if row["modality"] == "text":
        raise RequestError(422, "item", "it has no picture", "an image or a video", "ask for its row")
    answer = await _file(request, service, publication, row)
    kind, name = "attachment" if download else "inline", quote(file_name(row["item_id"], b"", ""), safe="")
    answer.headers["Content-Disposition"] = f"{kind}; filename*=UTF-8''{name}"
    return answer


async def _file(request: Request, service: Service, publication: ServedPublication, row: dict[str, Any]) -> Response:
    etag = f'"{Frame(row["item_id"], row["uri"], row["content_version"], None, 0).digest}"'
    headers = {"ETag": etag, "Cache-Control": f"private, max-age={MAX_AGE_S}"}
    times = (("X-Moment-Start", row["start_s"]), ("X-Moment-End", row["end_s"]))
    headers |= {name: f"{time_s:.3f}" for name, time_s in times if time_s is not None}
    if is_known(request, etag):
        return Response(status_code=304, headers=headers)
    given = request.headers.get("range")
    if request.headers.get("if-range", etag) != etag:
        given = None
    return await clip_response(
        row,
        headers,
        given,
        files=publication.files,
        threads=service.clips,
        max_bytes=service.settings.max_image_bytes,
        with_body=request.method != "HEAD",
    )


@router.get("/items/{item_id}", responses={200: {"model": ItemAnswer}, **errors_of(404, 410, 422, 503)})
async def item(
    request: Request,
    item_id: ItemId,
    segment: Segment = None,
    neighbours: Annotated[int, Query(ge=0, le=MAX_NEIGHBOURS, description="items that are most like it")] = 12,
    version: Version = None,
) -> Response:
    """Describe an item: its row, its segments, where its vectors come from, and its neighbours."""
    service: Service = request.app.state.service
    item_id = unquote(item_id)
    publication = await service.publication(request, version)
    answer = await service.lookups.run(_describe, publication, item_id, segment, neighbours, service.settings.show_uris)
    return Response(answer, media_type="application/json")


async def _find_row(
    request: Request, item_id: str, segment: int | None, version: str | None
) -> tuple[Service, ServedPublication, dict[str, Any]]:
    """Find the row of an item's segment, in the publication of a version."""
    service: Service = request.app.state.service
    publication = await service.publication(request, version)

    def read() -> Any:
        row = publication.segment_row(unquote(item_id), segment)
        return to_rows(publication.store.searcher.snapshot.metadata.take(np.array([row])))[0]

    return service, publication, await service.lookups.run(read)


def _describe(
    publication: ServedPublication, item_id: str, segment: int | None, num_neighbours: int, show_uris: bool
) -> bytes:
    row = publication.item_row(item_id)
    if row is None:
        raise no_item(item_id, publication.version)
    metadata = publication.store.searcher.snapshot.metadata
    segments = to_rows(metadata.take(publication.rows_of(item_id)))
    segments.sort(key=lambda each: each["segment"])
    if segment is not None:
        publication.segment_row(item_id, segment)
    row["error"] = error_without_place(row)
    hidden = dict.fromkeys(publication.hidden)
    segments = [{name: None if name in hidden else value for name, value in each.items()} for each in segments]
    segments = [each | _place_of(each) for each in segments]
    row, *segments = (each | {"uri": shown_uri(each["uri"]) if show_uris else None} for each in (row, *segments))
    answer = {
        "item": row | {"modified": shown_modified(row["modified"])},
        "segments": segments,
        "provenance": _provenance(publication, row, segments) | ({} if show_uris else {"model_uri": None}),
        "since": publication.changed_since(item_id),
        "neighbours": _neighbours(publication, item_id, segment, num_neighbours, show_uris) if segments else [],
        "version": publication.version,
    }
    return to_json(answer, inf_nan_mode="null", bytes_mode="base64")


def _place_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the city nearest to where a row's item was made, unless it has a column of that name."""
    place = None if "place" in row else nearest_city(row.get("latitude"), row.get("longitude"))
    return {} if place is None else {"place": place}


def _provenance(publication: ServedPublication, row: dict[str, Any], segments: list[dict[str, Any]]) -> dict[str, Any]:
    current = publication.store.current
    first = segments[0] if segments else {}
    return {
        "run_id": first.get("run_id", row["run_id"]),
        "model": first.get("model_fingerprint", publication.model),
        "model_uri": publication.store.info.model,
        "preprocessing": first.get("preprocess_fingerprint"),
        "content_version": row["content_version"],
        "embedded_at": first.get("embedded_at"),
        "publication": current.run_id,
        "published_at": current.published_at,
    }


def _neighbours(
    publication: ServedPublication, item_id: str, segment: int | None, num_neighbours: int, show_uris: bool
) -> list[dict[str, Any]]:
    """Hits most similar to an item, without itself; none if only its caption has a vector."""
    if num_neighbours == 0:
        return []
    try:
        vector = publication.vector_of(item_id, segment)
    except RequestError:
        return []
    options = SearchOptions(k=num_neighbours + 1)
    hits = publication.store.searcher.search_batch(np.stack([vector]), options, profile="image")[0]
    others = [hit for hit in hits if hit.item_id != item_id]
    return [as_answer(hit, publication, show_uris=show_uris) for hit in others[:num_neighbours]]
