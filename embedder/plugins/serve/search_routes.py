"""Routes that search: `POST /search` and `POST /embed`."""

import asyncio
import time
from collections.abc import Hashable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.datastructures import UploadFile

from embedder.errors import ConfigError
from embedder.plugins.serve.api_schema import (
    MAX_QUERIES,
    EmbedAnswer,
    EmbedRequest,
    Query,
    SearchAnswer,
    SearchRequest,
    Sort,
)
from embedder.plugins.serve.cursors import Cursor, check_cursor, query_digest, read_cursor
from embedder.plugins.serve.openapi import body_of, errors_of
from embedder.plugins.serve.query_parts import (
    PartEncoder,
    QueryContent,
    Uploads,
    describe_query,
    image_content,
    read_content,
)
from embedder.plugins.serve.search_batch import Asked
from embedder.plugins.serve.serve_errors import RequestError, invalid, mistake
from embedder.plugins.serve.served_publication import ServedPublication
from embedder.plugins.serve.service import Service
from embedder.retrieval.hits import Hits
from embedder.retrieval.queries import DEFAULT_OPTIONS, HYBRID_RULE, INSTRUCTION_RULE, SearchOptions

router = APIRouter(tags=["search"])

JSON_TYPE = "application/json"
FORM_TYPE = "multipart/form-data"
REQUEST_PART = "request"

MAX_COLONS = 20_000  # in the keys of a request, and in its texts

Body = TypeVar("Body", bound=BaseModel)


@router.post(
    "/search",
    openapi_extra=body_of(SearchRequest),
    responses={200: {"model": SearchAnswer}, **errors_of(400, 404, 410, 413, 415, 422, 503)},
)
async def search(request: Request) -> Response:
    """Find the images and videos nearest to each query; all are answered by one publication.

    A form (`multipart/form-data`) has this JSON in its part `request`, and images in other parts, by whose names
    queries refer to them (`upload`).
    """
    began = time.perf_counter()
    service: Service = request.app.state.service
    asked, uploads = await _read(SearchRequest, request, service)
    cursor = _read_cursor(asked, service)
    try:
        version = cursor.version if cursor is not None else asked.version
        publication = await service.publication(request, version)
    except RequestError as refusal:
        if cursor is not None and refusal.status == 404:
            refusal.status = 410
        raise
    publication = await service.of_model(publication, asked.model)
    options = asked.options
    try:
        await service.check_condition(publication, options.where)
    except ConfigError as error:
        raise mistake(error, "body.where") from None
    encoder = PartEncoder(service, publication)
    pages = await asyncio.gather(
        *(
            _page(service, publication, encoder, query, f"body.queries.{number}", options, asked.sort, cursor, uploads)
            for number, query in enumerate(asked.queries)
        )
    )
    head = {
        "version": publication.version,
        "publication": publication.run_id,
        "model": publication.model,
        "took_ms": round(1000 * (time.perf_counter() - began), 3),
    }
    return Response(to_json(head)[:-1] + b',"answers":[' + b",".join(pages) + b"]}", media_type=JSON_TYPE)


@router.post(
    "/embed",
    openapi_extra=body_of(EmbedRequest),
    responses={200: {"model": EmbedAnswer}, **errors_of(400, 413, 415, 422, 503)},
)
async def embed(request: Request) -> Response:
    """Encode texts or images with the store's model, as vectors of unit norm."""
    service: Service = request.app.state.service
    asked, uploads = await _read(EmbedRequest, request, service)
    publication = await service.of_model(service.publications.current, asked.model)
    encoder = PartEncoder(service, publication)
    vectors = await asyncio.gather(
        *(service.submit(Asked(publication, None, {}, text.strip(), asked.instruction)) for text in asked.texts or ()),
        *(
            encoder.image(image_content(image, f"body.images.{number}", uploads, service))
            for number, image in enumerate(asked.images or ())
        ),
    )
    rows = np.stack(vectors).tolist()
    answer = {"model": publication.model, "dim": len(rows[0]), "vectors": rows}
    return Response(to_json(answer), media_type=JSON_TYPE)


async def _read(model: type[Body], request: Request, service: Service) -> tuple[Body, Uploads]:
    """Read a request and the files of its form; RequestError as in `read_body`, or if a field is wrong."""
    body, uploads = await read_body(request, service)
    try:
        return model.model_validate_json(body), uploads
    except ValidationError as error:
        raise invalid(error, "body") from None


