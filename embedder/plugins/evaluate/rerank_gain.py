"""What a re-ranker brings: ranks of the right items among the first hits, before and after, and its time."""

import time
from dataclasses import replace

import numpy as np

from embedder.plugins.evaluate.evaluate_report import ConfidenceInterval, RerankFigures
from embedder.plugins.evaluate.exact import Ints
from embedder.plugins.evaluate.query_sets import QuerySet
from embedder.plugins.evaluate.retrieval_metrics import Values, mean, recalls
from embedder.plugins.evaluate.timing import latency_of
from embedder.retrieval.hit import Hit
from embedder.retrieval.queries import SearchOptions
from embedder.retrieval.rank_metrics import reciprocal_ranks
from embedder.retrieval.rerank import LATE, REFUSED
from embedder.retrieval.store_api import Store
from embedder.steps.stage_contract import Stage

NOT_FOUND = np.iinfo(np.int64).max - 1


def measure_reranker(
    store: Store, stage: Stage, options: SearchOptions, query_set: QuerySet, ks: list[int]
) -> RerankFigures:
    """Search for each query with the re-ranker, as `Store.search` does; `options` say how many hits it scores."""
    right: list[set[str]] = [set() for _ in query_set.texts]
    for number, item_id in zip(query_set.queries.tolist(), query_set.item_ids, strict=True):
        right[number].add(item_id)
    before, after, seconds, warnings = [], [], [], []
    for text, items in zip(query_set.texts, right, strict=True):
        began_s = time.perf_counter()
        hits = store.search(text, replace(options, rerank=0))
        before.append(_rank_of(items, hits))
        hits.rerank(stage, options)
        seconds.append(time.perf_counter() - began_s)
        after.append(_rank_of(items, hits))
        warnings += hits.warnings
    ranks = np.array(before, np.int64), np.array(after, np.int64)
    return RerankFigures(
        num_hits=options.rerank or 0,
        timeout_s=options.rerank_timeout_s,
        num_queries=len(after),
        num_late=sum(line.startswith(LATE) for line in warnings),
        num_refused=sum(line.startswith(REFUSED) for line in warnings),
        r_at_before=recalls(ranks[0], ks),
        r_at=recalls(ranks[1], ks),
        mrr_before=_reciprocal_mean(ranks[0]),
        mrr=_reciprocal_mean(ranks[1]),
        seconds=latency_of(seconds),
    )


def _rank_of(right: set[str], hits: list[Hit]) -> int:
    """Number of wrong hits before the first right one."""
    return next((rank for rank, hit in enumerate(hits) if hit.item_id in right), NOT_FOUND)


def _reciprocal_mean(ranks: Ints) -> ConfidenceInterval:
    reciprocal: Values = np.where(ranks == NOT_FOUND, 0.0, reciprocal_ranks(ranks))
    return mean(reciprocal)
