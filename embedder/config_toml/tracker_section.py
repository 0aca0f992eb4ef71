"""Section `[tracker]`: where a team keeps its experiments."""

from typing import Self

from pydantic import Field, model_validator

from embedder.config_toml.section import ConfigSection
from embedder.entry_points import TRACKERS, find_plugins, load_plugin


class TrackerConfig(ConfigSection):
    """Tracker of experiments that a run is told to."""

    kind: str = Field(
        description="mlflow (the extra `mlflow`), wandb: Weights & Biases (the extra `wandb`), or another package's"
    )
    uri: str | None = Field(
        None,
        min_length=1,
        description="mlflow: sqlite:////ABSOLUTE/FILE.db or the server's address; wandb: a server of your own",
    )
    experiment: str = Field("embedder", min_length=1, description="experiment of MLflow, project of W&B")
    offline: bool = Field(False, description="wandb: write to `folder` alone; `wandb sync` sends it later")
    pictures: bool = Field(
        True, description="whether `embed` and `refresh` add a contact sheet of up to 20 items that they embedded"
    )
    folder: str | None = Field(None, min_length=1, description="wandb: folder for its files; left out: ./wandb")
    options: dict[str, str] = Field({}, description="settings of a tracker of another package, as it names them")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind not in (known := find_plugins(TRACKERS)):
            raise ValueError(f"kind = {self.kind!r}: there is no such tracker; there are {', '.join(known) or 'none'}")
        tracker = load_plugin(TRACKERS, self.kind, "[tracker] kind")
        if hasattr(tracker, "check"):
            tracker.check(self)
        return self
