"""Python client of a query service (`embedder serve`): the search methods of a `Store`, answered over HTTP."""

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import numpy as np

from embedder.errors import ConfigError, check_argument
from embedder.media.given_inputs import image_list, text_list
from embedder.retrieval.hits import Searchable
from embedder.retrieval.http_client import HttpClient
from embedder.retrieval.queries import DEFAULT_OPTIONS, QueryBatch, SearchOptions, read_options
from embedder.retrieval.remote_hits import RemoteHits, read_hits
from index.vectors import Floats

if TYPE_CHECKING:
    from embedder.media.given_inputs import GivenImage


MAX_QUERIES = 64  # of one request
MAX_IMAGE_CHARACTERS = 8 << 20  # of one request's images in Base64; a single image may be larger
TIMEOUT_S = 30.0
NO_OPTIONS: Mapping[str, str] = {}


def connect(
    url: str,
    *,
    token: str | None = None,
    timeout_s: float = TIMEOUT_S,
    version: str | None = None,
    model: str | None = None,
) -> "RemoteStore":
    """Connect to a query service; no request is sent before the first search.

    Args:
        url: its address, such as http://127.0.0.1:8765.
        token: the token, if it was started with `--token-file`.
        timeout_s: after which a request fails; until then it is retried while the service is busy or restarts.
        version: run id of an earlier publication to search, as in `open_store`.
        model: name of a further model of its store, whose vectors are searched.

    Raises:
        ConfigError: the address or the token is invalid.
    """
    check_argument("embedder.connect: url", url, str, "the address of a query service, as http://127.0.0.1:8765")
    return RemoteStore(HttpClient(url, token, timeout_s), version, model)


class RemoteStore(Searchable[RemoteHits]):
    """Store behind a query service, with the search methods of `Store`; safe for threads.

    Each call is answered by one publication, the newest unless `version` was given. It raises the errors of `Store`,
    and `StoreError` if the service can't be reached.
    """

    def __init__(self, client: HttpClient, version: str | None = None, model: str | None = None) -> None:
        self._client, self._version = client, version
        self._model = {} if model is None else {"model": model}  # an older service doesn't know it

    def search_item(
        self, item_id: str, options: SearchOptions | int = DEFAULT_OPTIONS, *, segment: int = 0, **keywords: Any
    ) -> RemoteHits:
        """Find the images and videos that look like one of the store's.

        Args:
            item_id: id of the item.
            options: see `SearchOptions`; a number is `k`.
            segment: number of a video's segment.
            keywords: fields of `SearchOptions` that override `options`.

        Raises:
            StoreError: the store has no such item, or as `search`.
        """
        (hits,) = self._search([{"item": item_id, "segment": int(segment)}], read_options(options, keywords))
        hits.query = item_id
        return hits

    def more(self, hits: RemoteHits) -> RemoteHits:
        """Find the hits that follow those of an earlier search, on the publication that answered it; none at the end.

        Raises:
            StoreError: that publication can no longer be opened, or as `search`.
        """
        if hits.cursor is None:
            following = RemoteHits(query=hits.query)
            following.parts = hits.parts
            return following
        (following,) = self._search([hits.asked], hits.options, cursor=hits.cursor)
        following.parts, following.query = hits.parts, hits.query
        return following

    def pages(self, hits: RemoteHits) -> Iterator[RemoteHits]:
        """Yield the hits of an earlier search, then those that follow, `k` at a time."""
        while hits:
            yield hits
            hits = self.more(hits)

    def encode_text(self, texts: Sequence[str], instruction: str | None = None) -> Floats:
        """Encode texts with the store's model; float32 (Q, E), L2-normalised.

        `instruction` is as in `SearchOptions`.
        """
        return self._encode("texts", text_list(texts), {} if instruction is None else {"instruction": instruction})

    def encode_image(self, images: "Sequence[GivenImage]") -> Floats:
        """Encode images with the store's model, in any form that `search` accepts; float32 (Q, E), L2-normalised."""
        return self._encode("images", [{"image": _base64(image)} for image in image_list(images)])

    def item(self, item_id: str, *, segment: int = 0, neighbours: int = 12) -> dict[str, Any]:
        """Return the row of an item, its segments, its provenance, and its neighbours as `Hits`.

        Args:
            item_id: id of the item.
            segment: number of the video's segment whose neighbours are returned.
            neighbours: number of neighbours.

        Raises:
            StoreError: the store has no such item.
        """
        path = f"/items/{quote(item_id, safe='')}"
        found: dict[str, Any] = self._client.get(path, segment=segment, neighbours=neighbours, version=self._version)
        return found | {"neighbours": read_hits(self._client, {"hits": found["neighbours"]}, found["version"])}

    def items(
        self, where: str | None = None, *, sort: str = "newest", seed: int = 0, k: int = 40
    ) -> Iterator[RemoteHits]:
        """List items without a search, `k` at a time, all of one publication.

        Args:
            where: condition that they fulfil, as in `SearchOptions`.
            sort: `newest`, `oldest`, `name`, `embedded` (most recently embedded first) or `random`.
            seed: seed of the random order.
            k: items at a time.

        Raises:
            ConfigError: the condition or the order is invalid.
        """
        start, version = 0, self._version
        while start is not None:
            asked = {"where": where, "sort": sort, "seed": seed, "start": start, "k": k, "version": version}
            found = self._client.get("/items", **asked)
            hits = read_hits(self._client, {"hits": found["items"]}, found["version"])
            if hits:
                yield hits
            start, version = found["next"], version or found["version"].partition("/")[0]

    def rejects(self) -> list[dict[str, Any]]:
        """List the items that could not be embedded, or only in part, with the reason, all of one publication."""
        listed: list[dict[str, Any]] = []
        version = self._version
        while True:
            found = self._client.get("/rejects", start=len(listed), version=version)
            listed += found["rejects"]
            version = version or found["version"].partition("/")[0]
            if not found["rejects"] or len(listed) >= found["num_rejects"]:
                return listed

    def duplicates(self, where: str | None = None, *, fold: float = 0.95, k: int = 50) -> list[RemoteHits]:
        """Group items that look nearly the same: largest group first, and in each group the oldest file first.

        Args:
            where: condition that they fulfil, as in `SearchOptions`.
            fold: cosine from which on two items count as the same.
            k: maximum number of groups.

        Raises:
            ConfigError: the condition is invalid, or too many items fulfil it to be compared.
        """
        found = self._client.get("/duplicates", where=where, fold=fold, k=k, version=self._version)
        return [read_hits(self._client, {"hits": group}, found["version"]) for group in found["groups"]]

    def facets(self, where: str | None = None) -> dict[str, Any]:
        """Return the columns that conditions can name, with the counts or the range of their values.

        Args:
            where: condition that the counted rows fulfil, as in `SearchOptions`.
        """
        found: dict[str, Any] = self._client.get("/facets", where=where, version=self._version)
        return found

    def status(self) -> dict[str, Any]:
        """Return publication, model, index and limits of the service."""
        found: dict[str, Any] = self._client.get("/status")
        return found

    def versions(self) -> list[dict[str, Any]]:
        """List the publications that the service can search (`version` of `connect`)."""
        found: list[dict[str, Any]] = self._client.get("/versions")["versions"]
        return found

    @property
    def version(self) -> str:
        """Name of the snapshot that is served now: the run that published it, and its index."""
        return str(self.status()["version"])

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, queries: QueryBatch, options: SearchOptions) -> list[RemoteHits]:
        """Return the hits of each query; Pillow images and arrays are sent as PNG."""
        return list(self._search(_as_json(queries), options))

    def _search(
        self, queries: list[dict[str, Any]], options: SearchOptions, cursor: str | None = None
    ) -> Iterator[RemoteHits]:
        """Yield the hits of each query, all of one publication."""
        version, given = self._version, _of_options(options)
        if options.rerank == 0 and not self.status()["limits"].get("rerank"):
            del given["rerank"]
        for some in _requests(queries):
            asked = {"queries": some, **given, "cursor": cursor, "version": version, **self._model}
            answer = self._client.post("/search", asked)
            version = answer["publication"]
            for query, found in zip(some, answer["answers"], strict=True):
                hits = read_hits(self._client, found, answer["version"])
                hits.asked, hits.options = query, options
                yield hits

    def _encode(self, kind: str, values: Sequence[Any], options: Mapping[str, str] = NO_OPTIONS) -> Floats:
        vectors: list[list[float]] = []
        for some in _requests(values):
            vectors += self._client.post("/embed", {kind: some, **options, **self._model})["vectors"]
        return np.asarray(vectors, np.float32) if vectors else np.empty((0, self.status()["dim"] or 0), np.float32)


