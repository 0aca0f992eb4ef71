"""Evaluation of a published store: the model itself, its index, and the two together."""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from embedder.config import RunConfig
from embedder.errors import USER_MISTAKES, StoreError, check_argument
from embedder.installation import require
from embedder.observability.run_tracking import parameters_of
from embedder.observability.trackers import Tracker, track_run
from embedder.plugins.evaluate.common_images import CommonImages, best_items, ndcg
from embedder.plugins.evaluate.evaluate_outputs import TRACKER_NAME, evaluation_files, list_figures
from embedder.plugins.evaluate.evaluate_report import (
    ConfidenceInterval,
    Evaluation,
    GroupFigures,
    HardQuery,
    Latency,
    ModelFigures,
    QueryFigures,
    RerankFigures,
)
from embedder.plugins.evaluate.exact import ExactNeighbours, Ints, RelevantPairs, right_rows, search_exactly
from embedder.plugins.evaluate.index_recall import IndexAnswers, ask_index, index_figures
from embedder.plugins.evaluate.published_images import ImageTable
from embedder.plugins.evaluate.query_sets import (
    ONE_TOWER,
    OWN_CAPTIONS,
    QuerySet,
    check_counts,
    file_query_set,
    own_captions,
    read_query_file,
)
from embedder.plugins.evaluate.rerank_gain import measure_reranker
from embedder.plugins.evaluate.retrieval_metrics import by_group, mean, mean_reciprocal_rank, recalls
from embedder.plugins.evaluate.timing import time_each
from embedder.quantities import agree, plural
from embedder.redaction import mask
from embedder.retrieval.queries import SearchOptions
from embedder.retrieval.rerank import check_reranker
from embedder.retrieval.store_api import Store, open_store
from embedder.retrieval.store_follower import FollowingStore
from embedder.steps.stage_contract import Stage
from embedder.storage.atomic_write import atomic_write
from embedder.storage.printable import printable
from embedder.store.tables.models import check_has_vectors
from embedder.store.tables.tables import RecordTable

LOG = logging.getLogger(__name__)
# R@10 is known to +-0.02 at worst, and exact search of 1,000,000 images takes half a minute.
DEFAULT_NUM_CAPTIONS = 2000
KS = (1, 5, 10)
NUM_ENCODED = 200  # texts to time the encoder with
DEPTH = 10
NUM_HARD = 20


@dataclass(frozen=True)
class EvaluationOptions:
    """Queries of an evaluation, and how the figures are grouped.

    Attributes:
        queries: file of queries; None for the store's own captions.
        k: a depth to report, besides 1, 5 and 10.
        group: column to split by, of the file or of the embeddings table.
        num_queries: most queries; by default all of a file, and 2,000 captions.
        rerank: first hits of each query that `reranker` scores again, to measure what it brings.
        reranker: a `Stage` that is set up, as `Store.search` takes it.
        rerank_timeout_s: seconds that it has for a query.
    """

    queries: str | None = None
    k: int = 10
    group: str | None = None
    num_queries: int | None = None
    rerank: int | None = None
    reranker: Stage | None = None
    rerank_timeout_s: float = SearchOptions().rerank_timeout_s

    def __post_init__(self) -> None:
        """Refuse numbers of hits and queries below 1."""
        check_counts(k=self.k, num_queries=self.num_queries)

    @property
    def ks(self) -> list[int]:
        """Depths to report."""
        return sorted({*KS, self.k})


DEFAULT_OPTIONS = EvaluationOptions()


@dataclass(frozen=True)
class _SearchedQueries:
    """Queries and what was found for them: by exact search, and through the index unless there is none.

    `right_items` numbers the item of each answer of the queries among those of `images`, int64 (R,).
    """

    images: ImageTable
    query_set: QuerySet
    right_items: Ints
    exact: ExactNeighbours
    through_index: IndexAnswers | None


