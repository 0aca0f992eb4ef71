"""R@10 of captions for their own images, over a sample of the state that a run would publish."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from embedder.ingest.run_result import RunResult
from embedder.store.arrow_tensors import unpack_vectors
from embedder.store.finished import whole_among
from embedder.store.hash_sample import SampledPart, hash_of, journal_pieces, lowest_keys, published_pieces
from embedder.store.layout import Current
from shards.training.metrics import retrieval_at

Floats = np.ndarray[Any, np.dtype[np.float32]]

NUM_PAIRS = 2048
SPARE = 2  # items in the sample may leave, or turn out to lack a side
MIN_PAIRS = 64  # R@10 of fewer is mostly luck
STANDARD_ERRORS = 2.0


class PublishedRetrieval(BaseModel):
    """R@10 of the published state, as `CURRENT.json` keeps it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    recall_at_10: float
    num_pairs: int


@dataclass(frozen=True)
class CaptionPairs:
    """Image and text vectors of N items that have both, in the order of their hashes; float32 (N, E) each."""

    images: Floats
    texts: Floats

    def __len__(self) -> int:
        return len(self.images)

    def first(self, num_pairs: int) -> "CaptionPairs":
        """Take a smaller sample: the one that would have been drawn with this limit."""
        return CaptionPairs(self.images[:num_pairs], self.texts[:num_pairs])


def best_of(current: Current | None) -> PublishedRetrieval | None:
    """Read the published figure; none where there is none, or nothing is published."""
    record = current.model_dump().get("retrieval") if current is not None else None
    return PublishedRetrieval.model_validate(record) if record else None


def retrieval_figure(pairs: CaptionPairs) -> float | None:
    """Compute R@10; none where there are too few pairs."""
    if len(pairs) < MIN_PAIRS:
        return None
    numbers = np.arange(len(pairs))
    return retrieval_at(pairs.texts, numbers, pairs.images, numbers, (10,))[10]


def recall_margin(recall: float, num_pairs: int) -> float:
    """Difference that chance alone may make to a recall of this many pairs."""
    return STANDARD_ERRORS * math.sqrt(recall * (1 - recall) / max(num_pairs, 1))


def sample_pairs(result: RunResult) -> CaptionPairs:
    """Draw the pairs with the lowest hashes of item ids from the state that would be published."""
    pieces = list(_pieces(result))
    keys = lowest_keys((_pair_ids(piece) for piece in pieces), SPARE * NUM_PAIRS)
    sessions = sessions_of(result, list(keys))
    found: dict[str, tuple[Any, Any]] = {}
    for number in sorted(set().union(*keys.values())) if keys else []:
        for item_id, image, text in _pairs_of(pieces[number], sessions):
            found.setdefault(item_id, (image, text))
    order = sorted(found, key=hash_of)[:NUM_PAIRS]
    if not order:
        return CaptionPairs(np.empty((0, 0), np.float32), np.empty((0, 0), np.float32))
    return CaptionPairs(np.stack([found[each][0] for each in order]), np.stack([found[each][1] for each in order]))


def _pieces(result: RunResult) -> Iterator[SampledPart]:
    files = result.run.files
    if result.published is not None and result.keeps_published:
        yield from published_pieces(files, result.published.embeddings)
    yield from journal_pieces(files, result.entries)


def _pair_ids(piece: SampledPart) -> Iterator[str]:
    """Find items that should have both vectors, by columns that are quick to read."""
    rows = piece.read(["item_id", "segment", "modality", "caption"])
    is_first = pc.and_(pc.equal(rows["segment"], 0), pc.not_equal(rows["modality"], "text"))
    return iter(rows["item_id"].filter(pc.and_(is_first, pc.is_valid(rows["caption"]))).to_pylist())


def sessions_of(result: RunResult, item_ids: list[str]) -> dict[str, str | None]:
    """Session of the run whose rows of an item count, None where its published rows stay; not of retired items."""
    wanted = pa.array(item_ids, pa.string())
    whole = whole_among(result.whole, wanted)
    new = whole.filter(pc.greater(whole["num_vectors"], 0))
    gone = result.retired.filter(pc.is_in(result.retired, value_set=wanted)).to_pylist()
    published: dict[str, str | None] = dict.fromkeys(set(item_ids) - set(gone))
    return published | dict(zip(new["item_id"].to_pylist(), new["session"].to_pylist(), strict=True))


def _pairs_of(piece: SampledPart, counted: Mapping[str, str | None]) -> Iterator[tuple[str, Any, Any]]:
    """Read the pairs of the items' sessions (None: of the published table) that a part file has."""
    columns = ["item_id", "segment", "image_embedding", "text_embedding"]
    rows = piece.read(columns)
    has_both = pc.and_(pc.is_valid(rows["image_embedding"]), pc.is_valid(rows["text_embedding"]))
    rows = rows.filter(has_both)
    sessions = rows["session"].to_pylist() if "session" in rows.column_names else [None] * rows.num_rows
    images, texts = unpack_vectors(rows["image_embedding"]), unpack_vectors(rows["text_embedding"])
    for item_id, session, image, text in zip(rows["item_id"].to_pylist(), sessions, images, texts, strict=True):
        if item_id in counted and counted[item_id] == session:
            yield item_id, image, text
