"""Records of a run's report about its plan."""

from pydantic import BaseModel, ConfigDict


class Expected(BaseModel):
    """Prediction of this run by the costs, at the mix of items that it met."""

    model_config = ConfigDict(frozen=True)

    source: str
    """`measured` or `estimated` costs."""
    items_per_s: float
    bottleneck: str
    seconds_per_item: dict[str, float]
    """By step; of one replica of a stage, CPU seconds of the others."""


class BetterPlan(BaseModel):
    """A cut that would have been faster."""

    model_config = ConfigDict(frozen=True)

    path: str
    """The plan file."""
    gain: float
    """Predicted items a second over those predicted for the cut that ran."""
    reason: str


class Review(BaseModel):
    """Review of a run's plan."""

    model_config = ConfigDict(frozen=True)

    images_per_item: float
    captions_per_item: float
    caption_tokens: int
    """Each caption counted as long as the longest in its batch."""
    observed_seconds_per_item: dict[str, float]
    """By step: CPU seconds of one item; of a stage on a GPU or with several threads, seconds of a replica."""
    expected: Expected | None = None
    better: BetterPlan | None = None
