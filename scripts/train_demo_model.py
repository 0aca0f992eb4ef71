"""Train the twin tower that the package ships, on drawings of emoji; Noto's are never seen.

    python scripts/train_demo_model.py DATA_FOLDER --out embedder/demo_model [--work DIR]

DATA_FOLDER holds twemoji.parquet, openmoji.parquet, fluent-flat.parquet, fluent-modern.parquet, and for the figures at
the end noto.parquet. Of `openmoji_tags` nothing is read before those. Five more styles and vectors of words are
fetched by npm from packages pinned by their SHA-256, unless their tarballs lie in --work.

1. Images: the ViT learns to distinguish the 1,923 concepts, each drawing varied every time; first at 48 px over
   the four styles, then at 64 px, then over all nine: twice, and averaged with what they began with.
2. Texts: the ALBERT learns to hit the middle of its concept's images, by caption, by tags, by both; and to point a
   word of no caption at the concepts whose words are near to it.
3. The model teaches a fresh picture tower of its own size, to which the ALBERT is fitted once more.

One drawing of every eighth concept that has three or more is held out; what finds those is what a recipe may be chosen
by. A run that was ended continues at its last checkpoint in --work. Everything follows from the seed.
"""

import argparse
import json
import random
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.nn import functional

from demo_recipe import sources
from demo_recipe.sources import MORE_STYLES, STYLES, Concept, Drawings, Lexicon, log
from embedder.plugins.train.trainer.batch import TrainBatch
from embedder.plugins.train.trainer.export import export_model
from embedder.plugins.train.trainer.train_checkpoint import load_checkpoint, save_checkpoint
from embedder.plugins.train.trainer.train_settings import DistillSettings, TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer
from embedder.retrieval.rank_metrics import best_ranks, retrieval_at
from embedder.steps.caption_encoder import CaptionEncoder
from shards.fresh import fresh_tensors
from shards.model_config import ModelConfig
from shards.train_tokenizer import train_tokenizer

LOG_STEPS = 50


def scaled(settings: TrainSettings, num_concepts: int, seed: int, share: float) -> TrainSettings:
    num_steps = max(1, round(settings.num_steps * share))
    warmup_steps = min(settings.warmup_steps, num_steps)
    changes = {"num_concepts": num_concepts, "seed": seed, "num_steps": num_steps, "warmup_steps": warmup_steps}
    changes |= {"dtype": "float32"} if share < 1 else {}  # many CPUs take ten times as long in bfloat16
    return settings.model_copy(update=changes)


def train(
    trainer: Trainer, checkpoint: Path, checkpoint_steps: int, batch: Callable[[int], TrainBatch],
    judge: Callable[[], str],
) -> None:  # fmt: skip
    """Take all steps, from the last checkpoint on where there is one."""
    if checkpoint.exists():
        trainer.load_state_dict(load_checkpoint(checkpoint))
        log(f"{checkpoint.name}: continues at step {trainer.num_steps_done}")
    began_s, num_steps = time.monotonic(), trainer.settings.num_steps
    while trainer.num_steps_done < num_steps:
        metrics = trainer.step(batch(trainer.num_steps_done))
        if metrics.step % LOG_STEPS == 0:
            rate = f"lr {metrics.learning_rate:.5f} grad {metrics.grad_norm:.2f} {time.monotonic() - began_s:.0f} s"
            log(f"{checkpoint.stem} {metrics.step}/{num_steps} loss {metrics.loss:.3f} {rate}")
        if metrics.step % checkpoint_steps == 0 or metrics.step == num_steps:
            save_checkpoint(checkpoint, trainer.state_dict())
            log(f"  {judge()}")


IMAGES_A_STEP = 128
IMAGE_STEPS = 500
POSITIONS = "vision.pos_embed"

_RECIPE = tomllib.loads((Path(__file__).parent / "demo_recipe/recipe.toml").read_text(encoding="utf-8"))
CONFIG = ModelConfig.model_validate(_RECIPE["model"])


def settings_of(*names: str) -> TrainSettings:
    """The settings of a training; each name adds what differs from those before it."""
    found: dict[str, Any] = {"augmentation": _RECIPE["augmentation"]} if names != ("texts",) else {}
    for own in (_RECIPE[name] for name in names):
        found |= own
        if "augmentation" in own:
            found["augmentation"] = _RECIPE["augmentation"] | own["augmentation"]
    return TrainSettings.model_validate(found)