async def read_body(request: Request, service: Service) -> tuple[bytes, Uploads]:
    """Read a request's JSON and the files of its form; RequestError if it is neither, or a file is too large."""
    kind = request.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
    if kind == JSON_TYPE:
        return _with_few_keys(await request.body()), {}
    if kind != FORM_TYPE:
        raise RequestError(
            415, "header.Content-Type", kind[:100] or "none", f"{JSON_TYPE} or {FORM_TYPE}", "send JSON, or a form"
        )
    from starlette.exceptions import HTTPException
    from starlette.formparsers import MultiPartException

    limit = service.settings.max_body_bytes
    try:
        form = await request.form(max_files=MAX_QUERIES + 1, max_fields=MAX_QUERIES + 1, max_part_size=limit)
    except (HTTPException, MultiPartException, ValueError) as error:
        raise RequestError(
            400,
            "body",
            str(getattr(error, "detail", error))[:200],
            f"a whole {FORM_TYPE}",
            "send a form as browsers do",
        ) from None
    try:
        parts = {
            name: await value.read() if isinstance(value, UploadFile) else value.encode(errors="surrogatepass")
            for name, value in form.multi_items()
        }
    finally:
        await form.close()
    if REQUEST_PART not in parts:
        raise RequestError(422, "body", "no part `request`", "a part `request` with the JSON", "add it to the form")
    return _with_few_keys(parts.pop(REQUEST_PART)), parts


def _with_few_keys(body: bytes) -> bytes:
    """Refuse a million unknown keys before they are parsed: each would become an error, taking seconds in total."""
    if (num_colons := body.count(b":")) > MAX_COLONS:
        raise RequestError(
            422, "body", f"{num_colons:,} colons", f"a JSON document with {MAX_COLONS:,} at most", "send fewer keys"
        )
    return body


def _read_cursor(asked: SearchRequest, service: Service) -> Cursor | None:
    if asked.cursor is None:
        return None
    if len(asked.queries) != 1:
        raise RequestError(
            422,
            "body.cursor",
            f"{len(asked.queries)} queries",
            "one query",
            "send the query that the cursor belongs to",
        )
    return read_cursor(asked.cursor, service.settings.max_depth)


async def _page(
    service: Service,
    publication: ServedPublication,
    encoder: PartEncoder,
    query: Query,
    where: str,
    options: SearchOptions,
    sort: Sort | None,
    cursor: Cursor | None,
    uploads: Uploads,
) -> bytes:
    """JSON of the hits of one query (`schema.QueryAnswer`), from the cache or computed."""
    _require_text(query, where, options)
    options = service.reranker.limit_options(options, query, where)
    content = read_content(query, where, uploads, service)
    digest = query_digest(content.identity, options, *filter(None, (publication.store.model, sort)))
    if cursor is not None:
        check_cursor(cursor, digest)
    asked = Asked(
        publication,
        options,
        describe_query(query),
        content.text,
        options.instruction,
        not_texts=tuple(part.content for part in content.away if part.kind == "text"),
        profile="text" if content.text is not None or query.vector is not None else "image",
        seen=cursor.seen if cursor is not None else b"",
        digest=digest,
        max_depth=service.settings.max_depth,
        show_uris=service.settings.show_uris,
        sort=sort,
    )

    # The answer repeats the query: the same text with other spaces around it, or an upload of another name.
    key = (publication.serial, digest, query_digest(asked.seen), to_json(asked.shown))

    def ask() -> asyncio.Future[bytes]:
        return asyncio.ensure_future(_ask_in_steps(service, encoder, content, asked, key))

    return await service.answers.get(key, ask)


async def _ask_in_steps(
    service: Service, encoder: PartEncoder, content: QueryContent, asked: Asked, key: Hashable
) -> bytes:
    """Encode the parts of a query, search, and score the first hits again; what that had no time for is not kept."""
    if not content.is_text:
        vector, away = await encoder.vectors(content, asked.options or DEFAULT_OPTIONS)
        asked = replace(asked, vector=vector, away=away)
    found: bytes | Hits = await service.submit(asked)
    if isinstance(found, bytes):
        return found
    if not await service.reranker.order(asked, found):
        service.answers.forget(key)
    return await service.write_page(asked, found)


def _require_text(query: Query, where: str, options: SearchOptions) -> None:
    rule = HYBRID_RULE if options.hybrid else INSTRUCTION_RULE if options.instruction is not None else None
    if rule is not None and query.text is None:
        raise RequestError(422, f"{where}.{query.given[0]}", "a query without a text", *rule)
