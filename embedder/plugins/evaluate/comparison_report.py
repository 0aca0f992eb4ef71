"""Result of a comparison of two models, as in comparison.json."""

from typing import Literal

from pydantic import Field

from embedder.config_toml.sections import Metric
from embedder.report.report_schema import ReportSection

Finding = Literal["equal", "better", "worse", "too few"]


class ComparedSide(ReportSection):
    """One of the two: what it is, and what its reports hold of its cost."""

    name: str = Field(description="as it was given")
    store: str
    run_id: str = Field(description="whose publication it is")
    model: str
    model_fingerprint: str
    num_items: int = Field(description="items with an image")
    vector_width: int
    built_by: str | None = Field(description="run whose report the next figures are of; none where there is no report")
    num_embedded: int | None = Field(description="items of that run")
    items_per_s: float | None
    cost_per_million: float | None = Field(description="of a million items, by the prices of that run")
    currency: str | None
    peak_memory_bytes: int | None = Field(description="of all processes of that run")
    index: int | None = Field(description="number of the index; none where search is exact")
    index_design: str | None
    index_recall_at_10: float | None = Field(description="share of the exact ten nearest that the index finds")
    index_memory_bytes: int | None


class FigureDifference(ReportSection):
    """Difference of a metric over the same queries; its interval is of the confidence asked for."""

    name: str = Field(description="of the group; `(all)` for all queries")
    num_queries: int
    before: float
    after: float
    difference: float = Field(description="second less first")
    low: float
    high: float
    verdict: Finding = Field(description="equal: no difference is shown")
    fails: bool = Field(description="it breaks the rule, which looks at the groups of one metric")
    power: float = Field(description="probability that a true loss of max_drop would be shown")
    detectable: float = Field(description="loss that would be shown with a probability of 0.8")


class ComparedAnswer(ReportSection):
    """Item among the best of one side."""

    item_id: str
    uri: str = Field("", exclude=True, description="not written down: an address of the web may bear a secret")
    at_s: float | None = Field(None, description="of a clip, the second that its image is of")
    score: float | None = Field(description="cosine with the query; none of a right item that is shown next to it")
    is_right: bool


class ComparedQuery(ReportSection):
    """Query, and where its right item stands by either side."""

    query: str
    right: list[ComparedAnswer] = Field(description="right items, the first few")
    rank_before: int = Field(description="place of the best right item, from 1")
    rank_after: int
    before: list[ComparedAnswer] = Field(description="the best items of the first side")
    after: list[ComparedAnswer]


class Comparison(ReportSection):
    """Whole report: `before` is the first side, `after` the second."""

    format_version: Literal[1] = 1
    before: ComparedSide
    after: ComparedSide
    compared_at: str = Field(description="UTC, ISO 8601")
    queries: str = Field(description="`captions of the store`, or the file")
    num_queries: int
    num_answers: int = Field(description="right items, of all queries")
    num_items: int = Field(description="items that both have an image of: those that are searched")
    metric: Metric = Field(description="that the verdict looks at")
    max_drop: float
    confidence: float
    prove: bool
    metrics: list[FigureDifference] = Field(description="of all queries, by metric; each interval holds for itself")
    groups: list[FigureDifference] = Field(description="by group, all queries first; the intervals hold together")
    kept_of_top_ten: float = Field(description="share of the first side's best ten that are among the second's")
    same_first: float = Field(description="share of queries whose best item is the same")
    wins: list[ComparedQuery] = Field(description="queries that gained most")
    losses: list[ComparedQuery] = Field(description="queries that lost most")
    hard: list[ComparedQuery] = Field(description="queries that both answer worst")
    passed: bool
    verdict: str = Field(description="one line")
    notes: list[str] = Field(description="limits of the comparison: what was left out, and why")
