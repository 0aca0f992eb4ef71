"""Train the twin tower that the package ships, on drawings of emoji; Noto's are never seen.

    python scripts/train_demo_model.py DATA_FOLDER --out embedder/demo_model [--work DIR] [--threads 2]

DATA_FOLDER holds twemoji.parquet, openmoji.parquet, fluent-flat.parquet, fluent-modern.parquet, and for the
evaluation at the end noto.parquet. Of `openmoji_tags` nothing is read before that evaluation.

1. Pictures: the ViT learns to tell the 1,911 concepts apart over all styles, each drawn anew every time (moved, turned,
   recoloured, partly erased, two fifths of its tokens left out).
2. Texts: the ALBERT learns to hit the middle of its concept's pictures, by caption, by tags, by both; a set of tags
   that fits several concepts has all of them for its target.

One drawing of every eighth concept that has three or more is held out: R@k on those, by caption, is what a recipe may
be chosen by. A run that was ended goes on at its last checkpoint in --work. Everything follows from the seed.
"""

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from embedder.media.door import DecodeDoor
from embedder.media.fit import PictureFit
from embedder.steps.captions import CaptionEncoder
from shards.config import ModelConfig, PreprocessConfig, TextConfig, VisionConfig
from shards.training.batch import TrainBatch, item_key
from shards.training.checkpoint import load_checkpoint, save_checkpoint
from shards.training.export import export_model
from shards.training.metrics import best_ranks
from shards.training.settings import AugmentSettings, TrainSettings
from shards.training.trainer import Trainer

STYLES = ("twemoji", "openmoji", "fluent-flat", "fluent-modern")
TEST_STYLE = "noto"
VOCABULARY = 3000
HELD_OUT_EVERY = 8
KS = (1, 5, 10)

PICTURE_BATCH = 256
TEXT_BATCH = 256
CHECKPOINT_STEPS = 200

CONFIG = ModelConfig(
    name="demo-emoji",
    trained=False,
    embedding_dim=192,
    vision=VisionConfig(
        image_size=48, patch_size=8, stem="conv", width=192, depth=6, num_heads=3, class_token=False, pool="avg"
    ),
    text=TextConfig(
        vocab_size=VOCABULARY,
        embedding_size=96,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=768,
        max_position_embeddings=64,
        pool="mean",
    ),
    preprocess=PreprocessConfig(image_size=48, resize="squash", max_caption_tokens=64),
)
STRONG = AugmentSettings(
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
    erase=0.5,
)
LIGHT = AugmentSettings(
    rotate_deg=10,
    scale=0.15,
    translate=0.07,
    shear=0.06,
    brightness=0.15,
    contrast=0.2,
    saturation=0.4,
    hue=0.03,
    shade=0.25,
    grey=0.05,
    erase=0.15,
)
# At first at a steady rate. After that the tower told only 0.41 of its own training drawings apart at the first guess,
# and 0.16 of the held-out ones: so then pictures that are easier to tell apart, and the rate falls.
STEADY = TrainSettings(
    loss="concepts",
    num_concepts=1,  # set when the data is known
    what="text_frozen",
    learning_rate=1.5e-3,
    weight_decay=0.05,
    warmup_steps=100,
    num_steps=1000,
    cooldown_steps=0,
    ema_decay=0.995,
    dtype="bfloat16",
    max_logit_scale=30,
    label_smoothing=0.05,
    patch_dropout=0.4,
    augmentation=STRONG,
)
FALLING = STEADY.model_copy(
    update={"num_steps": 2000, "cooldown_steps": 1000, "patch_dropout": 0.25, "augmentation": LIGHT}
)
AGAIN = FALLING.model_copy(update={"learning_rate": 8e-4, "num_steps": 2450, "cooldown_steps": 450})

# Fitted to the pictures after FALLING; then on to where AGAIN moved them.
TEXT_SETTINGS = TrainSettings(
    loss="concepts",
    num_concepts=1,  # set when the data is known
    what="vision_frozen",
    learning_rate=1.5e-3,
    weight_decay=0.05,
    warmup_steps=50,
    num_steps=1200,
    ema_decay=0.99,
    dtype="bfloat16",
    max_logit_scale=50,
    train_prototypes=False,
)
TEXT_AGAIN = TEXT_SETTINGS.model_copy(update={"learning_rate": 1e-3, "num_steps": 600})


