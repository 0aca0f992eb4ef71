"""Phase 1: the ViT learns to tell the concepts apart; small images first, then larger ones, then of more styles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from demo_recipe.drawings import Concept, Drawings, learnt_and_held_out
from demo_recipe.more_styles import MORE_STYLES
from demo_recipe.training import scaled, train
from embedder.plugins.train.trainer.batch import TrainBatch
from embedder.plugins.train.trainer.export import export_model
from embedder.plugins.train.trainer.settings import AugmentSettings, TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer
from embedder.retrieval.rank_metrics import retrieval_at
from shards.config import ModelConfig
from shards.preprocess import PreprocessConfig
from shards.towers.albert import AlbertTower
from shards.towers.vit import VitTower

BATCH_SIZE = 128
CHECKPOINT_STEPS = 500
POSITIONS = "vision.pos_embed"

CONFIG = ModelConfig(
    name="demo-emoji",
    trained=False,
    embedding_dim=192,
    vision=VitTower(
        image_size=48,
        patch_size=8,
        stem="conv",
        stem_channels=(32, 64, 128),
        stem_blocks=(0, 1, 2),
        width=192,
        depth=4,
        num_heads=3,
        class_token=False,
        pool="avg",
    ),
    text=AlbertTower(
        vocab_size=4000,
        embedding_size=128,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=64,
        pool="mean",
    ),
    preprocess=PreprocessConfig(image_size=48, resize="squash", max_caption_tokens=64),
)
AUGMENTATION = AugmentSettings(
    rotate_deg=15,
    scale=0.2,
    translate=0.1,
    shear=0.1,
    brightness=0.2,
    contrast=0.3,
    saturation=0.5,
    hue=0.04,
    shade=0.3,
    grey=0.1,
    erase=0.4,
)
SMALL = TrainSettings(
    loss="concepts",
    num_concepts=1,  # set when the data is known
    what="text_frozen",
    learning_rate=1.5e-3,
    final_learning_rate=0.4,
    weight_decay=0.05,
    warmup_steps=200,
    num_steps=6000,
    ema_decay=0.998,
    dtype="bfloat16",
    max_logit_scale=30,
    label_smoothing=0.05,
    patch_dropout=0.25,
    augmentation=AUGMENTATION,
)


@dataclass(frozen=True)
class Part:
    """A training of the picture tower.

    Attributes:
        image_size: side of the images in px.
        settings: of the training.
        more_styles: styles that are learnt from beside the four that say which concepts there are.
        lengths: steps of several trainings that begin alike; their weights and those that they began with are averaged.
    """

    image_size: int
    settings: TrainSettings
    more_styles: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()

    def trainings(self, name: str) -> dict[str, TrainSettings]:
        """Settings of each training, by the name of its checkpoint."""
        if not self.lengths:
            return {name: self.settings}
        return {f"{name}-{steps}": self.settings.model_copy(update={"num_steps": steps}) for steps in self.lengths}


LARGER = SMALL.model_copy(
    update={
        "learning_rate": 6e-4,
        "final_learning_rate": 0.0,
        "num_steps": 2000,
        "patch_dropout": 0.3,
        "augmentation": AUGMENTATION.model_copy(update={"erase": 0.2}),
    }
)
LONGER = LARGER.model_copy(update={"warmup_steps": 50, "patch_dropout": 0.4})
PARTS = {
    "pictures-48": Part(48, SMALL),
    "pictures-64": Part(64, LARGER),
    "pictures-more": Part(64, LONGER, MORE_STYLES, lengths=(1700, 4500)),
}
"""How images are learnt from, in this order."""


def train_images(data: Path, concepts: list[Concept], work: Path, seed: int, share: float) -> Trainer:
    """Train part after part; each begins with the averaged weights of the one before, fitted to its size.

    Args:
        data: folder of the styles' tables.
        concepts: to tell apart.
        work: folder of checkpoints.
        seed: that everything follows from.
        share: of the steps.
    """
    trainer = None
    for name, part in PARTS.items():
        learnt, held_out = learnt_and_held_out(data, concepts, part.image_size, work, part.more_styles)
        begun, trained = trainer, list[Trainer]()
        for checkpoint, settings in part.trainings(name).items():
            trainer = _begin(part, scaled(settings, len(concepts), seed, share), begun, work)
            if part.more_styles and not (work / f"{checkpoint}.pt").exists():
                trainer.objective.set_prototypes(centroids(trainer, learnt, len(concepts)))
            judge = partial(_recall, trainer, held_out)
            train(trainer, work / f"{checkpoint}.pt", CHECKPOINT_STEPS, partial(_batch, learnt, seed=seed), judge)
            trained.append(trainer)
        if part.lengths and begun is not None and trainer is not None:
            trainer.averaged.load_state_dict(average([each.weights() for each in (begun, *trained)]), strict=False)
    if trainer is None:
        raise ValueError("the recipe has no part")
    return trainer


def average(weights: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Average weights of the vision tower, name by name.

    Source: Wortsman et al. 2022, "Model soups" and "Robust fine-tuning of zero-shot models": such a mean of models that
    began alike, and of what they began with, holds up better on what none of them saw.

    Args:
        weights: of models of one architecture.
    """
    names = [name for name in weights[0] if name.startswith("vision")]
    return {name: torch.stack([each[name].float() for each in weights]).mean(0) for name in names}


