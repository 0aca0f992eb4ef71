"""Phase 2: the ALBERT learns to hit the middle of its concept's pictures, which stay where they are."""

import random
from pathlib import Path

import numpy as np
import torch

from demo_recipe.drawings import STYLES, Concepts, Drawings, hold_out, read_drawings
from demo_recipe.log import log
from demo_recipe.pictures import scaled
from embedder.steps.captions import CaptionEncoder
from embedder.training.tokenizer import train_tokenizer
from shards.training.batch import TrainBatch
from shards.training.checkpoint import load_checkpoint, save_checkpoint
from shards.training.export import export_model
from shards.training.metrics import retrieval_at
from shards.training.settings import TrainSettings
from shards.training.trainer import Trainer

BATCH_SIZE = 256
LOG_STEPS, CHECKPOINT_STEPS = 50, 200

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


def train_texts(pictures: Trainer, data: Path, concepts: Concepts, work: Path, seed: int, share: float) -> Trainer:
    """Fit a fresh text tower to the pictures' tower; the trainer holds both."""
    phrases = [text for place in range(len(concepts)) for text in words_of(concepts, place)]
    tokenizer_json = train_tokenizer(phrases, pictures.config.text.vocab_size)
    start = export_model(work / "start-texts", pictures.config, pictures.weights(), tokenizer_json, replace=True)
    trainer = Trainer(start, scaled(SETTINGS, len(concepts), seed, share))
    drawings = read_drawings(data, STYLES, concepts, pictures.config.vision.image_size, work)
    train, held_out = hold_out(drawings)
    trainer.objective.set_prototypes(centroids(pictures, train, len(concepts)))
    checkpoint = work / "texts.pt"
    if checkpoint.exists():
        trainer.load_state_dict(load_checkpoint(checkpoint))
        log(f"{checkpoint.name}: going on at step {trainer.num_steps_done}")
    writer = TextWriter(concepts, CaptionEncoder(tokenizer_json, pictures.config.preprocess.max_caption_tokens))
    _train(trainer, writer, held_out, checkpoint)
    return trainer


def words_of(concepts: Concepts, place: int) -> list[str]:
    """Everything that is said of a concept."""
    return [concepts.captions[place], *concepts.tags[place], *concepts.groups[place]]


def centroids(trainer: Trainer, drawings: Drawings, num_concepts: int) -> torch.Tensor:
    """The middle of each concept's pictures; float32 (C, E), unit rows."""
    embeddings = trainer.encode_images(drawings.pixels)
    sums = torch.zeros(num_concepts, embeddings.shape[1]).index_add_(0, drawings.concepts, embeddings)
    return torch.nn.functional.normalize(sums, dim=-1)


def encode_texts(trainer: Trainer, encoder: CaptionEncoder, texts: list[str]) -> torch.Tensor:
    """Embed texts; float32 (M, E)."""
    ids = [torch.from_numpy(encoder.encode(text)) for text in texts]
    return trainer.encode_captions(torch.cat(ids), torch.tensor([len(each) for each in ids]))


def _train(trainer: Trainer, writer: "TextWriter", held_out: Drawings, checkpoint: Path) -> None:
    settings, pictures = trainer.settings, trainer.encode_images(held_out.pixels).numpy()
    asked = [writer.concepts.captions[place] for place in held_out.concepts.tolist()]
    while trainer.num_steps_done < settings.num_steps:
        metrics = trainer.step(writer.batch(trainer.num_steps_done, settings.seed))
        if metrics.step % LOG_STEPS == 0:
            log(f"texts {metrics.step}/{settings.num_steps} loss {metrics.loss:.3f}")
        if metrics.step % CHECKPOINT_STEPS == 0 or metrics.step == settings.num_steps:
            save_checkpoint(checkpoint, trainer.state_dict())
            numbers = np.arange(len(held_out))
            found = retrieval_at(encode_texts(trainer, writer.encoder, asked).numpy(), numbers, pictures, numbers)
            log(f"  captions find held-out drawings: { {k: round(share, 3) for k, share in found.items()} }")


class TextWriter:
    """Writes what people may call a concept, and says which concepts each text fits."""

    def __init__(self, concepts: Concepts, encoder: CaptionEncoder) -> None:
        self.concepts, self.encoder = concepts, encoder
        self.said: dict[str, set[int]] = {}  # who has a tag, a group, or a word in the caption
        for place in range(len(concepts)):
            for phrase in self.phrases(place):
                self.said.setdefault(phrase, set()).add(place)

    def phrases(self, place: int) -> list[str]:
        """Tags, words of the caption, and groups; each once."""
        words = self.concepts.captions[place].lower().replace(":", " ").replace(",", " ").split()
        tags = [tag.lower() for tag in self.concepts.tags[place]]
        return list(dict.fromkeys([*tags, *words, *self.concepts.groups[place]]))

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
        caption, tags = self.concepts.captions[place], list(self.concepts.tags[place])
        kind, joint = chance.random(), chance.choice((", ", " "))
        if kind < 0.4 or not tags:
            return caption, {place}
        if kind < 0.5:
            return joint.join([caption, *chance.sample(tags, min(len(tags), chance.randint(1, 2)))]), {place}
        phrases = self.phrases(place)
        chosen = chance.sample(phrases, min(len(phrases), chance.choice((1, 1, 2, 3, 4))))
        return joint.join(chosen), set.intersection(*(self.said[phrase] for phrase in chosen))