def evaluate(
    store: Store | RunConfig,
    options: EvaluationOptions = DEFAULT_OPTIONS,
    **keywords: Any,
) -> Evaluation:
    """Measure retrieval by exact search and through the index, recall of the index, speed and memory.

    Args:
        store: from `embedder.open_store`, or a configuration that names one, whose tracker gets the figures.
        options: see `EvaluationOptions`.
        keywords: fields of `EvaluationOptions`, which override those of `options`: `num_queries=500, group="modality"`.

    Raises:
        InstallationError: what encodes and draws is not installed.
        SourceError: the file of queries can't be read.
        ConfigError: it breaks a rule, or there is no such column to group by.
        StoreError: no image has a caption, or the model has only one tower, or no vectors.
    """
    require("embed", "embedder evaluate")
    options = replace(options, **keywords)
    kinds = (Store, FollowingStore, RunConfig)
    check_argument("embedder.evaluate: store", store, kinds, "a store, as embedder.open_store opens one")
    if isinstance(store, RunConfig):
        opened = open_store(store.required_store, model=store.main_model, servables=store.model_sections)
        return evaluate_tracked(opened, store, options)
    check_has_vectors(store.files, store.current)
    if store.info.searched == "text":
        raise StoreError(ONE_TOWER.format(address=store.files.address, side="vision"))
    reranking = _read_reranking(options)
    file = None if options.queries is None else read_query_file(options.queries, options.group)
    LOG.info("reading ids and queries")
    images = ImageTable(RecordTable(store.files, "embeddings", store.current.embeddings))
    if file is None:
        query_set = own_captions(store, options.num_queries or DEFAULT_NUM_CAPTIONS, options.group)
    else:
        query_set = file_query_set(file, store, images, options.num_queries, options.group)
    found = _search(store, images, query_set, max(options.ks))
    return _report(store, options, found, reranking)


def _search(store: Store, images: ImageTable, query_set: QuerySet, k: int) -> _SearchedQueries:
    """Search for `k` items of each query through the index, if there is one, and exactly."""
    right_items = images.numbers_of(pa.array(query_set.item_ids, pa.string()))
    right = right_rows(query_set.queries, right_items, images.items)
    answers, found = None, RelevantPairs(right.queries[:0], right.rows[:0])
    if store.current.index is not None:
        LOG.info(f"searching index {store.current.index}")
        answers = ask_index(store, store.current.index, images, query_set, right_items, k)
        found = answers.pairs()
    queries = plural(len(query_set.texts), "query", "queries")
    LOG.info(f"comparing {queries} with all vectors, of {plural(len(images), 'image')}")
    exact = search_exactly(query_set.vectors, images.blocks, images.items, right, k, found)
    return _SearchedQueries(images, query_set, right_items, exact, answers)


def _report(
    store: Store, options: EvaluationOptions, found: _SearchedQueries, reranking: SearchOptions | None
) -> Evaluation:
    """Make figures of what was found, and time the encoder."""
    query_set, exact, answers = found.query_set, found.exact, found.through_index
    encoding, failure = _time_encoding(store, query_set.texts[:NUM_ENCODED])
    return Evaluation(
        store=store.files.address,
        run_id=store.publication.run_id,
        embeddings_version=store.current.embeddings,
        model_fingerprint=store.info.model_fingerprint,
        evaluated_at=datetime.now(UTC).isoformat(timespec="seconds"),
        num_pictures=len(found.images),
        num_items=len(found.images.item_ids),
        queries=QueryFigures(
            source=query_set.source,
            num_queries=len(query_set.texts),
            num_answers=len(query_set.item_ids),
            num_unknown=query_set.num_unknown,
        ),
        model=ModelFigures(
            r_at=recalls(exact.ranks, options.ks), mrr=mean_reciprocal_rank(exact.ranks), ndcg_at_10=_ndcg(found)
        ),
        index=None if answers is None else index_figures(answers, exact, query_set.vectors, options.ks),
        rerank=_rerank_figures(store, options, reranking, query_set),
        encoding=encoding,
        groups=_group_figures(found, options.ks),
        hard=_hard(query_set.texts, exact.ranks),
        notes=[
            *_notes(query_set, options, has_index=answers is not None),
            *_cut_notes(store, query_set.texts),
            *failure,
        ],
    )


def _read_reranking(options: EvaluationOptions) -> SearchOptions | None:
    """Options of the searches with the re-ranker, which are checked before any search; None without one."""
    if options.reranker is None and options.rerank is None:
        return None
    wanted = SearchOptions(rerank=options.rerank, rerank_timeout_s=options.rerank_timeout_s)
    check_reranker(options.reranker, wanted.rerank)
    return replace(wanted, k=wanted.rerank or 1)


def _rerank_figures(
    store: Store, options: EvaluationOptions, wanted: SearchOptions | None, query_set: QuerySet
) -> RerankFigures | None:
    """Figures of the re-ranker; None without one."""
    if options.reranker is None or wanted is None:
        return None
    LOG.info(f"scoring the first {wanted.rerank} hits of {plural(len(query_set.texts), 'query', 'queries')} again")
    return measure_reranker(store, options.reranker, wanted, query_set, options.ks)


