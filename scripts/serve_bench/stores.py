"""Stores of many vectors that no model has computed, under models whose text tower is real."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from published_rows import as_embedded, publish_rows
from tokenizers import Tokenizer

from corpus import DEMO_MODEL, read_shipped
from embedder.batch_schema import VECTOR
from embedder.config import RunConfig
from embedder.config_toml.index_section import IndexConfig
from embedder.entrances import build_index
from embedder.executors.job import store_info
from embedder.models.model_folder import open_model
from embedder.store.files import StoreFiles
from retrieval_bench.vectors import make_vectors
from shards.config import ModelConfig
from shards.fresh import init_model
from shards.preprocess import PreprocessConfig
from shards.towers.clip import ClipTextTower
from shards.towers.vit import VitTower

PART_ROWS = 65_536
CLIP_B32 = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "intermediate_size": 2048}
NUM_CATEGORIES = 20


def make_model(folder: Path, kind: str) -> Path:
    """Make a model folder, or give the shipped one.

    Args:
        folder: to make.
        kind: `shipped`, or `clip-b32`: a text tower of CLIP-B/32's size, with random weights and the demo's tokeniser.
    """
    if kind == "shipped":
        return DEMO_MODEL
    tokenizer_json = (DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8")
    end_id = Tokenizer.from_str(tokenizer_json).token_to_id("[SEP]")
    config = ModelConfig(
        name=kind,
        trained=False,
        embedding_dim=512,
        vision=VitTower(image_size=32, patch_size=16, width=64, depth=1, num_heads=2),  # asked with texts alone
        text=ClipTextTower(**CLIP_B32, eos_token_id=end_id, pad_token_id=end_id),
        preprocess=PreprocessConfig(image_size=32, max_caption_tokens=77),
    )
    return init_model(config, folder, seed=0, tokenizer_json=tokenizer_json)


def make_store(folder: Path, model: Path, num_vectors: int, index: str) -> Path:
    """Make a store of images, with an index; gives its folder.

    Args:
        folder: of the store.
        model: model folder that the vectors are said to be of.
        num_vectors: of the images, one each.
        index: kind of the index, as `embedder index build --kind` takes it.
    """
    opened = open_model(str(model))
    files = StoreFiles(folder)
    images, _ = make_vectors(num_vectors, 1, width=opened.config.embedding_dim)
    config = RunConfig(store=files.address, model=str(model), index=IndexConfig(min_recall=0))
    publish_rows(files, store_info(config.rows, opened, config.compute.settled_dtype), _parts(images))
    build_index(config, kind=index, force=True)
    return folder


def _parts(images: np.ndarray) -> Iterator[pa.Table]:
    for start in range(0, len(images), PART_ROWS):
        names = [f"{number:09d}.jpg" for number in range(start, min(start + PART_ROWS, len(images)))]
        captions = [f"image {int(name[:9])} of category {int(name[:9]) % NUM_CATEGORIES}" for name in names]
        same = {"source": "", "modified": "1"}
        listed = pa.table(
            {"item_id": names, "uri": [f"/images/{name}" for name in names], "caption": captions}
            | {column: [value] * len(names) for column, value in same.items()}
            | {"size_bytes": pa.array([1] * len(names))}
        )
        vectors = pa.array(list(images[start : start + PART_ROWS]), VECTOR)
        yield as_embedded(listed, vectors, content_version="1")


class Texts:
    """Different texts of the words that the shipped captions have, each by its number."""

    def __init__(self) -> None:
        _, captions = read_shipped()
        self._words = sorted({word for caption in captions for word in caption.split()})
        self._lengths = [len(caption.split()) for caption in captions]

    def __getitem__(self, number: int) -> str:
        """Text of a number; it is as long as a caption, and its first words tell it from all others."""
        base = len(self._words)
        places = [number % base, number // base % base]
        places += [(number * 7919 + place * 104_729) % base for place in range(self._lengths[number % 997] - 2)]
        return " ".join(self._words[place] for place in places)
