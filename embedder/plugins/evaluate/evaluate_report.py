"""Result of an evaluation, as in evaluation.json."""

from typing import Literal

from pydantic import Field

from embedder.report.report_schema import ReportSection

SMALL_GROUP = 30  # queries; a share of fewer is known to +-0.15 at best


class ConfidenceInterval(ReportSection):
    """A figure with its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Latency(ReportSection):
    """Latency of queries asked one after another."""

    p50_ms: float
    p99_ms: float
    queries_per_s: float
    num_queries: int = Field(description="that were timed; p99 of fewer than 100 is the slowest")


class Throughput(ReportSection):
    """Queries per second, single and in batches."""

    num_threads: int
    single_queries_per_s: float = Field(description="each thread asks one query after another, with one thread each")
    batch_queries_per_s: float = Field(description="all queries in one call on all the threads")


class QueryFigures(ReportSection):
    """Queries of the evaluation."""

    source: str = Field(description="`captions of the store`, or the file")
    num_queries: int
    num_answers: int = Field(description="right items, of all queries")
    num_unknown: int = Field(description="rows of the file whose item has no image in the store; left out")


class ModelFigures(ReportSection):
    """Figures of the model: exact search over all images."""

    r_at: dict[int, ConfidenceInterval] = Field(description="share of queries with a right item among the best k")
    mrr: ConfidenceInterval = Field(description="mean of 1/rank of the best right item, over whole rankings")
    ndcg_at_10: ConfidenceInterval | None = Field(
        None, description="where the file grades its answers, or is a log of clicks; else none"
    )


class RerankFigures(ReportSection):
    """What a re-ranker brings, over the same first hits of each query; what is beyond them counts as not found."""

    num_hits: int = Field(description="first hits of a query that it scored again")
    timeout_s: float = Field(description="seconds that it had for a query")
    num_queries: int
    num_late: int = Field(description="queries that it had no time for: they count in their first order")
    num_refused: int = Field(0, description="queries too long for it: they count in their first order, too")
    r_at_before: dict[int, ConfidenceInterval] = Field(description="R@k of the first order, as searches answer it")
    r_at: dict[int, ConfidenceInterval] = Field(description="R@k of its order")
    mrr_before: ConfidenceInterval
    mrr: ConfidenceInterval
    seconds: Latency = Field(description="of a query, with its search, its images and its scores")


class CurvePoint(ReportSection):
    """One search setting of the index, measured."""

    parameters: dict[str, int] = Field(description="of the search; what was built stays the same")
    is_published: bool = Field(description="searches use this setting")
    recall_at_10: ConfidenceInterval = Field(description="share of the exact top ten found")
    p50_ms: float = Field(description="of one query, one thread")
    p99_ms: float
    queries_per_s: float


class IndexFigures(ReportSection):
    """Figures of the published index."""

    number: int
    design: str = Field(description="its design, as FAISS's index_factory writes it")
    parameters: dict[str, int] = Field(description="effort of a search")
    num_vectors: int = Field(description="that a search may find")
    num_masked: int = Field(description="rows that it holds besides, removed since it was built")
    r_at: dict[int, ConfidenceInterval] = Field(description="R@k end to end")
    recall_at: dict[int, ConfidenceInterval] = Field(description="share of the exact top k rows that the index found")
    size_bytes: int = Field(description="its files")
    memory_bytes: int = Field(description="of the FAISS file, all of it read")
    resident_bytes: int = Field(description="growth of this process, opened and searched with all queries")
    one_thread: Latency = Field(description="only the search, without encoding")
    throughput: list[Throughput]
    curve: list[CurvePoint]


class GroupFigures(ReportSection):
    """Figures of a group of queries, over all images."""

    name: str
    num_queries: int
    is_small: bool = Field(description=f"fewer than {SMALL_GROUP} queries: mostly luck")
    r_at: dict[int, ConfidenceInterval] = Field(description="R@k of the model: exact search")
    mrr: ConfidenceInterval
    r_at_through_index: dict[int, ConfidenceInterval] | None = Field(description="none where the store has no index")


class HardQuery(ReportSection):
    """Query that the model answers late."""

    query: str
    rank: int = Field(description="place of its best right item, from 1; with none, one more than there are items")


class Evaluation(ReportSection):
    """Whole report; intervals are of 95 %."""

    format_version: Literal[1] = 1
    store: str
    run_id: str = Field(description="whose publication was evaluated")
    embeddings_version: int
    model_fingerprint: str
    evaluated_at: str = Field(description="UTC, ISO 8601")
    num_pictures: int = Field(description="images and video segments that were searched")
    num_items: int = Field(description="items that these belong to")
    queries: QueryFigures
    model: ModelFigures
    index: IndexFigures | None = Field(description="none where the store has none: then search is exact")
    rerank: RerankFigures | None = Field(None, description="none where it was evaluated without a re-ranker")
    encoding: Latency | None = Field(description="of one text, apart from search; none where it could not be timed")
    groups: list[GroupFigures]
    hard: list[HardQuery] = Field(
        [], description="queries whose right item is behind the tenth place, the latest first"
    )
    notes: list[str] = Field(description="limits of the evaluation: what was left out, and why")
