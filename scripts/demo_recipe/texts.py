"""Phase 2: the ALBERT learns to hit the middle of its concept's images, which stay where they are."""

import random
from functools import partial
from pathlib import Path

import numpy as np
import torch

from demo_recipe.drawings import STYLES, Concept, Drawings, hold_out, read_drawings
from demo_recipe.training import scaled, train
from embedder.steps.captions import CaptionEncoder
from embedder.training.tokenizer import train_tokenizer
from shards.training.batch import TrainBatch
from shards.training.export import export_model
from shards.training.metrics import retrieval_at
from shards.training.settings import TrainSettings
from shards.training.trainer import Trainer

BATCH_SIZE = 256
CHECKPOINT_STEPS = 200

SETTINGS = TrainSettings(
    loss="concepts",
    num_concepts=1,  # set when the data is known
    what="vision_frozen",
    learning_rate=1.5e-3,
    weight_decay=0.05,
    warmup_steps=50,
    num_steps=1500,
    ema_decay=0.99,
    dtype="bfloat16",
    max_logit_scale=30,
    train_prototypes=False,
    alignment=5.0,
)


def train_texts(images: Trainer, data: Path, concepts: list[Concept], work: Path, seed: int, share: float) -> Trainer:
    """Fit a fresh text tower to the images' tower; the trainer holds both.

    Args:
        images: of phase 1.
        data: folder of the styles' tables.
        concepts: that the texts are about.
        work: folder of checkpoints.
        seed: that everything follows from.
        share: of the steps.
    """
    phrases = [text for each in concepts for text in (each["caption"], *each["tags"], *each["groups"])]
    tokenizer_json = train_tokenizer(phrases, images.config.text.vocab_size)
    start = export_model(work / "start-texts", images.config, images.weights(), tokenizer_json, replace=True)
    trainer = Trainer(start, scaled(SETTINGS, len(concepts), seed, share))
    drawings = read_drawings(data, STYLES, concepts, images.config.vision.image_size, work)
    learnt, held_out = hold_out(drawings)
    trainer.objective.set_prototypes(centroids(images, learnt, len(concepts)))
    writer = TextWriter(concepts, CaptionEncoder(tokenizer_json, images.config.preprocess.max_caption_tokens))
    vectors = trainer.encode_images(held_out.pixels).numpy()
    judge = partial(_recall, trainer, writer, held_out, vectors)
    train(trainer, work / "texts.pt", CHECKPOINT_STEPS, partial(writer.batch, seed=seed), judge)
    return trainer


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


def encode_texts(trainer: Trainer, encoder: CaptionEncoder, texts: list[str]) -> torch.Tensor:
    """Embed texts; float32 (M, E).

    Args:
        trainer: its text tower embeds.
        encoder: of the texts.
        texts: M of them.
    """
    ids = [torch.from_numpy(encoder.encode(text)) for text in texts]
    return trainer.encode_captions(torch.cat(ids), torch.tensor([len(each) for each in ids]))


def _recall(trainer: Trainer, writer: "TextWriter", held_out: Drawings, vectors: np.ndarray) -> str:
    """Share of captions that have their held-out drawing among the k nearest."""
    asked = [writer.concepts[place]["caption"] for place in held_out.concepts.tolist()]
    numbers = np.arange(len(held_out))
    found = retrieval_at(encode_texts(trainer, writer.encoder, asked).numpy(), numbers, vectors, numbers)
    return f"captions find held-out drawings: { {k: round(share, 3) for k, share in found.items()} }"


class TextWriter:
    """Writes what people may call a concept, and says which concepts each text fits."""

    def __init__(self, concepts: list[Concept], encoder: CaptionEncoder) -> None:
        self.concepts, self.encoder = concepts, encoder
        self.said: dict[str, set[int]] = {}  # who has a tag, a group, or a word in the caption
        for place in range(len(concepts)):
            for phrase in self.phrases(place):
                self.said.setdefault(phrase, set()).add(place)

    def phrases(self, place: int) -> list[str]:
        """Tags, words of the caption, and groups; each once."""
        concept = self.concepts[place]
        words = concept["caption"].lower().replace(":", " ").replace(",", " ").split()
        tags = [tag.lower() for tag in concept["tags"]]
        return list(dict.fromkeys([*tags, *words, *concept["groups"]]))

    def batch(self, step: int, seed: int) -> TrainBatch:
        """The texts of one step; they follow from the seed and the step."""
        chance = random.Random(f"{seed}:{step}")
        places = [chance.randrange(len(self.concepts)) for _ in range(BATCH_SIZE)]
        positives = torch.zeros(BATCH_SIZE, len(self.concepts), dtype=torch.bool)
        ids = []
        for row, place in enumerate(places):
            text, fitting = self.write(place, chance)
            ids.append(torch.from_numpy(self.encoder.encode(text)))
            positives[row, sorted(fitting)] = True
        return TrainBatch(
            pixels=torch.empty(0, 1, 1, 3, dtype=torch.uint8),
            image_concepts=torch.empty(0, dtype=torch.int64),
            token_ids=torch.cat(ids),
            token_lengths=torch.tensor([len(each) for each in ids]),
            caption_concepts=torch.tensor(places),
            caption_positives=positives,
        )

    def write(self, place: int, chance: random.Random) -> tuple[str, set[int]]:
        """One text and the concepts that it fits: the caption, with some tags, or a few phrases without it."""
        caption, tags = self.concepts[place]["caption"], self.concepts[place]["tags"]
        kind, joint = chance.random(), chance.choice((", ", " "))
        if kind < 0.4 or not tags:
            return caption, {place}
        if kind < 0.5:
            return joint.join([caption, *chance.sample(tags, min(len(tags), chance.randint(1, 2)))]), {place}
        phrases = self.phrases(place)
        chosen = chance.sample(phrases, min(len(phrases), chance.choice((1, 1, 2, 3, 4))))
        return joint.join(chosen), set.intersection(*(self.said[phrase] for phrase in chosen))
