"""Result of an evaluation, as it stands in evaluation.json."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from embedder.evaluation.intervals import ConfidenceInterval
from embedder.evaluation.metrics import GroupFigures
from embedder.evaluation.sweep import CurvePoint
from embedder.evaluation.timing import Latency, Throughput


class ReportSection(BaseModel):
    """Section of the report."""

    model_config = ConfigDict(frozen=True)


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
    one_thread: Latency = Field(description="search alone, without encoding")
    throughput: list[Throughput]
    curve: list[CurvePoint]


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
    encoding: Latency | None = Field(description="of one text, apart from search; none where it could not be timed")
    groups: list[GroupFigures]
    notes: list[str] = Field(description="limits of the evaluation: what was left out, and why")
