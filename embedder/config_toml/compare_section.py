"""Section `[compare]` of a configuration: when another model may take the place of the one that is published."""

from typing import Literal

from pydantic import Field

from embedder.config_toml.section import ConfigSection

Metric = Literal["R@1", "R@5", "R@10", "MRR", "nDCG@10"]


class CompareConfig(ConfigSection):
    """Rule by which `embedder compare` judges two models, and a refresh with another model before it publishes."""

    required: bool = Field(
        False, description="whether a refresh with another model must pass the comparison before it publishes"
    )
    metric: Metric = Field("R@10", description="metric that the verdict looks at: R@1, R@5, R@10, MRR or nDCG@10")
    group: str | None = Field(
        None, description="column of the embeddings table whose values are groups of queries, each compared for itself"
    )
    max_drop: float = Field(0.02, ge=0, le=1, description="loss that is allowed in any group: 0.02 is two points")
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="of the intervals of all groups together; many groups have wider ones"
    )
    prove: bool = Field(
        False,
        description="whether it must be shown that no group lost more; else what is shown to have lost more is refused",
    )
