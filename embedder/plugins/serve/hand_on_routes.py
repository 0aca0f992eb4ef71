"""Routes that hand items on: as a table, a list of paths, an archive, a contact sheet; and groups of duplicates."""

import asyncio
import io
import tempfile
import threading
import zipfile
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.responses import StreamingResponse

from embedder.errors import USER_MISTAKES
from embedder.plugins.serve.api_schema import DuplicatesAnswer, ExportRequest
from embedder.plugins.serve.item_lists import describe_items, list_items, remember
from embedder.plugins.serve.item_routes import Version, Where
from embedder.plugins.serve.openapi import body_of, errors_of
from embedder.plugins.serve.search_batch import as_answer
from embedder.plugins.serve.search_routes import read_body
from embedder.plugins.serve.serve_errors import RequestError, invalid
from embedder.plugins.serve.served_publication import ServedPublication, no_item
from embedder.plugins.serve.service import Service
from embedder.retrieval.hit import Hit
from embedder.retrieval.hit_files import TABLE_FORMATS, file_name
from embedder.retrieval.hits import Hits
from embedder.retrieval.ranking import TOLERANCE
from embedder.sources.fetch import Fetcher
from embedder.storage.item_error import ItemError
from embedder.storage.printable import printable
from embedder.storage.web_address import shown_uri
from index.vectors import Floats, Rows

router = APIRouter(tags=["items"])

T = TypeVar("T")
TYPES = {
    "csv": ("items.csv", "text/csv; charset=utf-8"),
    "parquet": ("items.parquet", "application/vnd.apache.parquet"),
    "jsonl": ("items.jsonl", "application/jsonl"),
    "paths": ("paths.txt", "text/plain; charset=utf-8"),
    "zip": ("items.zip", "application/zip"),
    "sheet": ("contact-sheet.png", "image/png"),
}
RANKING = (
    "rank", "score", "probability", "rank_score", "words_rank", "vector_rank", "rerank_score", "segments", "duplicates",
)  # fmt: skip
"""Columns of hits that items have only if they were searched for."""


@router.post(
    "/export",
    openapi_extra=body_of(ExportRequest),
    responses={200: {"content": {kind: {} for _, kind in TYPES.values()}}, **errors_of(400, 404, 410, 422, 503)},
)
async def export(request: Request) -> Response:
    """Write items as a table, their paths, an archive of their files, or a contact sheet."""
    service: Service = request.app.state.service
    body, _ = await read_body(request, service)
    try:
        asked = ExportRequest.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error, "body") from None
    publication = await service.publication(request, asked.version)
    show_uris = service.settings.show_uris
    hits = await service.lookups.run(_hits, publication, asked.items)
    name, kind = TYPES[asked.format]
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    if asked.format == "zip":
        return StreamingResponse(_stream(service, hits), headers=headers, media_type=kind)
    if asked.format == "sheet":
        try:
            content = await service.exports.run(_sheet, hits)
        except USER_MISTAKES:
            raise RequestError(
                422, "body.items", f"{len(hits):,} items", "as many as a sheet has room for", "choose fewer"
            ) from None
    elif asked.format == "paths":
        paths = [shown_uri(hit.uri) if show_uris else hit.item_id for hit in hits]
        content = "".join(f"{printable(path, len(path) * 4)}\n" for path in paths).encode()
    else:
        content = await service.lookups.run(_table, hits, f".{asked.format}", show_uris)
    return Response(content, headers=headers, media_type=kind)


@router.get("/duplicates", responses={200: {"model": DuplicatesAnswer}, **errors_of(404, 410, 422, 503)})
async def duplicates(
    request: Request,
    fold: Annotated[
        float, Query(ge=0.5, le=1, description="cosine from which on two items look nearly the same")
    ] = 0.95,
    where: Where = None,
    k: Annotated[int, Query(ge=1, le=200, description="groups of the answer")] = 50,
    version: Version = None,
) -> Response:
    """Group the items that look nearly the same, each group's oldest file first."""
    service: Service = request.app.state.service
    publication = await service.filtered_publication(request, version, where)
    show_uris = service.settings.show_uris

    def answer() -> bytes:
        groups = duplicate_groups(publication, where, fold)
        if groups is None:
            raise RequestError(
                422, "query.where", f"more than {MAX_ROWS:,} items", f"{MAX_ROWS:,} items at most",
                "give a condition, as a folder, that fewer fulfil",
            )  # fmt: skip
        shown = [[as_answer(hit, publication, show_uris=show_uris) for hit in group] for group in groups[:k]]
        found = {"version": publication.version, "num_groups": len(groups), "groups": shown}
        return to_json(found, inf_nan_mode="null", bytes_mode="base64")

    return Response(await service.conditions.run(answer), media_type="application/json")


