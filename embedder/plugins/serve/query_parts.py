"""Parts of a query: what each holds, its vector, and the one vector that a query of several parts is searched with."""

import asyncio
import base64
import binascii
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from embedder.errors import USER_MISTAKES
from embedder.plugins.serve.api_schema import Example, ImageQuery, Query
from embedder.plugins.serve.search_batch import Asked
from embedder.plugins.serve.serve_errors import STORE_RETRY_S, RequestError, busy, mistake
from embedder.plugins.serve.served_publication import ServedPublication
from embedder.plugins.serve.service import Service, too_large
from embedder.redaction import mask
from embedder.retrieval.queries import SearchOptions
from index.index_errors import RetrievalError
from index.vectors import Floats, check_vectors

LOG = logging.getLogger(__name__)

Uploads = dict[str, bytes]


class QueryPart(NamedTuple):
    """One part of a query, or an example that it stays away from.

    `kind` is the name of its field, `where` its place in the request. The content is a text, a list of numbers, an
    item's id and segment, or the bytes of an image.
    """

    kind: str
    content: Any
    where: str


@dataclass(frozen=True)
class QueryContent:
    """A query whose images have been read.

    `wanted` is a text, things that look like images, or both, the text first; `away` are examples to stay away from.
    """

    wanted: tuple[QueryPart, ...]
    away: tuple[QueryPart, ...]

    @property
    def text(self) -> str | None:
        """What is searched for in words, stripped; None without a text."""
        return self.wanted[0].content if self.wanted[0].kind == "text" else None

    @property
    def is_text(self) -> bool:
        """Whether it is a text and nothing else."""
        return self.text is not None and len(self.wanted) == 1 and not self.away

    @property
    def identity(self) -> Any:
        """All that its answer depends on, besides the options."""
        return [[(part.kind, part.content) for part in parts] for parts in (self.wanted, self.away)]


def read_content(query: Query, where: str, uploads: Uploads, service: Service) -> QueryContent:
    """Read the parts of a query; RequestError if an image is not base64, not a part of the form, or too large."""
    return QueryContent(
        (
            *(_part(kind, query, where, uploads, service) for kind in query.given),
            *(
                _part(example.given[0], example, f"{where}.also.{number}", uploads, service)
                for number, example in enumerate(query.also)
            ),
        ),
        tuple(
            _part(example.given[0], example, f"{where}.not.{number}", uploads, service)
            for number, example in enumerate(query.away)
        ),
    )


class PartEncoder:
    """Encoder of the parts of one request's queries; an image that several of them hold is encoded once."""

    def __init__(self, service: Service, publication: ServedPublication) -> None:
        self._service, self._publication = service, publication
        self._images: dict[bytes, asyncio.Future[Floats]] = {}

    async def vectors(self, content: QueryContent, options: SearchOptions) -> tuple[Floats, Floats | None]:
        """Return a query's vector, float32 (E,), and those of the examples that it stays away from, (N, E), or None.

        Raises `RequestError` if a part can't be encoded, has another width, or the parts cancel each other out.
        """
        parts = (*content.wanted, *content.away)
        found = await asyncio.gather(*(self._vector(part, options.instruction) for part in parts))
        wanted, examples = found[: len(content.wanted)], found[len(content.wanted) :]
        if len(found) == 1:
            return wanted[0], None
        weights = _weights(content, options)
        weighted = [(weight, vector[None]) for weight, vector in zip(weights, wanted, strict=True)]
        away = np.stack(examples) if examples else None
        combine = self._publication.store.searcher.combine
        try:
            combined = await self._service.lookups.run(combine, weighted, away, options)
        except USER_MISTAKES as error:
            raise mistake(error, "query") from None
        return combined[0], away

    async def image(self, content: bytes) -> Floats:
        """Encode an uploaded image, decoded in a sandbox, float32 (E,); RequestError if that is not possible."""
        if content not in self._images:
            self._images[content] = asyncio.ensure_future(self._encode(content))
        return await self._images[content]

    async def _vector(self, part: QueryPart, instruction: str | None) -> Floats:
        if part.kind == "text":
            vector: Floats = await self._service.submit(Asked(self._publication, None, {}, part.content, instruction))
            return vector
        if part.kind == "vector":
            return _check(self._publication, part.content, part.where)
        if part.kind == "item":
            found: Floats = await self._service.lookups.run(self._publication.vector_of, *part.content)
            return found
        return await self.image(part.content)

    async def _encode(self, content: bytes) -> Floats:
        publication = self._publication
        try:
            vector: Floats = await self._service.uploads.run(
                lambda decoder, _: publication.encode_image(content, decoder)
            )
        except (*USER_MISTAKES, ImportError) as error:  # the latter in an installation without torch
            raise mistake(error, "image") from None
        except OSError as error:  # of the model's files
            LOG.warning(f"images can't be encoded: {mask(str(error))}")
            raise busy("the model's files can't be read now", STORE_RETRY_S) from None
        return vector


def _weights(content: QueryContent, options: SearchOptions) -> list[float]:
    """Weight of each part that is searched with, 1 in total: texts share one weight, all others the rest."""
    num_texts = sum(part.kind == "text" for part in content.wanted)
    num_others = len(content.wanted) - num_texts
    text = options.text_weight if num_others else 1.0
    of_text, of_other = text / max(1, num_texts), (1 - text if num_texts else 1.0) / max(1, num_others)
    return [of_text if part.kind == "text" else of_other for part in content.wanted]


def image_content(query: ImageQuery, where: str, uploads: Uploads, service: Service) -> bytes:
    """Bytes of an image in the request; RequestError if they are not base64, not a part of the form, or too many."""
    if query.image is not None:
        where = f"{where}.image"
        try:
            content = base64.b64decode(query.image, validate=True)
        except (binascii.Error, ValueError):
            raise RequestError(422, where, "no base64", "a file's content in base64", "encode the file") from None
    else:
        where, name = f"{where}.upload", query.upload or ""
        if name not in uploads:
            raise RequestError(
                422,
                where,
                f"no part {name!r} in the form",
                "the name of a part",
                "send the file in a part of this name",
            )
        content = uploads[name]
    limit = service.settings.max_upload_bytes
    if len(content) > limit:
        raise too_large(where, f"{len(content):,} bytes", f"an image of {limit:,} bytes at most")
    return content


def describe_query(query: Query) -> dict[str, Any]:
    """Query as the answer repeats it, without bytes and numbers."""
    also, away = ([_describe_part(example) for example in given] for given in (query.also, query.away))
    return _describe_part(query) | ({"also": also} if also else {}) | ({"not": away} if away else {})


def _describe_part(query: Example) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in query.given:
        found[kind] = getattr(query, kind) if kind in ("text", "item", "upload") else None
        if kind == "item":
            found["segment"] = query.segment
    return found


def _part(kind: str, query: Example, where: str, uploads: Uploads, service: Service) -> QueryPart:
    content: Any = {
        "text": (query.text or "").strip(),
        "vector": query.vector,
        "item": (query.item, query.segment),
    }.get(kind)
    if kind in ("image", "upload"):
        content = image_content(query, where, uploads, service)
    return QueryPart(kind, content, f"{where}.{kind}")


def _check(publication: ServedPublication, values: Sequence[float], where: str) -> Floats:
    with np.errstate(over="ignore"):
        vector = np.asarray(values, np.float32)
    try:
        check_vectors(vector[None], "vector", dim=publication.dim)
    except RetrievalError as error:
        raise mistake(error, where) from None
    return vector
