"""Phase 1: the ViT learns to tell the concepts apart over all styles; small pictures first, then larger ones."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from demo_recipe.drawings import STYLES, Concepts, Drawings, hold_out, read_drawings
from demo_recipe.log import log
from shards.config import ModelConfig, PreprocessConfig, TextConfig, VisionConfig
from shards.training.batch import TrainBatch
from shards.training.checkpoint import load_checkpoint, save_checkpoint
from shards.training.export import export_model
from shards.training.metrics import retrieval_at
from shards.training.settings import AugmentSettings, TrainSettings
from shards.training.trainer import Trainer

BATCH_SIZE = 128
LOG_STEPS, CHECKPOINT_STEPS = 50, 500
POSITIONS = "vision.pos_embed"

CONFIG = ModelConfig(
    name="demo-emoji",
    trained=False,
    embedding_dim=192,
    vision=VisionConfig(
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
    text=TextConfig(
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
    """Pictures of one size, and how they are learnt from."""

    image_size: int
    settings: TrainSettings

    def config(self) -> ModelConfig:
        """The model at this size."""
        sized = {"image_size": self.image_size}
        return CONFIG.model_copy(
            update={
                "vision": CONFIG.vision.model_copy(update=sized),
                "preprocess": CONFIG.preprocess.model_copy(update=sized),
            }
        )


PARTS = (
    Part(48, SMALL),
    Part(
        64,
        SMALL.model_copy(
            update={
                "learning_rate": 6e-4,
                "final_learning_rate": 0.0,
                "num_steps": 2000,
                "patch_dropout": 0.3,
                "augmentation": AUGMENTATION.model_copy(update={"erase": 0.2}),
            }
        ),
    ),
)


def train_pictures(data: Path, concepts: Concepts, work: Path, seed: int, share: float) -> Trainer:
    """Train part after part; each begins with the averaged weights of the one before, fitted to its size."""
    trainer = None
    for part in PARTS:
        trainer = _begin(part, scaled(part.settings, len(concepts), seed, share), trainer, work)
        drawings = read_drawings(data, STYLES, concepts, part.image_size, work)
        _train(trainer, f"pictures-{part.image_size}", *hold_out(drawings), work)
    if trainer is None:
        raise ValueError("the recipe has no part")
    return trainer


def scaled(settings: TrainSettings, num_concepts: int, seed: int, share: float) -> TrainSettings:
    """The settings for this data and seed, and for a share of the steps."""
    num_steps = max(1, round(settings.num_steps * share))
    warmup_steps = min(settings.warmup_steps, num_steps)
    changes = {"num_concepts": num_concepts, "seed": seed, "num_steps": num_steps, "warmup_steps": warmup_steps}
    return settings.model_copy(update=changes)


def _begin(part: Part, settings: TrainSettings, before: Trainer | None, work: Path) -> Trainer:
    """A trainer of the part: afresh, or where the part before ended, or at its own last checkpoint."""
    config = part.config()
    if before is None:
        trainer = Trainer(config, settings)
    else:
        start = export_model(
            work / f"start-{part.image_size}", config, fitted_positions(before.weights(), config), None, replace=True
        )
        trainer = Trainer(start, settings)
        trainer.objective.set_prototypes(before.objective.prototypes.detach())
    checkpoint = work / f"pictures-{part.image_size}.pt"
    if checkpoint.exists():
        trainer.load_state_dict(load_checkpoint(checkpoint))
        log(f"{checkpoint.name}: going on at step {trainer.num_steps_done}")
    return trainer


def fitted_positions(weights: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """The weights with position embeddings resampled to the model's picture size."""
    from timm.layers import resample_abs_pos_embed

    side = config.vision.image_size // config.vision.patch_size
    positions = resample_abs_pos_embed(weights[POSITIONS], [side, side], num_prefix_tokens=0)
    return {**weights, POSITIONS: positions}


def _train(trainer: Trainer, name: str, train: Drawings, held_out: Drawings, work: Path) -> None:
    began, settings = time.monotonic(), trainer.settings
    while trainer.num_steps_done < settings.num_steps:
        metrics = trainer.step(_batch(train, trainer.num_steps_done, settings.seed))
        if metrics.step % LOG_STEPS == 0:
            log(
                f"{name} {metrics.step}/{settings.num_steps} loss {metrics.loss:.3f} lr {metrics.learning_rate:.5f} "
                f"grad {metrics.grad_norm:.2f} {time.monotonic() - began:.0f} s"
            )
        if metrics.step % CHECKPOINT_STEPS == 0 or metrics.step == settings.num_steps:
            save_checkpoint(work / f"{name}.pt", trainer.state_dict())
            log(f"  held-out drawings find their concept: {_recall(trainer, held_out)}")


def _batch(drawings: Drawings, step: int, seed: int) -> TrainBatch:
    """The batch of one step: each epoch's order follows from the seed and the epoch; what doesn't fill one is left."""
    epoch, place = divmod(step, max(1, len(drawings) // BATCH_SIZE))
    order = torch.randperm(len(drawings), generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
    chosen = drawings.take(order[place * BATCH_SIZE : (place + 1) * BATCH_SIZE])
    none = torch.empty(0, dtype=torch.int64)
    return TrainBatch(chosen.pixels, chosen.concepts, none.int(), none, none, chosen.keys, epoch)


def _recall(trainer: Trainer, drawings: Drawings) -> dict[int, float]:
    """Share of pictures that have their concept among the k nearest prototypes."""
    prototypes = torch.nn.functional.normalize(trainer.objective.prototypes.detach(), dim=-1).numpy()
    pictures, numbers = trainer.encode_images(drawings.pixels).numpy(), np.arange(len(prototypes))
    found = retrieval_at(pictures, drawings.concepts.numpy(), prototypes, numbers)
    return {k: round(share, 3) for k, share in found.items()}
