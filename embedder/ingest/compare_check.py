"""Comparison of a run's new vectors with the published ones of another model, by the same captions.

The sample consists of items for which both models have an image and the same caption; each model ranks the images of
the sample by its own vectors.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.config_toml.sections import CompareConfig
from embedder.ingest.retrieval_check import MIN_PAIRS, NUM_PAIRS, SPARE, pair_ids, sessions_of
from embedder.ingest.run_result import RunResult
from embedder.retrieval.paired import PairedDifference, Thresholds, members_of, paired_differences
from embedder.retrieval.rank_metrics import best_ranks, score_ranks
from embedder.store.journal.hash_sample import SampledPart, hash_of, journal_pieces, lowest_keys, published_pieces
from embedder.store.tables.arrow_tensors import unpack_vectors
from embedder.store.tables.tables import RecordTable

NO_GROUP = "(none)"


@dataclass(frozen=True)
class _Pair:
    """Caption and vectors of one item by one model, and its group."""

    caption: str
    image: Any
    text: Any
    group: str = NO_GROUP


def thresholds(config: CompareConfig) -> Thresholds:
    """Return the rule for the verdict."""
    return Thresholds(config.max_drop, config.confidence, config.prove)


def lacks_group(result: RunResult, group: str | None) -> bool:
    """Whether the published table has no column to group by."""
    if group is None or result.published is None:
        return False
    schema = RecordTable(result.run.files, "embeddings", result.published.embeddings).schema
    return schema is None or group not in schema.names


def compare_with_published(result: RunResult, config: CompareConfig) -> list[PairedDifference]:
    """Compare what would be published with what is published, over all captions of the sample and in each group.

    Returns all queries first; nothing if there are too few, or nothing is published.
    """
    if result.published is None:
        return []
    files = result.run.files
    new, old = list(journal_pieces(files, result.entries)), list(published_pieces(files, result.published.embeddings))
    ids = list(lowest_keys((pair_ids(piece) for piece in new), SPARE * NUM_PAIRS))
    sessions = sessions_of(result, ids)
    after = _read(new, {item_id: session for item_id, session in sessions.items() if session is not None}, None)
    before = _read(old, dict.fromkeys(after), config.group)
    same = (each for each in after if each in before and before[each].caption == after[each].caption)
    shared = sorted(same, key=hash_of)[:NUM_PAIRS]
    if len(shared) < MIN_PAIRS:
        return []
    captions = [after[each].caption for each in shared]
    _, first, concepts = np.unique(captions, return_index=True, return_inverse=True)
    scores = [
        score_ranks(_ranks([side[each] for each in shared], concepts.astype(np.int64), first), config.metric)
        for side in (before, after)
    ]
    groups = {}
    if config.group is not None:
        groups = members_of([before[shared[number]].group for number in first], np.arange(len(first)))
    return paired_differences(scores[0], scores[1], groups, thresholds(config))


def _ranks(pairs: list[_Pair], concepts: Any, asked: Any) -> Any:
    """Return the rank of the best right image of each different caption; int64 (Q,)."""
    images, texts = np.stack([pair.image for pair in pairs]), np.stack([pair.text for pair in pairs])
    return best_ranks(texts[asked], concepts[asked], images, concepts)


def _read(pieces: Iterable[SampledPart], wanted: dict[str, str | None], group: str | None) -> dict[str, _Pair]:
    """Read the first segments of the wanted items that have both vectors, by item id.

    `wanted` has the session of the run whose row of an item counts; None means any.
    """
    found: dict[str, _Pair] = {}
    ids = pa.array(wanted, pa.string())
    for piece in pieces:
        columns = ["item_id", "segment", "caption", "image_embedding", "text_embedding"]
        rows = piece.read([*columns, *({group} - set(columns) if group else ())])
        is_wanted = pc.and_(pc.is_in(rows["item_id"], value_set=ids), pc.equal(rows["segment"], 0))
        for name in columns[2:]:
            is_wanted = pc.and_(is_wanted, pc.is_valid(rows[name]))
        rows = rows.filter(is_wanted)
        sessions = rows["session"].to_pylist() if "session" in rows.column_names else [None] * rows.num_rows
        groups = rows[group].to_pylist() if group else [None] * rows.num_rows
        images, texts = unpack_vectors(rows["image_embedding"]), unpack_vectors(rows["text_embedding"])
        facts = zip(rows["item_id"].to_pylist(), sessions, rows["caption"].to_pylist(), groups, strict=True)
        for number, (item_id, session, caption, value) in enumerate(facts):
            if wanted[item_id] == session:
                name = NO_GROUP if value is None or value == "" else str(value)
                found[item_id] = _Pair(caption, images[number], texts[number], name)
    return found
