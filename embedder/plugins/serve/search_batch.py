"""Computation of a batch of queries in a worker thread: vectors of texts, hits, and their JSON."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from pydantic_core import to_json

from embedder.errors import USER_MISTAKES, CodeNotAllowedError, StoreError
from embedder.plugins.serve.api_schema import Sort
from embedder.plugins.serve.cursors import Cursor, count_seen, following, make_cursor
from embedder.plugins.serve.item_lists import sorted_hits
from embedder.plugins.serve.serve_errors import RequestError, mistake
from embedder.plugins.serve.serve_metrics import Metrics
from embedder.plugins.serve.served_publication import ServedPublication
from embedder.retrieval.hit import Hit
from embedder.retrieval.hits import Hits
from embedder.retrieval.queries import SearchOptions
from embedder.storage.web_address import shown_uri
from index.index_errors import RetrievalError
from index.vectors import Floats, Profile

UNCHANGED = (
    "item_id", "segment", "score", "rank_score", "words_rank", "vector_rank", "rerank_score", "modality", "caption",
    "start_s", "end_s",
)  # fmt: skip
"""Fields of an answer that are those of the hit."""
THUMBNAIL_PX = 320
USUAL_DEPTH = 200

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Asked:
    """One query of a request; `options.k` is the hits of this page, and no options means only to encode the text.

    `shown` is the query as the answer repeats it. `vector`, float32 (E,), is None for a text by itself, which is
    encoded here, with `instruction`. `away`, float32 (N, E), are examples to stay away from, of which `not_texts` are
    texts; None for none. Texts are stripped. `seen` names the hits of earlier pages; `digest`, of query and options, is
    for the cursor, which names `max_depth` hits at most. A `sort` of None is best first.
    """

    publication: ServedPublication
    options: SearchOptions | None
    shown: dict[str, Any]
    text: str | None = None
    instruction: str | None = None
    vector: Floats | None = None
    away: Floats | None = None
    not_texts: tuple[str, ...] = ()
    profile: Profile = "text"
    seen: bytes = b""
    digest: str = ""
    max_depth: int = 0
    show_uris: bool = False
    sort: Sort | None = None

    @property
    def depth(self) -> int:
        """Number of hits to search for: those of the previous pages, and of this one."""
        return count_seen(self.seen) + (self.options.k if self.options is not None else 0)

    @property
    def search_depth(self) -> int:
        """Number of hits that are found, of which a re-ranker chooses those of this page."""
        return max(self.depth, (self.options.rerank or 0) if self.options is not None else 0)

    @property
    def takes_long(self) -> bool:
        """Whether the search takes several times as long as usual: also by words, folded, or deep."""
        options = self.options
        if options is None:
            return False
        return options.hybrid or options.fold is not None or self.search_depth > USUAL_DEPTH


Answer = Floats | bytes | Hits
"""Vector of a text, the JSON of a query's hits, or those that a re-ranker has yet to order."""


class BatchSearcher:
    """Function of a batch, and its measurements; called by several threads."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __call__(self, batch: Sequence[Asked]) -> list[Answer | Exception]:
        """Answer each query of a batch, or give its error."""
        self._metrics.batch_size.observe(len(batch))
        answers: list[Answer | Exception | None] = [None] * len(batch)
        vectors = self._encode(batch, answers)
        groups: dict[Any, list[int]] = defaultdict(list)
        for number, asked in enumerate(batch):
            if asked.options is None:
                answers[number] = vectors.get(number, answers[number])
            elif number in vectors:
                options = replace(asked.options, k=asked.search_depth)
                groups[id(asked.publication), options, asked.text is None, asked.profile].append(number)
        for (_, options, *_), numbers in groups.items():
            found = compute_together(
                partial(self._search, options=options), [(batch[each], vectors[each]) for each in numbers]
            )
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
        return [each if each is not None else RuntimeError("a query was not answered") for each in answers]

    def _encode(self, batch: Sequence[Asked], answers: list[Answer | Exception | None]) -> dict[int, Floats]:
        """Vector of each query by its number; a text that can't be encoded gets its error as the answer."""
        vectors = {number: asked.vector for number, asked in enumerate(batch) if asked.vector is not None}
        texts: dict[Any, list[int]] = defaultdict(list)
        for number, asked in enumerate(batch):
            if asked.text is not None and asked.vector is None:
                texts[id(asked.publication), asked.instruction].append(number)
        for (_, instruction), numbers in texts.items():
            began = time.perf_counter()
            publication = batch[numbers[0]].publication
            encode = partial(publication.encode_texts, instruction=instruction)
            encoded = compute_together(encode, [batch[each].text or "" for each in numbers])
            self._metrics.encode_seconds.observe(time.perf_counter() - began)
            for number, vector in zip(numbers, encoded, strict=True):
                if isinstance(vector, Exception):
                    answers[number] = vector if isinstance(vector, RequestError) else publication.no_texts(vector)
                else:
                    vectors[number] = vector
        return vectors

    def _search(self, group: Sequence[tuple[Asked, Floats]], options: SearchOptions) -> Sequence[bytes | Hits]:
        """Search for queries of one kind with the same options in one publication."""
        first = group[0][0]
        is_text = first.text is not None
        began = time.perf_counter()
        found = first.publication.store.searcher.search_batch(
            np.stack([vector for _, vector in group]),
            options,
            texts=[asked.text or "" for asked, _ in group] if is_text else None,
            profile=first.profile,
            away=[asked.away for asked, _ in group],
        )
        self._metrics.search_seconds.observe(time.perf_counter() - began)
        if options.rerank:
            return found
        return [page_of(asked, hits) for (asked, _), hits in zip(group, found, strict=True)]


