"""A run that may start: everything is read and checked, nothing is learnt yet."""

from dataclasses import dataclass
from typing import Any

from embedder.engine.choose_engine import EngineChoice
from embedder.training.batches import SamplerConfig
from embedder.training.config import TrainConfig
from embedder.training.examples import ExampleSpec
from embedder.training.items import Items
from embedder.training.outputs import Outputs
from embedder.training.progress import TrainProgress
from shards.training.trainer import Trainer


@dataclass(frozen=True)
class PreparedTraining:
    """What the run works on and with.

    Attributes:
        trainer: takes the steps; with several workers it stands for theirs, and only writes files.
    """

    config: TrainConfig
    outputs: Outputs
    train: Items
    held_out: Items
    trainer: Trainer
    spec: ExampleSpec
    standing: TrainProgress
    identity: dict[str, Any]
    choice: EngineChoice

    @property
    def draw(self) -> SamplerConfig:
        """What decides the batches."""
        return SamplerConfig(self.config.batch_size, self.config.captions_per_picture, self.config.train.seed)
