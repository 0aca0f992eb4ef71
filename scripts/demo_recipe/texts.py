"""Phase 2: the ALBERT learns to hit the middle of its concept's images, which stay where they are."""

import random
from functools import partial
from pathlib import Path

import numpy as np
import torch

from demo_recipe.drawings import Concept, Drawings, learnt_and_held_out
from demo_recipe.images import centroids
from demo_recipe.lexicon import Lexicon, make_lexicon, read_vectors, shares_of
from demo_recipe.more_styles import MORE_STYLES
from demo_recipe.training import scaled, train
from embedder.plugins.train.trainer.batch import TrainBatch
from embedder.plugins.train.trainer.export import export_model
from embedder.plugins.train.trainer.settings import TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer
from embedder.retrieval.rank_metrics import retrieval_at
from embedder.steps.captions import CaptionEncoder
from shards.train_tokenizer import train_tokenizer

BATCH_SIZE = 256
CHECKPOINT_STEPS = 200

LEXICON_SHARE = 0.4  # of the texts
NEAREST_WORDS = 30  # of the lexicon, to a concept

SETTINGS = TrainSettings(
    loss="concepts",
    num_concepts=1,  # set when the data is known
    what="vision_frozen",
    learning_rate=1.5e-3,
    weight_decay=0.05,
    warmup_steps=50,
    num_steps=2000,
    ema_decay=0.99,
    dtype="bfloat16",
    max_logit_scale=30,
    train_prototypes=False,
    alignment=5.0,
)


def train_texts(
    images: Trainer, data: Path, concepts: list[Concept], work: Path, seed: int, share: float, checkpoint: str = "texts"
) -> Trainer:
    """Fit a text tower to the images' tower; the trainer holds both.

    Args:
        images: trainer whose picture tower is that of phase 1, or of phase 3. Where it has a tokeniser, its text tower
            is begun with; else a fresh one, with a tokeniser of its own.
        data: folder of the styles' tables.
        concepts: that the texts are about.
        work: folder of checkpoints.
        seed: that everything follows from.
        share: of the steps.
        checkpoint: name of it.
    """
    lexicon = make_lexicon(concepts, read_vectors(work))
    tokenizer_json = images.tokenizer_json
    if tokenizer_json is None:
        phrases = [text for each in concepts for text in (each["caption"], *each["tags"], *each["groups"])]
        tokenizer_json = train_tokenizer([*phrases, *lexicon.words], images.config.text.vocab_size)
    start = export_model(work / f"start-{checkpoint}", images.config, images.weights(), tokenizer_json, replace=True)
    trainer = Trainer(start, scaled(SETTINGS, len(concepts), seed, share))
    side = images.config.vision.image_size
    learnt, held_out = learnt_and_held_out(data, concepts, side, work, MORE_STYLES)
    file = work / f"{checkpoint}.pt"
    if not file.exists():
        trainer.objective.set_prototypes(centroids(images, learnt, len(concepts)))
    encoder = CaptionEncoder(tokenizer_json, images.config.preprocess.max_caption_tokens)
    writer = TextWriter(concepts, encoder, lexicon)
    vectors = trainer.encode_images(held_out.pixels).numpy()
    judge = partial(_recall, trainer, writer, held_out, vectors)
    train(trainer, file, CHECKPOINT_STEPS, partial(writer.batch, seed=seed), judge)
    return trainer


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

    def __init__(self, concepts: list[Concept], encoder: CaptionEncoder, lexicon: Lexicon) -> None:
        self.concepts, self.encoder, self.lexicon = concepts, encoder, lexicon
        order = np.argsort(-lexicon.nearness, axis=0, kind="stable")
        self.nearest = order[:NEAREST_WORDS].T  # (C, few): the lexicon's words that are nearest to each concept
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
        shares = torch.zeros(BATCH_SIZE, len(self.concepts))
        ids = []
        for row, place in enumerate(places):
            if chance.random() < LEXICON_SHARE and self.lexicon.words:
                text, near = self.describe(place, chance)
                shares[row] = torch.from_numpy(near)
            else:
                text, fitting = self.write(place, chance)
                shares[row, sorted(fitting)] = 1 / len(fitting)
            ids.append(torch.from_numpy(self.encoder.encode(text)))
        return TrainBatch(
            pixels=torch.empty(0, 1, 1, 3, dtype=torch.uint8),
            image_concepts=torch.empty(0, dtype=torch.int64),
            token_ids=torch.cat(ids),
            token_lengths=torch.tensor([len(each) for each in ids]),
            caption_concepts=torch.tensor(places),
            caption_positives=shares,
        )

    def describe(self, place: int, chance: random.Random) -> tuple[str, np.ndarray]:
        """A word of the lexicon, or several that are near to the concept; and what share each concept has in it."""
        if chance.random() < 0.5:
            words = [chance.randrange(len(self.lexicon.words))]
        else:
            near = self.nearest[place].tolist()
            words = chance.sample(near, min(len(near), chance.choice((1, 2, 3, 4))))
        shares = shares_of(self.lexicon.nearness[words].sum(0, keepdims=True))[0]
        if len(words) > 1:
            shares = shares / 2
            shares[place] += 0.5
        return chance.choice((", ", " ")).join(self.lexicon.words[word] for word in words), shares

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