def _group_figures(found: _SearchedQueries, ks: list[int]) -> list[GroupFigures]:
    """Figures of each group of queries; none if they are not grouped."""
    queries = found.query_set
    if queries.groups is None:
        return []
    through_index = None if found.through_index is None else found.through_index.ranks
    return by_group(queries.queries, queries.groups, found.exact.ranks, through_index, ks)


def _ndcg(found: _SearchedQueries) -> ConfidenceInterval | None:
    """Mean nDCG@10 by exact search, for a file that grades its answers; the first of equal pairs counts."""
    query_set, images, right_items = found.query_set, found.images, found.right_items
    if query_set.gains is None:
        return None
    num_items = len(images.item_ids)
    _, first = np.unique(query_set.queries * num_items + right_items, return_index=True)
    right, gains = (query_set.queries[first], right_items[first]), np.array(query_set.gains)[first]
    items, _ = best_items(query_set.vectors, CommonImages(images, images.item_ids), right, num_items, DEPTH)
    return mean(ndcg(items, right, gains, num_items, DEPTH))


def _hard(texts: list[str], ranks: Ints) -> list[HardQuery]:
    """Queries whose right item is behind the tenth place, the latest first."""
    order = np.argsort(-ranks, kind="stable")[:NUM_HARD]
    return [HardQuery(query=texts[number], rank=int(ranks[number]) + 1) for number in order if ranks[number] >= DEPTH]


def _time_encoding(store: Store, texts: list[str]) -> tuple[Latency | None, list[str]]:
    """Time of encoding one text, or a note why it was not timed, such as a missing model."""
    try:
        return time_each(lambda text: store.encode_text([text]), texts), []
    except USER_MISTAKES as error:
        return None, [f"encoding was not timed: {error}"]


def _notes(query_set: QuerySet, options: EvaluationOptions, *, has_index: bool) -> list[str]:
    notes = []
    limit = options.num_queries or (DEFAULT_NUM_CAPTIONS if query_set.source == OWN_CAPTIONS else None)
    if limit == len(query_set.texts):
        asked = f"{plural(limit, 'query', 'queries')} {agree(limit, 'is', 'are')} asked"
        notes.append(f"at most {asked}, those with the lowest hashes; --num-queries asks more")
    if query_set.num_unknown:
        left_out = plural(query_set.num_unknown, "row")
        notes.append(f"{left_out} of the file left out, as the store has no image of the item")
    if not has_index:
        notes.append("there is no index: search is exact; `embedder index build` makes one")
    return notes


def _cut_notes(store: Store, texts: Iterable[str]) -> list[str]:
    """Return a line on the queries that are longer than the model's limit, if it encodes texts."""
    try:
        cut = [line for text in texts if (line := store.encoder.describe_cut(text)) is not None]
    except USER_MISTAKES:
        return []
    return [f"{plural(len(cut), 'query', 'queries')} cut, as {cut[0]}"] if cut else []


def evaluate_tracked(
    store: Store, config: RunConfig, options: EvaluationOptions, out: Path | None = None
) -> Evaluation:
    """Evaluate a store, and log to the tracker of `config`, with its keys as parameters; its run id goes to `out`."""
    with track_run(config.tracker, "embedder evaluate") as tracker:
        _begin(tracker, store, config, options, out)
        found = evaluate(store, options)
        tracker.log(dict(list_figures(found)), step=0)
        for step, point in enumerate(found.index.curve if found.index else ()):
            values = {"recall_at_10": point.recall_at_10.value, "p50_ms": point.p50_ms, "p99_ms": point.p99_ms}
            tracker.log({f"curve/{name}": value for name, value in values.items()}, step=step)
        tracker.attach(lambda: evaluation_files(found))
        tracker.end(succeeded=True)
    return found


def _begin(tracker: Tracker, store: Store, config: RunConfig, options: EvaluationOptions, out: Path | None) -> None:
    """Begin the tracker's run, and store each one's id with the other."""
    run_id = store.publication.run_id
    asked = {"queries": options.queries, "group": options.group, "num_queries": options.num_queries, "k": options.k}
    given = {f"evaluate.{name}": printable(mask(str(value))) for name, value in asked.items() if value is not None}
    tags = {
        "embedder.run_id": run_id,
        "embedder.store": printable(mask(store.files.address)),
        "embedder.kind": "evaluate",
        "embedder.model_fingerprint": store.info.model_fingerprint,
    }

    def write_id(tracker_id: str) -> None:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            with atomic_write(out / TRACKER_NAME) as file:
                file.write(json.dumps({"id": tracker_id}).encode() + b"\n")

    tracker.begin(f"evaluate {run_id}", parameters_of(config) | given, tags, write_id)