@dataclass(frozen=True)
class Part:
    """A training of the picture tower."""

    image_size: int  # side of the images in px
    settings: TrainSettings  # of the training
    more_styles: tuple[str, ...] = ()  # styles that are learnt from besides the four that say which concepts there are
    # lengths: steps of several trainings that begin alike; their weights and those that they began with are averaged
    lengths: tuple[int, ...] = ()

    def trainings(self, name: str) -> dict[str, TrainSettings]:
        if not self.lengths:
            return {name: self.settings}
        return {f"{name}-{steps}": self.settings.model_copy(update={"num_steps": steps}) for steps in self.lengths}


PARTS = {
    "pictures-48": Part(48, settings_of("small")),
    "pictures-64": Part(64, settings_of("small", "larger")),
    "pictures-more": Part(64, settings_of("small", "larger", "longer"), MORE_STYLES, lengths=(1700, 4500)),
}
"""How images are learnt from, in this order."""


def train_images(data: Path, concepts: list[Concept], work: Path, seed: int, share: float) -> Trainer:
    """Train part after part; each begins with the averaged weights of the one before, fitted to its size."""
    trainer: Trainer | None = None
    for name, part in PARTS.items():
        learnt, held_out = sources.learnt_and_held_out(data, concepts, part.image_size, work, part.more_styles)
        begun, trained = trainer, list[Trainer]()
        for checkpoint, settings in part.trainings(name).items():
            trainer = _begin(part, scaled(settings, len(concepts), seed, share), begun, work)
            if part.more_styles and not (work / f"{checkpoint}.pt").exists():
                trainer.objective.set_prototypes(centroids(trainer, learnt, len(concepts)))
            judge = partial(_recall, trainer, held_out)
            train(trainer, work / f"{checkpoint}.pt", IMAGE_STEPS, partial(_batch, learnt, seed=seed), judge)
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
    """
    names = [name for name in weights[0] if name.startswith("vision")]
    return {name: torch.stack([each[name].float() for each in weights]).mean(0) for name in names}


def centroids(trainer: Trainer, drawings: Drawings, num_concepts: int) -> torch.Tensor:
    """The middle of each concept's images; float32 (C, E), unit rows."""
    embeddings = trainer.encode_images(drawings.pixels)
    sums = torch.zeros(num_concepts, embeddings.shape[1]).index_add_(0, drawings.concepts, embeddings)
    return torch.nn.functional.normalize(sums, dim=-1)


def config_of(image_size: int) -> ModelConfig:
    sized = {"image_size": image_size}
    parts = {"vision": CONFIG.vision, "preprocess": CONFIG.preprocess}
    return CONFIG.model_copy(update={name: part.model_copy(update=sized) for name, part in parts.items()})


def _begin(part: Part, settings: TrainSettings, before: Trainer | None, work: Path) -> Trainer:
    """A trainer of the part: afresh, or where the part before ended, with its positions resampled to the size."""
    from timm.layers import resample_abs_pos_embed

    config = config_of(part.image_size)
    if before is None:
        return Trainer(config, settings)
    side = config.vision.image_size // config.vision.patch_size
    weights = before.weights()
    weights[POSITIONS] = resample_abs_pos_embed(weights[POSITIONS], [side, side], num_prefix_tokens=0)
    trainer = Trainer(export_model(work / f"start-{part.image_size}", config, weights, None, replace=True), settings)
    if before.settings.num_concepts == settings.num_concepts:
        trainer.objective.set_prototypes(before.objective.prototypes.detach())
    return trainer


def _batch(drawings: Drawings, step: int, seed: int) -> TrainBatch:
    places, epoch = order_of(len(drawings), step, seed)
    chosen = drawings.take(places)
    none = torch.empty(0, dtype=torch.int64)
    return TrainBatch(chosen.pixels, chosen.concepts, none.int(), none, none, chosen.keys, epoch)