def compute_together(
    compute: Callable[[Sequence[Given]], Iterable[Made]], given: Sequence[Given]
) -> list[Made | Exception]:
    """Compute for all at once; if that fails, for each by itself, so that nobody gets an error of another's query."""
    try:
        return list(compute(given))
    except RequestError as refusal:  # not of a single one
        return [refusal for _ in given]
    except (*USER_MISTAKES, ImportError) as error:  # the latter in an installation without torch
        is_of_store = isinstance(error, StoreError | RetrievalError) and not isinstance(error, CodeNotAllowedError)
        problem: Exception = error if is_of_store else mistake(error, "query")
    except Exception as error:  # noqa: BLE001  # it is raised where the answer is awaited
        problem = error
    if len(given) == 1:
        return [problem]
    return [made for each in given for made in compute_together(compute, [each])]


def page_of(asked: Asked, hits: Hits) -> bytes:
    """JSON of one page of hits: query, hits, cursor, note and warnings."""
    options = asked.options
    if options is None:
        raise TypeError("a query without options has no hits")
    store = asked.publication.store
    has_probability = asked.text is not None and asked.vector is None and store.info.searched == "image"
    new, names = following(hits, asked.seen, options)
    if asked.sort is not None:
        new = sorted_hits(asked.publication, new, asked.sort)
    shown = [
        as_answer(
            hit,
            asked.publication,
            show_uris=asked.show_uris,
            probability=store.encoder.probability(hit.score) if has_probability else None,
        )
        for hit in new
    ]
    goes_on = len(new) == options.k and asked.depth < asked.max_depth
    cursor = make_cursor(Cursor(asked.publication.version, asked.digest, asked.seen + names)) if goes_on else None
    texts = [*([] if asked.text is None else [asked.text]), *asked.not_texts]
    lines = [store.encoder.warning(text, options.instruction) for text in texts]
    answer = {
        "query": asked.shown,
        "hits": shown,
        "cursor": cursor,
        "note": hits.note,
        "warnings": [*(line for line in lines if line is not None), *hits.warnings],
    }
    return to_json(answer, inf_nan_mode="null", bytes_mode="base64")


def as_answer(
    hit: Hit, publication: ServedPublication, *, show_uris: bool, probability: float | None = None
) -> dict[str, Any]:
    """Return a hit as the API shows it (`schema.HitAnswer`).

    Addresses name the publication if it is an earlier one. `probability` is that the image fits the text.
    """
    address = f"/items/{quote(hit.item_id, safe='')}"
    version = "" if publication.is_current else f"&version={publication.run_id}"
    is_video = hit.start_s is not None
    segment = f"&segment={hit.segment}" if is_video else ""
    return {
        **{name: getattr(hit, name) for name in UNCHANGED},
        "probability": probability,
        "uri": shown_uri(hit.uri) if show_uris else None,
        "segments": [each._asdict() for each in hit.segments],
        "duplicates": [each._asdict() for each in hit.duplicates],
        "carryover": {name: value for name, value in hit.carryover.items() if name not in publication.hidden},
        "medium": {name: value for name, value in hit.medium.items() if name not in publication.hidden},
        "place": None if "latitude" in publication.hidden else hit.place,
        "since": publication.changed_since(hit.item_id),
        "links": {
            "item": address + (f"?{version[1:]}" if version else ""),
            "image": f"{address}/image?size={THUMBNAIL_PX}{segment}{version}",
            "clip": f"{address}/clip?{(segment + version)[1:]}" if is_video else None,
        },
    }