def _of_options(options: SearchOptions) -> dict[str, Any]:
    given = asdict(options)
    # An older service doesn't know them, and need not if they have their defaults.
    newer = ("text_weight", "not_weight", "instruction", "rerank", "rerank_timeout_s")
    usual = [name for name in newer if given[name] == getattr(DEFAULT_OPTIONS, name)]
    return {name: value for name, value in given.items() if name not in usual}


def _as_json(queries: QueryBatch) -> list[dict[str, Any]]:
    away = [
        *({"text": text} for text in queries.away.texts),
        *({"image": _base64(image)} for image in queries.away.images),
    ]
    values = queries.values.tolist() if queries.kind == "vector" else queries.values
    found: list[dict[str, Any]] = [
        {queries.kind: _base64(value) if queries.kind == "image" else value} for value in values
    ]
    for query, image in zip(found, queries.images or (), strict=False):
        query["image"] = _base64(image)
    return [query | {"not": away} for query in found] if away else found


def _base64(image: Path | bytes) -> str:
    if isinstance(image, bytes):
        return base64.b64encode(image).decode()
    try:
        return base64.b64encode(image.read_bytes()).decode()
    except OSError as error:
        raise ConfigError(f"{image}: {error.strerror}; give an image file that can be read") from None


def _image_characters(query: dict[str, Any]) -> int:
    return sum(len(part.get("image", "")) for part in (query, *query.get("not", ())))


def _requests(queries: Iterable[Any]) -> Iterator[list[Any]]:
    some: list[Any] = []
    num_characters = 0
    for query in queries:
        length = _image_characters(query) if isinstance(query, dict) else 0
        if some and (len(some) == MAX_QUERIES or num_characters + length > MAX_IMAGE_CHARACTERS):
            yield some
            some, num_characters = [], 0
        some.append(query)
        num_characters += length
    if some:
        yield some
