"""Whole model, unsplit: the reference that shards are compared with; and fresh models.

`TwinTower` runs timm's and transformers' own forward functions, not the shards' loops over layers, so that it doesn't
share their mistakes.

Legend: `F` frames, `N` tokens of all captions, `R` captions, `T` tokens of the longest, `E` embedding size.
"""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from shards.activations import Batch, Output, TowerState
from shards.config import ModelConfig, load_model_config
from shards.heads import build_text_head, build_vision_head, unit_rows
from shards.loading import load_tensors
from shards.ranges import whole_model
from shards.saving import MAX_FILE_BYTES, staged_model, stream_weights
from shards.tensor_shapes import LOGIT_SCALE, OPTIONAL_SHAPES, Shape, model_shapes
from shards.text import Padding, build_albert, fill_albert_buffers, pool_albert_tokens
from shards.tokenizer import check_tokenizer, parse_tokenizer
from shards.vision import Normalise, build_vit

# CLIP starts its training at a temperature of 0.07. Source: Radford et al. 2021, section 2.5.
INITIAL_LOGIT_SCALE = math.log(1 / 0.07)


class TwinTower(nn.Module):
    """Twin tower with its projections, in float32; its state dict has the model folder's names."""

    # As of a shard that holds everything.
    vision_output: Output = "embedding"
    text_output: Output = "embedding"
    dtype = torch.float32

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.vision = build_vit(config.vision)
        self.vision_head = build_vision_head(config)
        self.text = build_albert(config.text)
        self.text_head = build_text_head(config)
        self.normalise = Normalise(config.preprocess)

    def project_pixels(self, pixels_FHWC: torch.Tensor) -> torch.Tensor:
        """Project uint8 [0, 255] images (F, H, W, 3); float32 (F, E), not normalised."""
        features = self.vision.forward_features(self.normalise(pixels_FHWC, torch.float32))
        projected: torch.Tensor = self.vision_head(self.vision.forward_head(features, pre_logits=True))
        return projected

    def pool_captions(self, ids_N: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Run the ALBERT on packed captions, token ids (N,) of lengths (R,) on the CPU; (R, width), pooled."""
        text, device = self.config.text, self.text.device
        ids_RT = Padding.of(lengths, device).pad(ids_N.to(device), fill=text.pad_token_id)
        is_token = torch.arange(ids_RT.shape[1]) < lengths[:, None]
        output = self.text(input_ids=ids_RT, attention_mask=is_token.long().to(device))
        if text.pool == "pooler":
            pooled: torch.Tensor = output.pooler_output
            return pooled
        return pool_albert_tokens(self.text, text, output.last_hidden_state, lengths)

    def forward(self, batch: Batch) -> Batch:
        """Embed a batch of pixels and token ids, like a shard that holds everything."""
        return Batch(
            self._embed_vision(batch.vision) if batch.vision is not None else None,
            self._embed_text(batch.text) if batch.text is not None else None,
        )

    def _embed_vision(self, state: TowerState) -> TowerState:
        lengths = state.lengths[state.lengths > 0]
        if not len(lengths):
            return self._empty(state)
        return TowerState(unit_rows(self.project_pixels(state.values), lengths), state.lengths.clamp(max=1))

    def _embed_text(self, state: TowerState) -> TowerState:
        lengths = state.lengths[state.lengths > 0]
        if not len(lengths):
            return self._empty(state)
        projected_RE = self.text_head(self.pool_captions(state.values, lengths))
        return TowerState(unit_rows(projected_RE, torch.ones_like(lengths)), state.lengths.clamp(max=1))

    def _empty(self, state: TowerState) -> TowerState:
        return TowerState(torch.empty((0, self.config.embedding_dim), device=self.text.device), state.lengths)


def load_towers(folder: str | Path, *, device: str = "cpu") -> TwinTower:
    """Load the whole model in float32, in evaluation mode.

    Raises:
        ModelError: the folder is no model folder, or its weights aren't those of its configuration.
    """
    config, torch_device = load_model_config(folder), torch.device(device)
    with torch.device("meta"):
        towers = TwinTower(config)
    tensors = load_tensors(Path(folder), config, whole_model(config), "float32", torch_device)
    towers.load_state_dict(tensors, strict=True, assign=True)
    fill_albert_buffers(towers.text, torch_device)
    towers.normalise.to(torch_device)
    return towers.eval()


def init_model(
    config: ModelConfig,
    folder: str | Path,
    *,
    seed: int,
    tokenizer_json: str | None = None,
    dtype: str = "float32",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write a model folder with fresh weights, one tensor in memory at a time; the same seed gives the same bytes.

    Args:
        config: the model; `trained` should be false.
        folder: the folder to write; must not exist yet, or be empty.
        seed: any integer.
        tokenizer_json: content of tokenizer.json; None writes none.
        dtype: name of the stored dtype.
        max_file_bytes: weights larger than this are split into several files.

    Raises:
        ModelError: the folder isn't empty, or the tokeniser doesn't fit the text tower.
    """
    folder = Path(folder)
    if tokenizer_json is not None:
        check_tokenizer(parse_tokenizer(tokenizer_json, str(folder)), config.text, str(folder))
    with staged_model(folder, config, tokenizer_json) as stage:
        shapes = model_shapes(config) | OPTIONAL_SHAPES
        stream_weights(stage, shapes, fresh_tensors(config, seed), dtype=dtype, max_file_bytes=max_file_bytes)
    return folder


def fresh_tensors(
    config: ModelConfig, seed: int, prefixes: str | tuple[str, ...] = ""
) -> Iterator[tuple[str, torch.Tensor]]:
    """Make untrained weights; each depends on the seed and its own name only.

    Args:
        config: the model.
        seed: any integer.
        prefixes: only weights whose names start with one of these.
    """
    for name, shape in model_shapes(config).items():
        if name.startswith(prefixes):
            yield name, _fresh_tensor(config, name, shape, seed)
    if LOGIT_SCALE.startswith(prefixes):
        yield LOGIT_SCALE, torch.tensor(INITIAL_LOGIT_SCALE)


def _fresh_tensor(config: ModelConfig, name: str, shape: Shape, seed: int) -> torch.Tensor:
    """Norms are 1, biases 0, tokens and tables of deviation 0.02 as in timm and ALBERT; matrices keep the variance."""
    if name.endswith(".gamma"):
        return torch.full(shape, config.vision.init_values or 1.0)
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith((".bias", ".running_mean")) else torch.ones(shape)
    is_table = name.endswith(("_token", "pos_embed", "embeddings.weight"))
    deviation = 0.02 if is_table else 1 / math.sqrt(math.prod(shape[1:]))
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return torch.randn(shape, generator=generator) * deviation