def centroids(trainer: Trainer, drawings: Drawings, num_concepts: int) -> torch.Tensor:
    """The middle of each concept's images; float32 (C, E), unit rows.

    Args:
        trainer: its vision tower embeds.
        drawings: of the concepts.
        num_concepts: C.
    """
    embeddings = trainer.encode_images(drawings.pixels)
    sums = torch.zeros(num_concepts, embeddings.shape[1]).index_add_(0, drawings.concepts, embeddings)
    return torch.nn.functional.normalize(sums, dim=-1)


def config_of(image_size: int) -> ModelConfig:
    """The model at a size of images."""
    sized = {"image_size": image_size}
    parts = {"vision": CONFIG.vision, "preprocess": CONFIG.preprocess}
    return CONFIG.model_copy(update={name: part.model_copy(update=sized) for name, part in parts.items()})


def _begin(part: Part, settings: TrainSettings, before: Trainer | None, work: Path) -> Trainer:
    """A trainer of the part: afresh, or where the part before ended."""
    config = config_of(part.image_size)
    if before is None:
        return Trainer(config, settings)
    weights = fitted_positions(before.weights(), config)
    trainer = Trainer(export_model(work / f"start-{part.image_size}", config, weights, None, replace=True), settings)
    if before.settings.num_concepts == settings.num_concepts:
        trainer.objective.set_prototypes(before.objective.prototypes.detach())
    return trainer


def fitted_positions(weights: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """The weights with position embeddings resampled to the model's image size."""
    from timm.layers import resample_abs_pos_embed

    side = config.vision.image_size // config.vision.patch_size
    positions = resample_abs_pos_embed(weights[POSITIONS], [side, side], num_prefix_tokens=0)
    return {**weights, POSITIONS: positions}


def _batch(drawings: Drawings, step: int, seed: int) -> TrainBatch:
    """The batch of one step."""
    places, epoch = order_of(len(drawings), step, seed)
    chosen = drawings.take(places)
    none = torch.empty(0, dtype=torch.int64)
    return TrainBatch(chosen.pixels, chosen.concepts, none.int(), none, none, chosen.keys, epoch)


def order_of(num_drawings: int, step: int, seed: int) -> tuple[torch.Tensor, int]:
    """Places of the drawings of one step, and its epoch, whose order follows from the seed; what fills none is left.

    Args:
        num_drawings: to choose from.
        step: number of steps before this one.
        seed: of the run.
    """
    epoch, place = divmod(step, max(1, num_drawings // BATCH_SIZE))
    order = torch.randperm(num_drawings, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
    return order[place * BATCH_SIZE : (place + 1) * BATCH_SIZE], epoch


def _recall(trainer: Trainer, drawings: Drawings) -> str:
    """Share of images that have their concept among the k nearest prototypes."""
    prototypes = torch.nn.functional.normalize(trainer.objective.prototypes.detach(), dim=-1).numpy()
    images, numbers = trainer.encode_images(drawings.pixels).numpy(), np.arange(len(prototypes))
    found = retrieval_at(images, drawings.concepts.numpy(), prototypes, numbers)
    return f"held-out drawings find their concept: { {k: round(share, 3) for k, share in found.items()} }"