@dataclass(frozen=True)
class Drawings:
    """Pictures of some styles: uint8 (N, 48, 48, 3), and which concept (place in `Concepts`) and item each is."""

    pixels: torch.Tensor
    concepts: torch.Tensor
    keys: torch.Tensor

    def take(self, places: torch.Tensor) -> "Drawings":
        """Some of them."""
        return Drawings(self.pixels[places], self.concepts[places], self.keys[places])


@dataclass(frozen=True)
class Concepts:
    """What is known of each concept in words: caption, tags, and the two groups that it stands in."""

    hexcodes: list[str]
    captions: list[str]
    tags: list[tuple[str, ...]]
    groups: list[tuple[str, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("train-demo"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shared", action="store_true", help="use one thread while others keep the cores busy")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    threads = Threads(options.threads, options.shared)
    options.work.mkdir(parents=True, exist_ok=True)
    concepts = read_concepts(options.data)
    drawings = read_drawings(options.data, STYLES, concepts, options.work)
    log(f"{len(drawings.pixels):,} drawings of {len(concepts.hexcodes):,} concepts")
    shared = (concepts, drawings, options.work, options.seed, threads)
    pictures = train_pictures((STEADY, FALLING), *shared)
    texts = train_texts(pictures, None, TEXT_SETTINGS, *shared)
    pictures = train_pictures((STEADY, FALLING, AGAIN), *shared)
    texts = train_texts(pictures, texts, TEXT_AGAIN, *shared)
    texts.export(options.out, CONFIG.name, dtype="float16", replace=True)
    log(f"{options.out}: written")
    if (options.data / f"{TEST_STYLE}.parquet").exists():
        log(json.dumps(evaluate(options.out, options.data, concepts, drawings, options.work)))


def read_concepts(data: Path) -> Concepts:
    """Every concept of the training styles, ordered by code; no column but these is opened."""
    known: dict[str, dict[str, Any]] = {}
    for style in STYLES:
        columns = ["hexcode", "caption", "tags", "group", "subgroup"]
        for row in pq.read_table(data / f"{style}.parquet", columns=columns).to_pylist():
            known.setdefault(row["hexcode"], row)
    rows = [known[hexcode] for hexcode in sorted(known)]
    return Concepts(
        [row["hexcode"] for row in rows],
        [row["caption"] for row in rows],
        [tuple(row["tags"] or ()) for row in rows],
        [(row["group"].replace("-", " "), row["subgroup"].replace("-", " ")) for row in rows],
    )


def read_drawings(data: Path, styles: tuple[str, ...], concepts: Concepts, work: Path) -> Drawings:
    """Decode pictures through the pipeline's own door, once; of concepts that training knows."""
    cache = work / f"drawings-{'+'.join(styles)}.npz"
    if not cache.exists():
        decode_drawings(data, styles, concepts, cache)
    arrays = np.load(cache)
    return Drawings(*(torch.from_numpy(arrays[name]) for name in ("pixels", "concepts", "keys")))


def decode_drawings(data: Path, styles: tuple[str, ...], concepts: Concepts, cache: Path) -> None:
    preprocess = CONFIG.preprocess
    fit = PictureFit(preprocess.image_size, preprocess.resize, preprocess.interpolation, preprocess.reduced_decode)
    places = {hexcode: place for place, hexcode in enumerate(concepts.hexcodes)}
    pixels, found, keys = [], [], []
    with DecodeDoor() as door:
        for style in styles:
            for row in pq.read_table(data / f"{style}.parquet", columns=["item_id", "hexcode", "image"]).to_pylist():
                if row["hexcode"] in places:
                    pixels.append(door.picture(row["image"], fit))
                    found.append(places[row["hexcode"]])
                    keys.append(item_key(row["item_id"]))
    np.savez(cache, pixels=np.stack(pixels), concepts=np.array(found), keys=np.array(keys))


def split(drawings: Drawings) -> tuple[Drawings, Drawings]:
    """Hold out one drawing of every eighth concept that has three or more; which one follows from the items' keys."""
    counts = torch.bincount(drawings.concepts)
    held_out = []
    for concept in torch.nonzero(counts >= 3).flatten().tolist()[::HELD_OUT_EVERY]:
        places = torch.nonzero(drawings.concepts == concept).flatten()
        held_out.append(int(places[int(drawings.keys[places].argmin())]))
    is_held_out = torch.zeros(len(drawings.concepts), dtype=torch.bool)
    is_held_out[held_out] = True
    return drawings.take(~is_held_out), drawings.take(is_held_out)


def train_pictures(
    parts: tuple[TrainSettings, ...],
    concepts: Concepts,
    drawings: Drawings,
    work: Path,
    seed: int,
    threads: "Threads",
) -> Trainer:
    """Phase 1: the ViT tells concepts apart. Parts that are done are read from their last checkpoint."""
    train, held_out = split(drawings)
    trainer = None
    for part, base in enumerate(parts, 1):
        settings = base.model_copy(update={"num_concepts": len(concepts.hexcodes), "seed": seed})
        trainer = go_on(trainer, settings, work / f"pictures-{part}.pt")
        began = time.monotonic()
        while trainer.num_steps_done < settings.num_steps:
            with threads:
                metrics = trainer.step(picture_batch(train, trainer.num_steps_done, seed))
            if metrics.step % 20 == 0:
                log(
                    f"pictures {metrics.step}/{settings.num_steps} loss {metrics.loss:.3f} "
                    f"lr {metrics.learning_rate:.5f} scale {metrics.logit_scale:.1f} grad {metrics.grad_norm:.2f} "
                    f"{time.monotonic() - began:.0f} s"
                )
            if metrics.step % CHECKPOINT_STEPS == 0 or metrics.step == settings.num_steps:
                save_checkpoint(work / f"pictures-{part}.pt", trainer.state_dict())
                log(f"  held-out drawings find their concept at {pictures_to_concepts(trainer, held_out)}")
    return trainer


def go_on(before: Trainer | None, settings: TrainSettings, checkpoint: Path) -> Trainer:
    """The trainer of one part: at its own last checkpoint, else where the part before it ended."""
    trainer = Trainer(CONFIG, settings)
    if checkpoint.exists():
        trainer.load_state_dict(load_checkpoint(checkpoint))
        log(f"{checkpoint.name}: going on at step {trainer.num_steps_done}")
    elif before is not None:
        trainer.load_state_dict(before.state_dict() | {"settings": settings.model_dump_json()})
    return trainer


def train_texts(
    pictures: Trainer,
    before: Trainer | None,
    base: TrainSettings,
    concepts: Concepts,
    drawings: Drawings,
    work: Path,
    seed: int,
    threads: "Threads",
) -> Trainer:
    """Phase 2: the ALBERT hits the middle of its concept's pictures, which stay where they are.

    Begins afresh, or with the text tower of the trainer before it.
    """
    settings = base.model_copy(update={"num_concepts": len(concepts.hexcodes), "seed": seed})
    phrases = [text for place in range(len(concepts.captions)) for text in words_of(concepts, place)]
    tokenizer_json = train_tokenizer(phrases)
    weights = pictures.weights()
    if before is not None:
        weights |= {name: tensor for name, tensor in before.weights().items() if name.startswith("text")}
    start = work / f"pictures-{pictures.num_steps_done}"
    export_model(start, CONFIG, weights, tokenizer_json, replace=True)
    trainer = Trainer(start, settings)
    train, held_out = split(drawings)
    trainer.objective.set_prototypes(centroids(pictures, train, len(concepts.hexcodes)))
    checkpoint = work / f"texts-{pictures.num_steps_done}.pt"
    if checkpoint.exists():
        trainer.load_state_dict(load_checkpoint(checkpoint))
        log(f"texts: going on at step {trainer.num_steps_done}")
    writer = TextWriter(concepts, CaptionEncoder(tokenizer_json, CONFIG.preprocess.max_caption_tokens))
    while trainer.num_steps_done < settings.num_steps:
        with threads:
            metrics = trainer.step(writer.batch(trainer.num_steps_done, seed))
        if metrics.step % 50 == 0:
            log(f"texts {metrics.step}/{settings.num_steps} loss {metrics.loss:.3f} scale {metrics.logit_scale:.1f}")
        if metrics.step % CHECKPOINT_STEPS == 0 or metrics.step == settings.num_steps:
            save_checkpoint(checkpoint, trainer.state_dict())
            log(
                f"  captions find held-out drawings {captions_to_pictures(trainer, concepts, writer.encoder, held_out)}"
            )
    return trainer


def words_of(concepts: Concepts, place: int) -> list[str]:
    """Everything that is said of a concept."""
    return [concepts.captions[place], *concepts.tags[place], *concepts.groups[place]]


class TextWriter:
    """Writes what people may call a concept, and says which concepts each text fits."""

    def __init__(self, concepts: Concepts, encoder: CaptionEncoder) -> None:
        self.concepts, self.encoder = concepts, encoder
        self.said: dict[str, set[int]] = {}  # who has a tag, a group, or a word in the caption
        for place in range(len(concepts.captions)):
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
        places = [chance.randrange(len(self.concepts.captions)) for _ in range(TEXT_BATCH)]
        positives = torch.zeros(TEXT_BATCH, len(self.concepts.captions), dtype=torch.bool)
        ids = []
        for row, place in enumerate(places):
            text, fitting = self.write(place, chance)
            ids.append(torch.from_numpy(self.encoder.encode(text)))
            positives[row, sorted(fitting)] = True
        return TrainBatch(
            pixels=torch.empty(0, 48, 48, 3, dtype=torch.uint8),
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


def encode_texts(trainer: Trainer, encoder: CaptionEncoder, texts: list[str]) -> torch.Tensor:
    ids = [torch.from_numpy(encoder.encode(text)) for text in texts]
    return trainer.encode_captions(torch.cat(ids), torch.tensor([len(each) for each in ids]))


def captions_to_pictures(
    trainer: Trainer, concepts: Concepts, encoder: CaptionEncoder, drawings: Drawings
) -> dict[str, float]:
    """R@k of the held-out drawings among each other, asked for by caption."""
    queries = encode_texts(trainer, encoder, [concepts.captions[place] for place in drawings.concepts.tolist()])
    wanted = drawings.concepts.numpy()
    ranks = best_ranks(queries.numpy(), wanted, trainer.encode_images(drawings.pixels).numpy(), wanted)
    return {f"@{k}": round(float((ranks < k).mean()), 3) for k in KS}


def train_tokenizer(texts: list[str]) -> str:
    """Make a Unigram tokeniser with ALBERT's special tokens; the content of a tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return str(tokenizer.to_str())


def evaluate(folder: Path, data: Path, concepts: Concepts, drawings: Drawings, work: Path) -> dict[str, Any]:
    """What the written model finds in Noto, which it has never seen.

    Texts are ranked against all Noto pictures; R@k counts queries whose own picture is among the best k. Of the unseen
    tags, those of one concept are one query, joined by commas. Noto pictures are also ranked, picture to picture,
    against all training drawings: whether one of the first k concepts is theirs; and so are plain pixels, 18 x 18.
    """
    columns = ["hexcode", "caption", "openmoji_tags", "group"]
    rows = pq.read_table(data / f"{TEST_STYLE}.parquet", columns=columns).to_pylist()
    noto = read_drawings(data, (TEST_STYLE,), concepts, work)
    trainer = Trainer(folder, TrainSettings(ema_decay=0))
    encoder = CaptionEncoder(str(trainer.tokenizer_json), CONFIG.preprocess.max_caption_tokens)
    pictures, places = trainer.encode_images(noto.pixels).numpy(), np.arange(len(rows))
    is_flag = np.array([row["group"] == "flags" for row in rows])
    tags = [", ".join(row["openmoji_tags"] or ()) for row in rows]
    has_tags = np.array([bool(text) for text in tags])
    by_caption = best_ranks(
        encode_texts(trainer, encoder, [row["caption"] for row in rows]).numpy(), places, pictures, places
    )
    by_tags = best_ranks(
        encode_texts(trainer, encoder, [text for text in tags if text]).numpy(), places[has_tags], pictures, places
    )
    embeddings = trainer.encode_images(drawings.pixels).numpy()
    return {
        "caption": recalls(by_caption),
        "caption, flags": recalls(by_caption[is_flag]),
        "caption, no flags": recalls(by_caption[~is_flag]),
        "unseen tags": recalls(by_tags),
        "unseen tags, no flags": recalls(by_tags[~is_flag[has_tags]]),
        "picture to picture": recalls(concept_ranks(pictures, noto, embeddings, drawings)),
        "picture to picture, pixels 18 x 18": recalls(
            concept_ranks(plain_pixels(noto), noto, plain_pixels(drawings), drawings)
        ),
    }


def recalls(ranks: Any) -> dict[str, float]:
    return {f"R@{k}": round(float((ranks < k).mean()), 4) for k in KS} | {"queries": len(ranks)}


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


def picture_batch(drawings: Drawings, step: int, seed: int) -> TrainBatch:
    """The batch of one step: each epoch's order follows from the seed and the epoch; what doesn't fill one is left."""
    steps_an_epoch = len(drawings.pixels) // PICTURE_BATCH
    epoch, place = divmod(step, steps_an_epoch)
    order = torch.randperm(len(drawings.pixels), generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
    chosen = drawings.take(order[place * PICTURE_BATCH : (place + 1) * PICTURE_BATCH])
    none = torch.empty(0, dtype=torch.int64)
    return TrainBatch(chosen.pixels, chosen.concepts, none.int(), none, none, chosen.keys, epoch)


def centroids(trainer: Trainer, drawings: Drawings, num_concepts: int) -> torch.Tensor:
    """The middle of each concept's pictures; float32 (C, E), unit rows."""
    embeddings = trainer.encode_images(drawings.pixels)
    sums = torch.zeros(num_concepts, embeddings.shape[1]).index_add_(0, drawings.concepts, embeddings)
    return torch.nn.functional.normalize(sums, dim=-1)


def pictures_to_concepts(trainer: Trainer, test: Drawings) -> dict[str, float]:
    """How many pictures have their concept among the k nearest prototypes."""
    prototypes = torch.nn.functional.normalize(trainer.objective.prototypes.detach(), dim=-1).numpy()
    pictures, wanted = trainer.encode_images(test.pixels).numpy(), test.concepts.numpy()
    ranks = best_ranks(pictures, wanted, prototypes, np.arange(len(prototypes)))
    return {f"@{k}": round(float((ranks < k).mean()), 3) for k in KS}


class Threads:
    """How many threads a step uses; with `is_shared` one, while the second gets less than half a core.

    Two threads meet after every operation, so one that has to wait for a core holds the other up: a step then takes
    many times as long as with one thread. The number of threads may change last bits.
    """

    TRY_AGAIN_STEPS = 12

    def __init__(self, largest: int, is_shared: bool) -> None:
        self.largest, self.is_shared, self.num_steps_alone = largest, is_shared, 0
        torch.set_num_threads(largest)

    def __enter__(self) -> None:
        self.began, self.cpu_began = time.monotonic(), time.process_time()

    def __exit__(self, *_: object) -> None:
        if not self.is_shared:
            return
        cores = (time.process_time() - self.cpu_began) / (time.monotonic() - self.began)
        alone = torch.get_num_threads() == 1
        self.num_steps_alone = self.num_steps_alone + 1 if alone else 0
        if not alone and cores < 0.75 * self.largest:
            torch.set_num_threads(1)
        elif self.num_steps_alone >= self.TRY_AGAIN_STEPS:
            torch.set_num_threads(self.largest)


def log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    main()
