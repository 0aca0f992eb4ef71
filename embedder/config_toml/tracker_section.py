"""Section `[tracker]`: where a team keeps its experiments."""

from typing import Literal, Self

from pydantic import Field, model_validator

from embedder.config_toml.section import ConfigSection

TrackerKind = Literal["mlflow", "wandb"]


class TrackerConfig(ConfigSection):
    """Tracker of experiments that a run is told to."""

    kind: TrackerKind = Field(description="mlflow (the extra `mlflow`), or wandb: Weights & Biases (the extra `wandb`)")
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind == "mlflow" and self.uri is None:
            raise ValueError('kind = "mlflow" needs uri: sqlite:////ABSOLUTE/FILE.db, or the address of a server')
        if self.kind == "mlflow" and (self.offline or self.folder is not None):
            raise ValueError(
                'kind = "mlflow" takes no offline and no folder; without a server write uri = "sqlite:///..."'
            )
        return self
