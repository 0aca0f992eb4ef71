"""What the benchmarks of plans share: models, items, and a run on Ray whose actors are up before it begins."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from shipped_pictures import read_shipped

from embedder.config import RunConfig, load_config
from embedder.engine.job import Model, open_model
from embedder.ingest.embed import embed
from embedder.report.schema import Report
from shards.config import ModelConfig, PreprocessConfig, TextConfig, VisionConfig
from shards.towers import init_model

PACKAGE = Path(__file__).parents[1] / "embedder"
DEMO_MODEL = PACKAGE / "demo_model"
NUM_WARM = 64  # items of the run that is thrown away: it starts the processes of tasks, which later runs find


class Quiet:
    """Watches nothing."""

    def say(self, message: str) -> None:
        """Be told."""

    def progress(self, num_items: int) -> nullcontext:
        """Show nothing."""
        return nullcontext(lambda num_done: None)


@dataclass(frozen=True)
class Items:
    """What is embedded: every `picture_every`-th item has a picture; captions are `captions` shipped ones, joined."""

    picture_every: int = 1
    captions: int = 1


def make_model(folder: Path, vision: dict, text: dict) -> Path:
    """A model folder with fresh weights, and the demo's tokeniser."""
    demo = json.loads((DEMO_MODEL / "config.json").read_text())
    text = {"vocab_size": demo["text"]["vocab_size"], "max_position_embeddings": 64, "pool": "mean"} | text
    config = ModelConfig(
        name=folder.name,
        trained=False,
        embedding_dim=256,
        vision=VisionConfig(**vision),
        text=TextConfig(**text),
        preprocess=PreprocessConfig(image_size=vision["image_size"], resize="squash", max_caption_tokens=64),
    )
    return init_model(config, folder, seed=0, tokenizer_json=(DEMO_MODEL / "tokenizer.json").read_text())


def write_items(folder: Path, num_items: int, items: Items) -> Path:
    """Write pictures with captions, or captions alone, from the shipped emoji."""
    folder.mkdir(parents=True)
    pictures, captions = read_shipped()
    for number in range(num_items):
        words = (captions[(number + k * 7) % len(captions)] for k in range(items.captions))
        (folder / f"{number:06d}.txt").write_text(", ".join(words), encoding="utf-8")
        if number % items.picture_every == 0:
            (folder / f"{number:06d}.png").write_bytes(pictures[number % len(pictures)])
    return folder


@contextmanager
def warm_ray() -> Iterator[None]:
    """One Ray for all runs; each waits for its actors, so that its window begins when all of them compute."""
    import ray
    from ray.data import DataContext

    from embedder.engine.ray_session import start_ray

    start_ray()
    DataContext.get_current().wait_for_min_actors_s = 300
    try:
        yield
    finally:
        ray.shutdown()


def configured(model: Path, source: Path, store: Path, **settings: object) -> tuple[RunConfig, Model]:
    """A run on Ray."""
    overrides = {
        "model": str(model),
        "store": str(store),
        "source": [{"path": str(source)}],
        "engine": "ray",
        "rows_per_part": 256,
        **settings,
    }
    return load_config(overrides=overrides), open_model(str(model))


def run(config: RunConfig) -> Report:
    """Embed, and say how it went."""
    return embed(config, Quiet())
