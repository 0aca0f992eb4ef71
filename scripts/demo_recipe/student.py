"""Phase 3: a picture tower of the same size, begun afresh, learns from the vectors of the one that phases 1 and 2 made.

Its drawings are varied more than the teacher's were. Each is drawn to the middle between the teacher's vector of it and
the teacher's middle of its concept, so that what a style adds is halved; and to the similarities that these have to
each other and to the captions. Source: Furlanello et al. 2018, "Born-again neural networks".
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from demo_recipe.drawings import Concept, Drawings, learnt_and_held_out
from demo_recipe.images import AUGMENTATION, CHECKPOINT_STEPS, centroids, order_of
from demo_recipe.more_styles import MORE_STYLES
from demo_recipe.texts import encode_texts
from demo_recipe.training import scaled, train
from embedder.plugins.train.trainer.batch import TrainBatch
from embedder.plugins.train.trainer.export import export_model
from embedder.plugins.train.trainer.settings import DistillSettings, TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer
from embedder.retrieval.rank_metrics import best_ranks
from embedder.steps.captions import CaptionEncoder
from shards.fresh import fresh_tensors

CHECKPOINT = "student"
WEIGHTS = DistillSettings(vectors=10, similarities=1, temperature=0.05, pairs=0)
SETTINGS = TrainSettings(
    what="text_frozen",
    learning_rate=2e-3,
    weight_decay=0.05,
    warmup_steps=200,
    num_steps=8000,
    ema_decay=0.998,
    dtype="bfloat16",
    patch_dropout=0.3,
    augmentation=AUGMENTATION.model_copy(update={"hue": 0.08, "erase": 0.3}),
)


def train_student(
    teacher: Trainer, data: Path, concepts: list[Concept], work: Path, seed: int, share: float
) -> Trainer:
    """Train a picture tower beside the teacher's text tower, which stays as it is; the trainer holds both.

    Args:
        teacher: with both towers.
        data: folder of the styles' tables.
        concepts: that the drawings are of.
        work: folder of checkpoints.
        seed: that everything follows from.
        share: of the steps.
    """
    fresh = {name: each for name, each in fresh_tensors(teacher.config, seed) if name.startswith("vision")}
    begun = export_model(
        work / "start-student", teacher.config, teacher.weights() | fresh, teacher.tokenizer_json, replace=True
    )
    settings = scaled(SETTINGS, 0, seed, share)
    trainer = Trainer(begun, settings, teacher=(WEIGHTS, teacher.config.embedding_dim))
    side = teacher.config.preprocess.image_size
    learnt, held_out = learnt_and_held_out(data, concepts, side, work, MORE_STYLES)
    taught = TeacherVectors(teacher, learnt, concepts)
    judge = partial(_ranks, trainer, taught.captions.numpy(), held_out)
    train(trainer, work / f"{CHECKPOINT}.pt", CHECKPOINT_STEPS, partial(taught.batch, seed=seed), judge)
    return trainer


class TeacherVectors:
    """Drawings and captions with what the teacher makes of them."""

    def __init__(self, teacher: Trainer, drawings: Drawings, concepts: list[Concept]) -> None:
        self.drawings = drawings
        middles = centroids(teacher, drawings, len(concepts))
        own = teacher.encode_images(drawings.pixels)
        self.images = functional.normalize(own + middles[drawings.concepts], dim=-1)
        encoder = CaptionEncoder(str(teacher.tokenizer_json), teacher.config.preprocess.max_caption_tokens)
        captions = [concept["caption"] for concept in concepts]
        self.captions = encode_texts(teacher, encoder, captions)
        self.ids = [torch.from_numpy(encoder.encode(caption)) for caption in captions]

    def batch(self, step: int, seed: int) -> TrainBatch:
        """The batch of one step: drawings of all styles, and the caption of each."""
        places, epoch = order_of(len(self.drawings), step, seed)
        chosen = self.drawings.take(places)
        ids = [self.ids[concept] for concept in chosen.concepts.tolist()]
        return TrainBatch(
            pixels=chosen.pixels,
            image_concepts=chosen.concepts,
            token_ids=torch.cat(ids),
            token_lengths=torch.tensor([len(each) for each in ids]),
            caption_concepts=chosen.concepts,
            image_keys=chosen.keys,
            epoch=epoch,
            teacher_images=self.images[places],
            teacher_captions=self.captions[chosen.concepts],
        )


def _ranks(trainer: Trainer, captions: np.ndarray, drawings: Drawings) -> str:
    """How well held-out drawings find the caption of their concept."""
    images, wanted = trainer.encode_images(drawings.pixels).numpy(), drawings.concepts.numpy()
    ranks = best_ranks(images, wanted, captions, np.arange(len(captions)))
    found = {k: round(float((ranks < k).mean()), 3) for k in (1, 5, 10)}
    return f"held-out drawings find their caption: {found}, mean of log(1 + rank) {np.log1p(ranks).mean():.3f}"
