"""R@10 of captions for their own pictures, over a sample of the state that a run would publish."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from embedder.ingest.candidate import Candidate
from embedder.store.arrow_tensors import unpack_vectors
from embedder.store.hash_sample import SampledPart, hash_of, journal_pieces, lowest_keys, published_pieces
from embedder.store.layout import Current
from shards.training.metrics import retrieval_at

Floats = np.ndarray[Any, np.dtype[np.float32]]

NUM_PAIRS = 2048
SPARE = 2  # items in the sample may leave, or turn out to lack a side
MIN_PAIRS = 64  # R@10 of fewer is mostly luck
STANDARD_ERRORS = 2.0


class PublishedRetrieval(BaseModel):
    """The published figure, as `CURRENT.json` keeps it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    recall_at_10: float
    num_pairs: int


@dataclass(frozen=True)
class CaptionPairs:
    """Vectors of N items that have both sides, in the order of their hashes; float32 (N, E) each."""

    images: Floats
    texts: Floats

    def __len__(self) -> int:
        return len(self.images)

    def first(self, num_pairs: int) -> "CaptionPairs":
        """A smaller sample: the one that would have been drawn with so many places."""
        return CaptionPairs(self.images[:num_pairs], self.texts[:num_pairs])


def best_of(current: Current | None) -> PublishedRetrieval | None:
    """The published figure; none where there is none, or nothing is published."""
    record = current.model_dump().get("retrieval") if current is not None else None
    return PublishedRetrieval.model_validate(record) if record else None


def retrieval_figure(pairs: CaptionPairs) -> float | None:
    """R@10, or none where there are too few pairs."""
    if len(pairs) < MIN_PAIRS:
        return None
    numbers = np.arange(len(pairs))
    return retrieval_at(pairs.texts, numbers, pairs.images, numbers, (10,))[10]


def recall_margin(recall: float, num_pairs: int) -> float:
    """What chance alone may move a recall of so many pairs."""
    return STANDARD_ERRORS * math.sqrt(recall * (1 - recall) / max(num_pairs, 1))


def sample_pairs(candidate: Candidate) -> CaptionPairs:
    """Draw the pairs with the lowest hashes of item ids from the state that would be published."""
    pieces = list(_pieces(candidate))
    keys = lowest_keys((_pair_ids(piece) for piece in pieces), SPARE * NUM_PAIRS)
    state = _State.of(candidate, list(keys))
    found: dict[str, tuple[Any, Any]] = {}
    for number in sorted(set().union(*keys.values())) if keys else []:
        for item_id, image, text in _pairs_of(pieces[number], state):
            found.setdefault(item_id, (image, text))
    order = sorted(found, key=hash_of)[:NUM_PAIRS]
    if not order:
        return CaptionPairs(np.empty((0, 0), np.float32), np.empty((0, 0), np.float32))
    return CaptionPairs(np.stack([found[each][0] for each in order]), np.stack([found[each][1] for each in order]))


def _pieces(candidate: Candidate) -> Iterator[SampledPart]:
    files = candidate.run.files
    if candidate.published is not None and candidate.keeps_published:
        yield from published_pieces(files, candidate.published.embeddings)
    yield from journal_pieces(files, candidate.entries)


def _pair_ids(piece: SampledPart) -> Iterator[str]:
    """Items that should have both sides, by what is quick to read."""
    rows = piece.read(["item_id", "segment", "modality", "caption"])
    is_first = pc.and_(pc.equal(rows["segment"], 0), pc.not_equal(rows["modality"], "text"))
    return iter(rows["item_id"].filter(pc.and_(is_first, pc.is_valid(rows["caption"]))).to_pylist())


@dataclass(frozen=True)
class _State:
    """Of a few items, where their rows will be read: from a session of the run, from the published table, or nowhere.

    Attributes:
        sessions: the session whose rows count, of items that the run finished with vectors.
        old: items whose published rows stay.
    """

    sessions: dict[str, str]
    old: set[str]

    @classmethod
    def of(cls, candidate: Candidate, item_ids: list[str]) -> "_State":
        wanted = pa.array(item_ids, pa.string())
        whole = candidate.whole.filter(pc.is_in(candidate.whole["item_id"], value_set=wanted))
        new = whole.filter(pc.and_(pc.greater(whole["num_vectors"], 0), pc.invert(whole["kept"])))
        sessions = dict(zip(new["item_id"].to_pylist(), new["session"].to_pylist(), strict=True))
        gone = candidate.retired.filter(pc.is_in(candidate.retired, value_set=wanted)).to_pylist()
        return cls(sessions, set(item_ids) - sessions.keys() - set(gone))

    def counts(self, item_id: str, session: str | None) -> bool:
        """Whether a row of the item counts, from that session or (none) from the published table."""
        return item_id in self.old if session is None else self.sessions.get(item_id) == session


def _pairs_of(piece: SampledPart, state: _State) -> Iterator[tuple[str, Any, Any]]:
    columns = ["item_id", "segment", "image_embedding", "text_embedding"]
    rows = piece.read(columns)
    has_both = pc.and_(pc.is_valid(rows["image_embedding"]), pc.is_valid(rows["text_embedding"]))
    rows = rows.filter(has_both)
    sessions = rows["session"].to_pylist() if "session" in rows.column_names else [None] * rows.num_rows
    images, texts = unpack_vectors(rows["image_embedding"]), unpack_vectors(rows["text_embedding"])
    for item_id, session, image, text in zip(rows["item_id"].to_pylist(), sessions, images, texts, strict=True):
        if state.counts(item_id, session):
            yield item_id, image, text
