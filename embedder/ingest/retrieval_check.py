"""R@10 of captions for their own images, over a sample of the state that a run would publish.

The sample is kept next to the run's records. The next run adds its own new pairs and removes those that leave, instead
of reading the published table.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.ingest.run_result import RunResult
from embedder.retrieval.rank_metrics import retrieval_at
from embedder.store.journal.finished import whole_among
from embedder.store.journal.hash_sample import SampledPart, hash_of, journal_pieces, lowest_keys, published_pieces
from embedder.store.layout import PAIRS_FILE, PUBLISHED_FILE, Published, read_record, run_file
from embedder.store.publish.current import record_of
from embedder.store.schema import VECTOR_COLUMNS
from embedder.store.tables.arrow_tensors import pack_vectors, unpack_vectors

Floats = np.ndarray[Any, np.dtype[np.float32]]

NUM_PAIRS = 2048
SPARE = 2  # items in the sample may leave, or turn out to lack a side
MIN_PAIRS = 64  # R@10 of fewer is mostly luck
STANDARD_ERRORS = 2.0
BOUND = b"bound"


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


def retrieval_figure(pairs: CaptionPairs) -> float | None:
    """Compute R@10; None if there are too few pairs."""
    if len(pairs) < MIN_PAIRS:
        return None
    numbers = np.arange(len(pairs))
    return retrieval_at(pairs.texts, numbers, pairs.images, numbers, (10,))[10]


def recall_margin(recall: float, num_pairs: int) -> float:
    """Return the difference that chance may cause in a recall over this many pairs."""
    return STANDARD_ERRORS * math.sqrt(recall * (1 - recall) / max(num_pairs, 1))


@dataclass(frozen=True)
class _Sample:
    """Pairs with the lowest hashes of item ids.

    `pairs` maps item ids to image and text vectors, float32 (E,) each, in the order of the hashes. It is complete up to
    the hash `bound`; None means to the end.
    """

    pairs: dict[str, tuple[Any, Any]]
    bound: bytes | None

    @property
    def is_enough(self) -> bool:
        """Whether the pairs are those that the whole table would give."""
        return self.bound is None or len(self.pairs) >= NUM_PAIRS


def sample_pairs(result: RunResult) -> CaptionPairs:
    """Draw the pairs with the lowest hashes of item ids from the state that would be published, and keep them."""
    kept = _kept_sample(result)
    sample = None if kept is None else _update_sample(kept, result)
    if sample is None or not sample.is_enough:
        sample = _draw_sample(result, [*_published_pieces(result), *_new_pieces(result)], None)
    _keep(result, sample)
    vectors = list(sample.pairs.values())[:NUM_PAIRS]
    if not vectors:
        return CaptionPairs(np.empty((0, 0), np.float32), np.empty((0, 0), np.float32))
    return CaptionPairs(np.stack([image for image, _ in vectors]), np.stack([text for _, text in vectors]))


def forget_pairs(result: RunResult) -> None:
    """Delete the sample of the publication that this one has replaced; if no vector changed, it is passed on."""
    files, own = result.run.files, run_file(result.run.run_id, PAIRS_FILE)
    for run_id in _run_ids(result):
        path = run_file(run_id, PAIRS_FILE)
        if path != own and files.exists(path):
            if not files.exists(own):
                files.write(own, files.read(path))
            files.delete(path)


def _run_ids(result: RunResult) -> Iterator[str]:
    """Yield the runs whose sample may be of the published rows: the publishing run, and one that was compacted."""
    files, run_id = result.run.files, None if result.published is None else result.published.run_id
    while run_id is not None:
        yield run_id
        record = record_of(read_record(files.main, run_file(run_id, PUBLISHED_FILE), Published), files.model)
        run_id = record.previous if record is not None and record.kind == "compaction" else None


def _kept_sample(result: RunResult) -> _Sample | None:
    """Read the sample of what is published; None if there is none, or none of its rows stay."""
    if result.published is None or not result.keeps_published:
        return None
    for run_id in _run_ids(result):
        try:
            rows = result.run.files.read_table(run_file(run_id, PAIRS_FILE))
            bound = bytes.fromhex((rows.schema.metadata or {})[BOUND].decode()) or None
            vectors = zip(unpack_vectors(rows["image_embedding"]), unpack_vectors(rows["text_embedding"]), strict=True)
            return _Sample(dict(zip(rows["item_id"].to_pylist(), vectors, strict=True)), bound)
        except (FileNotFoundError, KeyError, ValueError, pa.ArrowException):  # a damaged one is redrawn
            continue
    return None


def _update_sample(kept: _Sample, result: RunResult) -> _Sample:
    """Derive the sample of what would be published from that of what is."""
    sessions = sessions_of(result, list(kept.pairs))
    stay = {each: pair for each, pair in kept.pairs.items() if each in sessions and sessions[each] is None}
    new = _draw_sample(result, _new_pieces(result), kept.bound)
    return _lowest(_Sample(stay | new.pairs, new.bound))


def _draw_sample(result: RunResult, pieces: list[SampledPart], bound: bytes | None) -> _Sample:
    """Draw a sample from part files, up to the hash `bound` (None: any); `result` says whose rows count."""
    keys = lowest_keys((pair_ids(piece) for piece in pieces), SPARE * NUM_PAIRS, bound)
    if len(keys) == SPARE * NUM_PAIRS:
        bound = hash_of(next(reversed(keys)))
    sessions = sessions_of(result, list(keys))
    found: dict[str, tuple[Any, Any]] = {}
    for number in sorted(set().union(*keys.values())) if keys else []:
        for row in pairs_of(pieces[number], sessions):
            found.setdefault(row["item_id"], tuple(row[name] for name in VECTOR_COLUMNS))
    return _lowest(_Sample(found, bound))


def _lowest(sample: _Sample) -> _Sample:
    """Return the pairs up to the bound, ordered by hash, and no more than are worth keeping."""
    bound = sample.bound
    order = sorted((each for each in sample.pairs if bound is None or hash_of(each) <= bound), key=hash_of)
    if len(order) > SPARE * NUM_PAIRS:
        order = order[: SPARE * NUM_PAIRS]
        bound = hash_of(order[-1])
    return _Sample({each: sample.pairs[each] for each in order}, bound)


def _keep(result: RunResult, sample: _Sample) -> None:
    present = np.ones(len(sample.pairs), bool)
    columns = {"item_id": pa.array(sample.pairs, pa.string())}
    for place, name in enumerate(VECTOR_COLUMNS):
        vectors = [pair[place] for pair in sample.pairs.values()]
        columns[name] = pack_vectors(np.stack(vectors) if vectors else np.empty((0, 0), np.float32), present)
    bound = (sample.bound or b"").hex()
    rows = pa.table(columns).replace_schema_metadata({BOUND: bound})
    result.run.files.write_table(run_file(result.run.run_id, PAIRS_FILE), rows)


def _published_pieces(result: RunResult) -> Iterator[SampledPart]:
    if result.published is not None and result.keeps_published:
        yield from published_pieces(result.run.files, result.published.embeddings)


def _new_pieces(result: RunResult) -> list[SampledPart]:
    return list(journal_pieces(result.run.files, result.entries))


def pair_ids(piece: SampledPart) -> Iterator[str]:
    """Find items that should have both vectors, by columns that are quick to read."""
    rows = piece.read(["item_id", "segment", "modality", "caption"])
    is_first = pc.and_(pc.equal(rows["segment"], 0), pc.not_equal(rows["modality"], "text"))
    return iter(rows["item_id"].filter(pc.and_(is_first, pc.is_valid(rows["caption"]))).to_pylist())


def sessions_of(result: RunResult, item_ids: list[str]) -> dict[str, str | None]:
    """Return the session of the run whose rows of an item count, None if its published rows stay; no retired items."""
    wanted = pa.array(item_ids, pa.string())
    whole = whole_among(result.whole, wanted)
    new = whole.filter(pc.greater(whole["num_vectors"], 0))
    gone = result.retired.filter(pc.is_in(result.retired, value_set=wanted)).to_pylist()
    published: dict[str, str | None] = dict.fromkeys(set(item_ids) - set(gone))
    return published | dict(zip(new["item_id"].to_pylist(), new["session"].to_pylist(), strict=True))


def pairs_of(piece: SampledPart, counted: Mapping[str, str | None], *columns: str) -> Iterator[dict[str, Any]]:
    """Read the pairs of the items' sessions (None: of the published table) from a part file, with further columns.

    Yields a row of each first segment with both vectors, float32 (E,), under the names of their columns.
    """
    rows = piece.read(list(dict.fromkeys(["item_id", "segment", *VECTOR_COLUMNS, *columns])))
    is_pair = pc.and_(pc.is_in(rows["item_id"], pa.array(counted, pa.string())), pc.equal(rows["segment"], 0))
    for name in VECTOR_COLUMNS:
        is_pair = pc.and_(is_pair, pc.is_valid(rows[name]))
    rows = rows.filter(is_pair)
    images, texts = unpack_vectors(rows["image_embedding"]), unpack_vectors(rows["text_embedding"])
    for row, image, text in zip(rows.drop_columns([*VECTOR_COLUMNS]).to_pylist(), images, texts, strict=True):
        if counted[row["item_id"]] == row.get("session"):
            yield row | {"image_embedding": image, "text_embedding": text}
