"""Published sizes of twin towers, as configurations: no weights are needed where only shapes are computed."""

from pathlib import Path

import torch

from shards.config import ModelConfig
from shards.preprocess import PreprocessConfig
from shards.shard import Shard
from shards.shard_specs import ShardSpec
from shards.tensor_shapes import held_dtype
from shards.towers.clip import ClipTextTower
from shards.towers.siglip import SiglipTextTower
from shards.towers.vit import VitTower


def _clip(name: str, vision: VitTower, text: ClipTextTower, dim: int) -> ModelConfig:
    preprocess = PreprocessConfig(image_size=vision.image_size, max_caption_tokens=text.max_tokens)
    return ModelConfig(name=name, trained=False, embedding_dim=dim, vision=vision, text=text, preprocess=preprocess)


def _clip_vision(patch_size: int, width: int, depth: int) -> VitTower:
    return VitTower(
        patch_size=patch_size, width=width, depth=depth, num_heads=width // 64, pre_norm=True, activation="quick_gelu"
    )


def _clip_text(width: int) -> ClipTextTower:
    return ClipTextTower(hidden_size=width, num_attention_heads=width // 64, intermediate_size=4 * width)


def _siglip() -> ModelConfig:
    vision = VitTower(
        image_size=384,
        patch_size=14,
        width=1152,
        depth=27,
        num_heads=16,
        mlp_ratio=4304 / 1152,
        class_token=False,
        pool="map",
        activation="gelu_tanh",
    )
    text = SiglipTextTower(
        vocab_size=32_000, hidden_size=1152, num_hidden_layers=27, num_attention_heads=16, intermediate_size=4304
    )
    preprocess = PreprocessConfig(image_size=384, max_caption_tokens=text.max_tokens)
    return ModelConfig(
        name="so400m-384",
        trained=False,
        embedding_dim=1152,
        vision_projection="none",
        text_projection="linear",
        vision=vision,
        text=text,
        preprocess=preprocess,
    )


MODELS = {
    "vit-b-32": lambda: _clip("vit-b-32", _clip_vision(32, 768, 12), _clip_text(512), 512),
    "vit-l-14": lambda: _clip("vit-l-14", _clip_vision(14, 1024, 24), _clip_text(768), 768),
    "so400m-384": _siglip,
}


def shard_of_shapes(config: ModelConfig, spec: ShardSpec, dtype: str = "bfloat16") -> Shard:
    """Build a shard whose tensors have shapes alone."""
    with torch.device("meta"):
        shard = Shard(config, spec, getattr(torch, dtype))
    for name, parameter in shard.named_parameters():
        parameter.data = parameter.data.to(getattr(torch, held_dtype(config, name, tuple(parameter.shape), dtype)))
    return shard.finish(torch.device("meta"))


def write_config(config: ModelConfig, folder: Path) -> Path:
    """Write a model folder that has a configuration alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.to_json(), encoding="utf-8")
    return folder
