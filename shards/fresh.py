"""Fresh models: untrained weights, each determined by a seed and its own name."""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from shards.model_config import ModelConfig
from shards.saving import MAX_FILE_BYTES, staged_model, stream_weights
from shards.tensor_shapes import LOGIT_SCALE, OPTIONAL_SHAPES, is_table, model_shapes
from shards.tokenizer import check_tokenizer, parse_tokenizer
from shards.towers.base import Shape

# CLIP starts its training at a temperature of 0.07. Source: Radford et al. 2021, section 2.5.
INITIAL_LOGIT_SCALE = math.log(1 / 0.07)


def init_model(
    config: ModelConfig,
    folder: str | Path,
    *,
    seed: int,
    tokenizer_json: str | None = None,
    dtype: str = "float32",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write an untrained model, one tensor in memory at a time; the same seed gives the same bytes.

    `folder` must be missing or empty. `tokenizer_json` is the content of the file, None for no file. Weights larger
    than `max_file_bytes` are split into several files. Raises a ModelError if the tokeniser doesn't fit the text tower.
    """
    folder, config = Path(folder), config.model_copy(update={"trained": False})
    if tokenizer_json is not None:
        check_tokenizer(parse_tokenizer(tokenizer_json, str(folder)), config.required_text, str(folder))
    with staged_model(folder, config, tokenizer_json) as stage:
        shapes = model_shapes(config) | {LOGIT_SCALE: OPTIONAL_SHAPES[LOGIT_SCALE]}
        stream_weights(stage, shapes, fresh_tensors(config, seed), dtype=dtype, max_file_bytes=max_file_bytes)
    return folder


def fresh_tensors(
    config: ModelConfig, seed: int, prefixes: str | tuple[str, ...] = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """Make untrained weights; each depends only on the seed and its own name."""
    for name, shape in model_shapes(config).items():
        if name.startswith(prefixes):
            yield name, _fresh_tensor(config, name, shape, seed)
    if LOGIT_SCALE.startswith(prefixes):
        yield LOGIT_SCALE, torch.tensor(INITIAL_LOGIT_SCALE)


def _fresh_tensor(config: ModelConfig, name: str, shape: Shape, seed: int) -> torch.Tensor:
    """Fill norms with 1, biases with 0; tokens and tables deviate by 0.02 (timm, BERT); matrices keep the variance."""
    side, _, inner = name.partition(".")
    value = config.towers[side].fresh_value(inner) if side in config.towers else None
    if value is not None:
        return torch.full(shape, value)
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith((".bias", ".running_mean")) else torch.ones(shape)
    deviation = 0.02 if is_table(name) else 1 / math.sqrt(math.prod(shape[1:]))
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return torch.randn(shape, generator=generator) * deviation
