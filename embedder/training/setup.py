"""Training run before its first step: everything is read and checked."""

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
    """Inputs and state of a run.

    Attributes:
        config: the run.
        outputs: its files.
        train: items to train on.
        held_out: items to measure on.
        trainer: takes the steps; with several workers it only writes files.
        spec: of the decode tasks.
        progress: so far.
        identity: what a resumption must have in common with it.
        choice: the engine that decodes.
    """

    config: TrainConfig
    outputs: Outputs
    train: Items
    held_out: Items
    trainer: Trainer
    spec: ExampleSpec
    progress: TrainProgress
    identity: dict[str, Any]
    choice: EngineChoice

    @property
    def sampler(self) -> SamplerConfig:
        """Settings that decide the batches."""
        return SamplerConfig(self.config.batch_size, self.config.captions_per_picture, self.config.train.seed)
