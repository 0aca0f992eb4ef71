"""Measured costs of layers on this machine's device: seconds and workspace bytes for one input; torch, no Ray.

One block of each tower is loaded at a time, so that a model larger than memory can be measured; all blocks of a tower
have the same shape.

Legend: `F` frames, `L` tokens of one image, `R` captions, `T` tokens of one caption, `D` width.
"""

from pathlib import Path

import torch

from shards.config import ModelConfig, load_model_config
from shards.planning.costs import ModelCosts, TowerSeconds
from shards.ranges import LayerRange, ShardSpec
from shards.shard import Shard, load_shard
from shards.timing import TimedPart, TimingSetting, measure_copy, measure_part

__all__ = ["TimingSetting", "measure_costs"]

NOTHING = LayerRange(0, 0)


def measure_costs(folder: str | Path, setting: TimingSetting, model_fingerprint: str | None = None) -> ModelCosts:
    """Measure both towers: embeddings, one layer of each, heads, and a copy through memory.

    Args:
        folder: a local model folder.
        setting: dtype, device, threads and batch of the layers.
        model_fingerprint: fingerprint to record in the result.

    Raises:
        ModelError: the folder is no model folder, or its weights aren't those of its configuration.
    """
    config = load_model_config(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(setting.num_threads)
    try:
        vision, vision_bytes = _measure_vision(folder, config, setting)
        text, text_bytes = _measure_text(folder, config, setting)
        copy_s = measure_copy()
    finally:
        torch.set_num_threads(threads)
    return ModelCosts(
        model_fingerprint=model_fingerprint,
        device=setting.device_name,
        dtype=setting.dtype,
        source="measured",
        caption_tokens=setting.caption_tokens,
        vision=vision,
        text=text,
        send_s_per_byte=copy_s,
        call_s=0.0,
        workspace_bytes_per_image=vision_bytes,
        workspace_bytes_per_caption=text_bytes,
    )


def _measure_vision(folder: str | Path, config: ModelConfig, setting: TimingSetting) -> tuple[TowerSeconds, int]:
    """Seconds and workspace bytes; one block is in memory at a time: embeddings and a layer, then the head."""
    front, layer = _vision_layer(folder, config, setting)
    return _tower(front, layer, _vision_head(folder, config, setting))


def _vision_layer(folder: str | Path, config: ModelConfig, setting: TimingSetting) -> tuple[TimedPart, TimedPart]:
    from shards.vision import embed_pixels, run_vit_blocks

    shard = _load(folder, setting, vision=LayerRange(0, 1))
    size_px = config.vision.image_size
    pixels_FHWC = torch.randint(0, 256, (setting.num_rows, size_px, size_px, 3)).byte()
    x_FLD = _activation(shard, setting, (config.vision.num_tokens, config.vision.width))
    front = measure_part(lambda n: embed_pixels(shard.vision, shard.normalise(pixels_FHWC[:n], shard.dtype)), setting)
    return front, measure_part(lambda n: run_vit_blocks(shard.vision, x_FLD[:n]), setting)


def _vision_head(folder: str | Path, config: ModelConfig, setting: TimingSetting) -> TimedPart:
    from shards.heads import unit_rows
    from shards.vision import pool_vit_tokens

    shard = _load(folder, setting, vision=LayerRange(config.vision.depth - 1, config.vision.depth))
    lengths = torch.ones(setting.num_rows, dtype=torch.int64)
    x_FLD = _activation(shard, setting, (config.vision.num_tokens, config.vision.width))
    return measure_part(
        lambda n: unit_rows(shard.vision_head(pool_vit_tokens(shard.vision, x_FLD[:n])), lengths[:n]), setting
    )


def _measure_text(folder: str | Path, config: ModelConfig, setting: TimingSetting) -> tuple[TowerSeconds, int]:
    num_tokens = min(setting.caption_tokens, config.text.max_position_embeddings)
    # Captions of one batch differ in length, and all are padded to the longest: that one counts.
    lengths = torch.linspace(num_tokens, num_tokens / 2, setting.num_rows).ceil().long()
    front, layer = _text_layer(folder, config, setting, lengths)
    return _tower(front, layer, _text_head(folder, config, setting, lengths))


def _text_layer(
    folder: str | Path, config: ModelConfig, setting: TimingSetting, lengths: torch.Tensor
) -> tuple[TimedPart, TimedPart]:
    from shards.text import Padding, embed_tokens, run_albert_layers

    layers = LayerRange(0, 1)
    shard = _load(folder, setting, text=layers)
    mask = Padding.of(lengths, torch.device(setting.device)).mask
    ids_RT = torch.zeros((setting.num_rows, int(lengths[0])), dtype=torch.int64, device=setting.device)
    x_RTD = _activation(shard, setting, (int(lengths[0]), config.text.hidden_size))

    def layer(num_rows: int) -> torch.Tensor:
        some = None if mask is None else mask[:num_rows]
        return run_albert_layers(shard.text, config.text, layers, x_RTD[:num_rows], some)

    return measure_part(lambda n: embed_tokens(shard.text, ids_RT[:n]), setting), measure_part(layer, setting)


def _text_head(folder: str | Path, config: ModelConfig, setting: TimingSetting, lengths: torch.Tensor) -> TimedPart:
    from shards.heads import unit_rows
    from shards.text import pool_albert_tokens

    depth = config.text.num_hidden_layers
    shard = _load(folder, setting, text=LayerRange(depth - 1, depth))
    x_RTD = _activation(shard, setting, (int(lengths[0]), config.text.hidden_size))
    ones = torch.ones_like(lengths)

    def head(num_rows: int) -> torch.Tensor:
        pooled = pool_albert_tokens(shard.text, config.text, x_RTD[:num_rows], lengths[:num_rows])
        return unit_rows(shard.text_head(pooled), ones[:num_rows])

    return measure_part(head, setting)


def _load(
    folder: str | Path, setting: TimingSetting, vision: LayerRange = NOTHING, text: LayerRange = NOTHING
) -> Shard:
    return load_shard(folder, ShardSpec(vision, text), dtype=setting.dtype, device=setting.device)


def _activation(shard: Shard, setting: TimingSetting, shape: tuple[int, ...]) -> torch.Tensor:
    """Random values of the scale that norms produce; some kernels are faster with zeros."""
    values = torch.randn((setting.num_rows, *shape), generator=torch.Generator().manual_seed(0))
    return values.to(setting.device, shard.dtype)


def _tower(front: TimedPart, layer: TimedPart, head: TimedPart) -> tuple[TowerSeconds, int]:
    workspace_bytes = max(part.workspace_bytes for part in (front, layer, head))
    return TowerSeconds(front.seconds, layer.seconds, head.seconds), workspace_bytes
