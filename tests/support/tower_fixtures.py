"""Seeded tiny twin towers, with every weight random, and batches for them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from shards.activations import Batch, TowerState
from shards.fresh import init_model
from shards.model_config import ModelConfig
from shards.preprocess import PreprocessConfig
from shards.saving import write_weights
from shards.tensor_shapes import model_shapes
from shards.towers.albert import AlbertTower
from shards.towers.vit import VitTower

SENTENCES = (
    "a red car on the road",
    "two cats sleep on a green sofa",
    "the quick brown fox jumps over the lazy dog",
    "children play football in the rain",
    "a bowl of fresh fruit and a glass of milk",
)

VISION = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 4, "num_heads": 2}
TEXT = {
    "vocab_size": 120,
    "embedding_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Equality to the last bit is promised for one thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    """A unigram tokeniser as ALBERT's, trained on a few sentences."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.UnigramTrainer(vocab_size=110, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer.to_str()


def tiny_config(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, **top: Any) -> ModelConfig:
    vision_config = VitTower(**(VISION | (vision or {})))
    text_config = AlbertTower(**(TEXT | (text or {})))
    preprocess = PreprocessConfig(
        image_size=vision_config.image_size,
        mean=(0.4, 0.5, 0.6),
        std=(0.2, 0.3, 0.4),
        max_caption_tokens=text_config.max_position_embeddings,
    )
    settings = {"name": "tiny", "trained": False, "embedding_dim": 24, "preprocess": preprocess} | top
    return ModelConfig(vision=vision_config, text=text_config, **settings)


def random_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Weights of which none is 0 or 1, so that a wrong mapping of any shows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in model_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            tensors[name] = 0.2 * noise + (0.0 if name.endswith(".bias") else 1.0)
        else:
            tensors[name] = noise / max(1, torch.Size(shape[1:]).numel()) ** 0.5
    return tensors


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ModelConfig]:
    return tiny_config


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory, tokenizer_json: str) -> Callable[..., Path]:
    """Write a tiny model folder, once for each configuration."""
    made: dict[tuple[str, int, int], Path] = {}

    def make(config: ModelConfig | None = None, *, seed: int = 0, max_file_bytes: int = 1 << 30) -> Path:
        config = config or tiny_config()
        key = (config.to_json(), seed, max_file_bytes)
        if key not in made:
            folder = tmp_path_factory.mktemp("model") / "tiny"
            init_model(config, folder, seed=seed, tokenizer_json=tokenizer_json)
            (folder / "model.safetensors").unlink()
            write_weights(folder, random_tensors(config, seed).items(), max_file_bytes=max_file_bytes)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    """A batch of random pixels and token ids; the lengths say which rows have which side."""

    def make(
        config: ModelConfig, frames: Iterable[int] = (1, 0, 3, 1), tokens: Iterable[int] = (8, 9, 0, 2), seed: int = 0
    ) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        num_frames, num_tokens = torch.tensor(list(frames)), torch.tensor(list(tokens))
        side = config.vision.image_size
        pixels_shape, ids_shape = (int(num_frames.sum()), side, side, 3), (int(num_tokens.sum()),)
        pixels = torch.randint(0, 256, pixels_shape, dtype=torch.uint8, generator=generator)
        ids = torch.randint(1, config.text.vocab_size, ids_shape, dtype=torch.int32, generator=generator)
        return Batch(TowerState(pixels, num_frames), TowerState(ids, num_tokens))

    return make