def order_of(num_drawings: int, step: int, seed: int) -> tuple[torch.Tensor, int]:
    """Places of the drawings of one step, and its epoch, whose order follows from the seed; what fills none is left."""
    epoch, place = divmod(step, max(1, num_drawings // IMAGES_A_STEP))
    order = torch.randperm(num_drawings, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
    return order[place * IMAGES_A_STEP : (place + 1) * IMAGES_A_STEP], epoch


def _recall(trainer: Trainer, drawings: Drawings) -> str:
    """Share of images that have their concept among the k nearest prototypes."""
    prototypes = torch.nn.functional.normalize(trainer.objective.prototypes.detach(), dim=-1).numpy()
    images, numbers = trainer.encode_images(drawings.pixels).numpy(), np.arange(len(prototypes))
    found = retrieval_at(images, drawings.concepts.numpy(), prototypes, numbers)
    return f"held-out drawings find their concept: { {k: round(share, 3) for k, share in found.items()} }"


TEXTS_A_STEP = 256
TEXT_STEPS = 200

LEXICON_SHARE = 0.4  # of the texts
NEAREST_WORDS = 30  # of the lexicon, to a concept


def train_texts(
    images: Trainer, data: Path, concepts: list[Concept], work: Path, seed: int, share: float, checkpoint: str = "texts"
) -> Trainer:
    """Fit a text tower to the images' tower; the trainer holds both."""
    lexicon = sources.make_lexicon(concepts, sources.read_vectors(work))
    tokenizer_json = images.tokenizer_json
    if tokenizer_json is None:
        phrases = [text for each in concepts for text in (each["caption"], *each["tags"], *each["groups"])]
        tokenizer_json = train_tokenizer([*phrases, *lexicon.words], images.config.text.vocab_size)
    start = export_model(work / f"start-{checkpoint}", images.config, images.weights(), tokenizer_json, replace=True)
    trainer = Trainer(start, scaled(settings_of("texts"), len(concepts), seed, share))
    side = images.config.vision.image_size
    learnt, held_out = sources.learnt_and_held_out(data, concepts, side, work, MORE_STYLES)
    file = work / f"{checkpoint}.pt"
    if not file.exists():
        trainer.objective.set_prototypes(centroids(images, learnt, len(concepts)))
    encoder = CaptionEncoder(tokenizer_json, images.config.preprocess.max_caption_tokens)
    writer = TextWriter(concepts, encoder, lexicon)
    vectors = trainer.encode_images(held_out.pixels).numpy()
    judge = partial(_recall_of_texts, trainer, writer, held_out, vectors)
    train(trainer, file, TEXT_STEPS, partial(writer.batch, seed=seed), judge)
    return trainer


def encode_texts(trainer: Trainer, encoder: CaptionEncoder, texts: list[str]) -> torch.Tensor:
    ids = [torch.from_numpy(encoder.encode(text)) for text in texts]
    return trainer.encode_captions(torch.cat(ids), torch.tensor([len(each) for each in ids]))


def _recall_of_texts(trainer: Trainer, writer: "TextWriter", held_out: Drawings, vectors: np.ndarray) -> str:
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
        places = [chance.randrange(len(self.concepts)) for _ in range(TEXTS_A_STEP)]
        shares = torch.zeros(TEXTS_A_STEP, len(self.concepts))
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
            pixels=torch.empty(0, 1, 1, 3, dtype=torch.uint8), image_concepts=torch.empty(0, dtype=torch.int64),
            token_ids=torch.cat(ids), token_lengths=torch.tensor([len(each) for each in ids]),
            caption_concepts=torch.tensor(places), caption_positives=shares,
        )  # fmt: skip

    def describe(self, place: int, chance: random.Random) -> tuple[str, np.ndarray]:
        """A word of the lexicon, or several that are near to the concept; and what share each concept has in it."""
        if chance.random() < 0.5:
            words = [chance.randrange(len(self.lexicon.words))]
        else:
            near = self.nearest[place].tolist()
            words = chance.sample(near, min(len(near), chance.choice((1, 2, 3, 4))))
        shares = sources.shares_of(self.lexicon.nearness[words].sum(0, keepdims=True))[0]
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


def train_student(
    teacher: Trainer, data: Path, concepts: list[Concept], work: Path, seed: int, share: float
) -> Trainer:
    """Train a picture tower next to the teacher's text tower, which stays as it is; the trainer holds both."""
    fresh = {name: each for name, each in fresh_tensors(teacher.config, seed) if name.startswith("vision")}
    weights = teacher.weights() | fresh
    begun = export_model(work / "start-student", teacher.config, weights, teacher.tokenizer_json, replace=True)
    settings = scaled(settings_of("student"), 0, seed, share)
    losses = DistillSettings(**_RECIPE["student_losses"])
    trainer = Trainer(begun, settings, teacher=(losses, teacher.config.embedding_dim))
    side = teacher.config.preprocess.image_size
    learnt, held_out = sources.learnt_and_held_out(data, concepts, side, work, MORE_STYLES)
    taught = TeacherVectors(teacher, learnt, concepts)
    judge = partial(_ranks, trainer, taught.captions.numpy(), held_out)
    train(trainer, work / "student.pt", IMAGE_STEPS, partial(taught.batch, seed=seed), judge)
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
            pixels=chosen.pixels, image_concepts=chosen.concepts, token_ids=torch.cat(ids),
            token_lengths=torch.tensor([len(each) for each in ids]), caption_concepts=chosen.concepts,
            image_keys=chosen.keys, epoch=epoch, teacher_images=self.images[places],
            teacher_captions=self.captions[chosen.concepts],
        )  # fmt: skip


def _ranks(trainer: Trainer, captions: np.ndarray, drawings: Drawings) -> str:
    images, wanted = trainer.encode_images(drawings.pixels).numpy(), drawings.concepts.numpy()
    ranks = best_ranks(images, wanted, captions, np.arange(len(captions)))
    found = {k: round(float((ranks < k).mean()), 3) for k in (1, 5, 10)}
    return f"held-out drawings find their caption: {found}, mean of log(1 + rank) {np.log1p(ranks).mean():.3f}"


def figures_on(style: str, folder: Path, data: Path, concepts: list[Concept], work: Path) -> dict[str, Any]:
    """R@k by caption, by unseen tags, and image to image.

    Texts are ranked against all images of the style; R@k counts queries whose own image is among the best k. Of
    the unseen tags, those of one concept are one query, joined by commas. Images are also ranked against all training
    drawings: whether one of the first k concepts is theirs; and so are plain pixels, 18 x 18.
    """
    trainer = Trainer(folder, TrainSettings(ema_decay=0))
    preprocess = trainer.config.preprocess
    encoder = CaptionEncoder(str(trainer.tokenizer_json), preprocess.max_caption_tokens)
    test = sources.read_drawings(data, (style,), concepts, preprocess.image_size, work)
    train = sources.read_drawings(data, STYLES, concepts, preprocess.image_size, work)
    rows = pq.read_table(data / f"{style}.parquet", columns=["caption", "openmoji_tags", "group"]).to_pylist()
    images, numbers = trainer.encode_images(test.pixels).numpy(), np.arange(len(rows))
    is_flag = np.array([row["group"] == "flags" for row in rows])
    tags = [", ".join(row["openmoji_tags"] or ()) for row in rows]
    has_tags = np.array([bool(text) for text in tags])

    def ranks_of(texts: list[str], asks: Any) -> Any:
        return best_ranks(encode_texts(trainer, encoder, texts).numpy(), numbers[asks], images, numbers)

    by_caption = ranks_of([row["caption"] for row in rows], slice(None))
    by_tags = ranks_of([text for text in tags if text], has_tags)
    embeddings = trainer.encode_images(train.pixels).numpy()
    ranks = {
        "caption": by_caption, "caption, flags": by_caption[is_flag], "caption, no flags": by_caption[~is_flag],
        "unseen tags": by_tags, "unseen tags, no flags": by_tags[~is_flag[has_tags]],
        "picture to picture": concept_ranks(images, test, embeddings, train),
        "picture to picture, pixels 18 x 18": concept_ranks(plain_pixels(test), test, plain_pixels(train), train),
    }  # fmt: skip
    shares = {name: {f"R@{k}": round(float((each < k).mean()), 4) for k in (1, 5, 10)} for name, each in ranks.items()}
    return {name: share | {"queries": len(ranks[name])} for name, share in shares.items()}


def plain_pixels(drawings: Drawings) -> Any:
    """18 x 18 pixels, centred and of length 1: what no model knows anything of."""
    small = torch.nn.functional.interpolate(
        drawings.pixels.permute(0, 3, 1, 2).float(), size=18, mode="bilinear", antialias=True, align_corners=False
    ).flatten(1)
    return torch.nn.functional.normalize(small - small.mean(1, keepdim=True), dim=-1).numpy()


def concept_ranks(queries: Any, test: Drawings, candidates: Any, train: Drawings) -> Any:
    """For each query, how many other concepts have a drawing as near as the best of its own, or nearer."""
    scores = torch.from_numpy(queries @ candidates.T)
    best = torch.full((len(scores), int(train.concepts.max()) + 1), -torch.inf)
    best.scatter_reduce_(1, train.concepts[None].expand(len(scores), -1), scores, "amax")
    own = best.gather(1, test.concepts[:, None])
    return ((best >= own).sum(1) - 1).numpy()


TEST_STYLE = "noto"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("train-demo"))
    parser.add_argument("--threads", type=int, default=1, help="another number changes last bits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps, to try it out, in float32")
    parser.add_argument("--begin-with", type=Path, metavar="MODEL", help="folder that stands for what 1 and 2 make")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    concepts = sources.read_concepts(options.data)
    log(f"{len(concepts):,} concepts")
    sources.make_tables(concepts, options.data, options.work)
    made = options.data, concepts, options.work, options.seed, options.share
    if options.begin_with is None:
        teacher = train_texts(train_images(*made), *made)
    else:
        teacher = Trainer(options.begin_with, TrainSettings(ema_decay=0))
    model = train_texts(train_student(teacher, *made), *made, checkpoint="texts-student")
    model.export(options.out, CONFIG.name, dtype="float16", replace=True)
    log(f"{options.out}: written")
    if (options.data / f"{TEST_STYLE}.parquet").exists():
        log(json.dumps(figures_on(TEST_STYLE, options.out, options.data, concepts, options.work)))


if __name__ == "__main__":
    main()
