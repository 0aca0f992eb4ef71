"""Measurements of the published index: recall and latency at its own search setting and at others, and memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from embedder.engine.hardware import num_cpus
from embedder.evaluation.exact import ExactNeighbours, Ints, RelevantPairs
from embedder.evaluation.images import ImageTable
from embedder.evaluation.index_recall import IndexedItems, find_items, found_shares, ranks_among
from embedder.evaluation.intervals import ConfidenceInterval, mean
from embedder.evaluation.metrics import recalls
from embedder.evaluation.report import IndexFigures
from embedder.evaluation.sweep import CurvePoint, SearchSetting, settings
from embedder.evaluation.timing import Latency, time_each, time_throughput
from embedder.retrieval.store_api import Store
from embedder.store_index.versions import open_version
from index.search import Index
from index.vectors import Floats

CURVE_DEPTH = 10


@dataclass(frozen=True)
class EffortTrial:
    """One setting of the index, timed.

    Attributes:
        setting: of the search.
        latency: of one query.
        rows: int64 (Q, k), rows of the table found, -1 for none.
    """

    setting: SearchSetting
    latency: Latency
    rows: Ints


@dataclass(frozen=True)
class IndexAnswers:
    """Answers of the index to all queries.

    Attributes:
        number: version of the index.
        index: opened.
        resident_bytes: growth of this process, by opening the index and searching it.
        ranks: int64 (Q,), wrong items before the right one among the hits; the number of items where it was not.
        rows: int64 (Q, k), rows of the table that a plain search found.
        trials: the settings of the curve.
    """

    number: int
    index: Index
    resident_bytes: int
    ranks: Ints
    rows: Ints
    trials: list[EffortTrial]

    def pairs(self) -> RelevantPairs:
        """Pairs of each query and a row found, whose exact scores are wanted."""
        rows = self._all_rows()
        return RelevantPairs(np.repeat(np.arange(len(rows)), rows.shape[1]), rows.reshape(-1))

    def recall_at(self, exact: ExactNeighbours, ks: Sequence[int]) -> dict[int, ConfidenceInterval]:
        """recall@k of the published setting, by k."""
        scores = exact.asked_scores.reshape(len(self.rows), -1)
        return {k: mean(found_shares(scores, exact, k)) for k in ks}

    def curve(self, exact: ExactNeighbours) -> list[CurvePoint]:
        """recall@10 and latency of each setting."""
        scores = exact.asked_scores.reshape(len(self.rows), -1)
        points, start = [], self.rows.shape[1]
        for trial in self.trials:
            own = scores[:, start : start + trial.rows.shape[1]]
            start += trial.rows.shape[1]
            points.append(
                CurvePoint(
                    parameters=trial.setting.parameters,
                    is_published=trial.setting.is_published,
                    recall_at_10=mean(found_shares(own, exact, CURVE_DEPTH)),
                    p50_ms=trial.latency.p50_ms,
                    p99_ms=trial.latency.p99_ms,
                    queries_per_s=trial.latency.queries_per_s,
                )
            )
        return points

    def _all_rows(self) -> Ints:
        return np.hstack([self.rows, *(trial.rows for trial in self.trials)])


def ask_index(
    store: Store, number: int, images: ImageTable, vectors: Floats, queries: Ints, right_items: Ints, depth: int
) -> IndexAnswers:
    """Open the index and search it with all queries.

    Args:
        store: of the index.
        number: its version.
        images: the rows of the table.
        vectors: float32 (Q, E).
        queries: int64 (R,), the query of each right answer.
        right_items: int64 (R,), its item.
        depth: the deepest k that is reported.
    """
    import index.faiss_build  # noqa: F401  # what FAISS itself takes is not the index's

    before = psutil.Process().memory_info().rss
    opened = open_version(store.files, number, store.info.model_fingerprint)
    hits = opened.search(vectors, depth)
    resident = psutil.Process().memory_info().rss - before
    rows = IndexedItems(opened, images)
    num_items = len(images.item_ids)
    # One more than is reported: where the right item ties with all that follow, that must be seen.
    scores, items = find_items(opened.search, vectors, rows, depth + 1, len(opened))
    return IndexAnswers(
        number=number,
        index=opened,
        resident_bytes=max(0, resident),
        ranks=ranks_among(scores, items, queries, right_items, num_items),
        rows=rows.table_rows(hits.rows),
        trials=[_try(opened, setting, vectors, rows) for setting in settings(opened.manifest)],
    )


def _try(index: Index, setting: SearchSetting, vectors: Floats, rows: IndexedItems) -> EffortTrial:
    one_by_one = [vectors[number : number + 1] for number in range(len(vectors))]
    latency = time_each(lambda query: setting.search(index, query, CURVE_DEPTH, num_threads=1), one_by_one)
    return EffortTrial(setting, latency, rows.table_rows(setting.search(index, vectors, CURVE_DEPTH).rows))


def index_figures(answers: IndexAnswers, exact: ExactNeighbours, vectors: Floats, ks: Sequence[int]) -> IndexFigures:
    """Collect the figures, and time searches at the usual depth.

    Args:
        answers: of the index.
        exact: results of exact search.
        vectors: float32 (Q, E).
        ks: depths of R@k and recall@k.
    """
    index, manifest = answers.index, answers.index.manifest

    def search(queries: Floats, num_threads: int) -> object:
        return index.search(queries, CURVE_DEPTH, num_threads=num_threads)

    curve = answers.curve(exact)
    published = next(trial.latency for trial in answers.trials if trial.setting.is_published)
    return IndexFigures(
        number=answers.number,
        design=manifest.design,
        parameters=manifest.parameters,
        num_vectors=len(index),
        r_at=recalls(answers.ranks, ks),
        recall_at=answers.recall_at(exact, ks),
        num_masked=manifest.num_masked,
        size_bytes=manifest.size_bytes,
        memory_bytes=manifest.memory_bytes,
        resident_bytes=answers.resident_bytes,
        one_thread=published,
        throughput=[time_throughput(search, vectors, number) for number in sorted({1, num_cpus()})],
        curve=curve,
    )
