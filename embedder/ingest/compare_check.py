"""Comparison of a run's new vectors with the published ones of another model, by the same captions.

The sample consists of items for which both models have an image and the same caption; each model ranks the images of
the sample by its own vectors.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from embedder.config_toml.sections import CompareConfig
from embedder.ingest.retrieval_check import MIN_PAIRS, NUM_PAIRS, SPARE, pair_ids, pairs_of, sessions_of
from embedder.ingest.run_result import RunResult
from embedder.retrieval.paired import PairedDifference, Thresholds, members_of, paired_differences
from embedder.retrieval.rank_metrics import best_ranks, score_ranks
from embedder.store.journal.hash_sample import SampledPart, hash_of, journal_pieces, lowest_keys, published_pieces
from embedder.store.schema import VECTOR_COLUMNS
from embedder.store.tables.tables import RecordTable

NO_GROUP = "(none)"


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
    after = _read(new, {item_id: session for item_id, session in sessions.items() if session is not None})
    before = _read(old, dict.fromkeys(after), *([config.group] if config.group else []))
    same = (each for each in after if each in before and before[each]["caption"] == after[each]["caption"])
    shared = sorted(same, key=hash_of)[:NUM_PAIRS]
    if len(shared) < MIN_PAIRS:
        return []
    captions = [after[each]["caption"] for each in shared]
    _, first, concepts = np.unique(captions, return_index=True, return_inverse=True)
    scores = [
        score_ranks(_ranks([side[each] for each in shared], concepts.astype(np.int64), first), config.metric)
        for side in (before, after)
    ]
    groups = {}
    if config.group is not None:
        values = [before[shared[number]][config.group] for number in first]
        names = [NO_GROUP if value is None or value == "" else str(value) for value in values]
        groups = members_of(names, np.arange(len(first)))
    return paired_differences(scores[0], scores[1], groups, thresholds(config))


def _ranks(pairs: list[dict[str, Any]], concepts: Any, asked: Any) -> Any:
    """Return the rank of the best right image of each different caption; int64 (Q,)."""
    images, texts = (np.stack([pair[side] for pair in pairs]) for side in VECTOR_COLUMNS)
    return best_ranks(texts[asked], concepts[asked], images, concepts)


def _read(pieces: Iterable[SampledPart], wanted: dict[str, str | None], *columns: str) -> dict[str, dict[str, Any]]:
    """Read the wanted items that have both vectors and a caption, by item id, as `pairs_of` does."""
    rows = (row for piece in pieces for row in pairs_of(piece, wanted, "caption", *columns))
    return {row["item_id"]: row for row in rows if row["caption"] is not None}