def _hits(publication: ServedPublication, ids: list[str]) -> Hits:
    """Hits of items, in their order, with what their files must match; RequestError if an item doesn't exist."""
    rows = []
    for item_id in dict.fromkeys(ids):
        own = publication.rows_of(item_id)
        if len(own) == 0:
            raise no_item(item_id, publication.version)
        rows.append(int(own[0]))
    hits = Hits(describe_items(publication, np.array(rows, np.int64)))
    hits.carried = publication.store.searcher.snapshot.metadata.carried
    for hit in hits:
        vars(hit)["files"] = publication.files
        for values in (hit.medium, hit.carryover):
            for name in publication.hidden:
                values.pop(name, None)
    return hits


def _table(hits: Hits, suffix: str, show_uris: bool) -> bytes:
    table = hits.to_arrow().drop_columns([*RANKING, *([] if show_uris else ["uri"])])
    if show_uris:
        uris = [shown_uri(uri) for uri in table["uri"].to_pylist()]
        table = table.set_column(table.column_names.index("uri"), "uri", [uris])
    file = io.BytesIO()
    TABLE_FORMATS[suffix](table, file)
    return file.getvalue()


def _sheet(hits: Hits) -> bytes:
    with tempfile.TemporaryDirectory(prefix="embedder-sheet-") as folder:
        path = Path(folder) / "sheet.png"
        hits.save_sheet(path)
        return path.read_bytes()


async def _stream(service: Service, hits: Hits) -> AsyncIterator[bytes]:
    pieces, turn = _archive(hits), threading.Lock()  # a client may leave while a piece is made

    def take(step: Callable[[], T]) -> T:
        with turn:
            return step()

    try:
        while (piece := await service.exports.continue_answer(take, partial(next, pieces, None))) is not None:
            yield piece
    finally:
        await asyncio.shield(service.exports.continue_answer(take, pieces.close))


class _Pieces(io.RawIOBase):
    """File that only grows, and whose bytes are taken as they come."""

    def __init__(self) -> None:
        self._waiting: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._waiting.append(bytes(content))
        return len(content)

    def take(self) -> bytes:
        """Bytes since the last call."""
        found, self._waiting = b"".join(self._waiting), []
        return found


def _archive(hits: list[Hit]) -> Generator[bytes, None, None]:
    """Bytes of a zip of items' files, uncompressed, as images and videos already are; unreadable files are listed."""
    file, problems = _Pieces(), list[str]()
    digits = len(str(len(hits)))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive, Fetcher() as fetcher:
        for number, hit in enumerate(hits, 1):
            try:
                pieces = hit.pieces(fetcher)
                first = next(pieces, b"")
                name = file_name(hit.item_id, first[:64], f"{number:0{digits}}-")
                with archive.open(name, "w", force_zip64=True) as member:
                    member.write(first)
                    yield file.take()
                    for piece in pieces:
                        member.write(piece)
                        yield file.take()
            except ItemError as error:
                problems.append(f"{printable(hit.item_id, 500)}: {error.error_type}")
            yield file.take()
        if problems:
            archive.writestr("not-in-here.txt", "".join(f"{line}\n" for line in problems))
    yield file.take()


MAX_ROWS = 10_000  # 1e8 cosines: a second or two on two cores
MAX_REMEMBERED = 8
BLOCK_ROWS = 1024


def duplicate_groups(publication: ServedPublication, where: str | None, least_cosine: float) -> list[list[Hit]] | None:
    """Group the items that fulfil a condition, the largest group first; None if there are too many.

    The condition must have been evaluated before; None means all. Two items with at least this cosine are in one group.
    """
    make = partial(_groups, publication, where, least_cosine)
    groups = remember(publication.duplicates, (where, least_cosine), make, MAX_REMEMBERED)
    if groups is None:
        return None
    hits = iter(describe_items(publication, np.concatenate(groups)) if groups else ())
    return [[next(hits) for _ in group] for group in groups]


def _groups(publication: ServedPublication, where: str | None, least_cosine: float) -> list[Rows] | None:
    snapshot = publication.store.searcher.snapshot
    rows = list_items(publication, where, "oldest", 0)
    places = snapshot.vector_rows[rows].astype(np.int64)
    rows, places = rows[places >= 0], places[places >= 0]
    if len(rows) > MAX_ROWS:
        return None
    groups = group_vectors(snapshot.vectors.vectors(places), least_cosine) if len(rows) else []
    return [rows[group] for group in groups]


def group_vectors(vectors: Floats, least_cosine: float) -> list[Rows]:
    """Group vectors, float32 (n, E), with at least this cosine to one of their group; those near none are left out.

    Returns ascending positions of each group of two or more; the largest group first.
    """
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    groups = np.arange(len(units))  # each vector's group, named by its first member
    for start in range(0, len(units), BLOCK_ROWS):
        near = units[start : start + BLOCK_ROWS] @ units[start:].T >= least_cosine - TOLERANCE
        for place in np.flatnonzero(near.sum(axis=1) > 1).tolist():
            joined = np.unique(groups[start + np.flatnonzero(near[place])])
            if len(joined) > 1:  # n - 1 times at most
                groups[np.isin(groups, joined)] = joined[0]
    numbers, counts = np.unique(groups, return_counts=True)
    ordered = sorted(zip(-counts[counts > 1], numbers[counts > 1], strict=True))
    return [np.flatnonzero(groups == number) for _, number in ordered]
