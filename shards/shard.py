"""Shard: a contiguous range of layers of both towers, loaded with its own weights alone.

Legend: `F` frames, `R` captions, `T` tokens of the longest caption, `L` tokens of one image, `D` width, `E` embedding
size.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from shards.activations import Batch, Output, TowerState
from shards.config import ModelConfig, load_model_config
from shards.loading import activation_dtype, load_tensors
from shards.ranges import LayerRange, ShardSpec, check_spec
from shards.tensor_shapes import SCALE_SUFFIX

# BatchNorm counts batches while it trains; nothing that is embedded depends on it.
BATCH_COUNTER = ".num_batches_tracked"


def load_shard(folder: str | Path, spec: ShardSpec, *, dtype: str = "float32", device: str = "cpu") -> "Shard":
    """Build a shard on the meta device, then load the tensors that it owns.

    Args:
        folder: a local model folder.
        spec: the layers of both towers; a whole tower and an empty one encode queries.
        dtype: compute dtype of embeddings and layers; the heads and a conv stem stay in float32. With "int8", the
            weights of linear layers are int8, and all else, activations too, float32.
        device: torch device.

    Raises:
        ModelError: the folder or the spec doesn't fit, or a tensor is missing, unknown or of another shape.
    """
    config = load_model_config(folder)
    check_spec(spec, config)
    torch_device = torch.device(device)
    with torch.device("meta"):
        shard = Shard(config, spec, activation_dtype(dtype), is_int8=dtype == "int8")
    shard.load_state_dict(load_tensors(Path(folder), config, spec, dtype, torch_device), strict=True, assign=True)
    return shard.finish(torch_device)


class Shard(nn.Module):
    """Modules of one shard, under the names that their tensors have in the model folder.

    A shard with no ViT layers imports no timm, and one with no ALBERT layers no transformers.
    """

    # None where the shard doesn't own it; precise types would import libraries that this shard may not need.
    vision: Any
    vision_head: Any
    normalise: Any
    text: Any
    text_head: Any

    def __init__(self, config: ModelConfig, spec: ShardSpec, dtype: torch.dtype, *, is_int8: bool = False) -> None:
        """Build the modules on torch's current default device.

        Args:
            config: the model.
            spec: the layers.
            dtype: dtype of activations.
            is_int8: whether the layers' linear weights are int8.
        """
        super().__init__()
        self.config, self.spec, self.dtype = config, spec, dtype
        self.device = torch.device("meta")
        self.vision = self.vision_head = self.normalise = self.text = self.text_head = None
        if len(spec.vision):
            self._build_vision()
        if len(spec.text):
            self._build_text()
        if is_int8:
            self._make_layers_int8()

    def _make_layers_int8(self) -> None:
        from shards.quantised import make_linears_int8

        for layers in (self.vision and self.vision.blocks, self.text and self.text.encoder):
            if layers is not None:
                make_linears_int8(layers)

    def _build_vision(self) -> None:
        from shards.heads import build_vision_head
        from shards.vision import Normalise, build_vit, prune_vit

        self.vision = build_vit(self.config.vision)
        prune_vit(self.vision, self.spec.vision)
        if self.spec.vision.holds_front():
            self.normalise = Normalise(self.config.preprocess)
            if self.config.vision.stem == "conv":
                self.vision.patch_embed.backbone.output_dtype = self.dtype
        if self.vision_output == "embedding":
            self.vision_head = build_vision_head(self.config)

    def _build_text(self) -> None:
        from shards.heads import build_text_head
        from shards.text import build_albert, prune_albert

        self.text = build_albert(self.config.text)
        prune_albert(self.text, self.config.text, self.spec.text)
        if self.text_output == "embedding":
            self.text_head = build_text_head(self.config)

    def finish(self, device: torch.device) -> "Shard":
        """Move buffers that are in no weight file to the device, and freeze the weights."""
        self.device = device
        if self.normalise is not None:
            self.normalise.to(device)
        if self.text is not None:
            from shards.text import fill_albert_buffers

            fill_albert_buffers(self.text, device)
        return self.eval().requires_grad_(False)

    @property
    def vision_output(self) -> Output | None:
        """Kind of output on the vision side; None where the side passes through."""
        return _output(self.spec.vision, self.config.vision.depth)

    @property
    def text_output(self) -> Output | None:
        """Kind of output on the text side; None where the side passes through."""
        return _output(self.spec.text, self.config.text.num_hidden_layers)

    @property
    def num_parameters(self) -> int:
        """Number of values of all weights; scales of int8 weights are no parameters."""
        return sum(tensor.numel() for name, tensor in self._weights().items() if not name.endswith(SCALE_SUFFIX))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self._weights().values())

    def _weights(self) -> dict[str, torch.Tensor]:
        """Parameters and running statistics of BatchNorm, without its batch counter, which is in no file."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.endswith(BATCH_COUNTER)}

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Batch:
        """Run the layers on both sides of a batch; a side whose range is empty passes through untouched.

        Raises:
            ModelError: pixels or token ids don't fit the model.
        """
        vision, text = batch.vision, batch.text
        if vision is not None and self.vision_output:
            vision = self._run_vision(vision)
        if text is not None and self.text_output:
            text = self._run_text(text)
        return Batch(vision, text)

    def _run_vision(self, state: TowerState) -> TowerState:
        from shards.heads import unit_rows
        from shards.vision import check_pixels, embed_pixels, pool_vit_tokens, run_vit_blocks

        vision = self.config.vision
        lengths = state.lengths[state.lengths > 0]
        if not len(lengths):
            return self._empty(state, self.vision_output, (0, vision.num_tokens, vision.width))
        if self.normalise is not None:
            check_pixels(state.values, vision.image_size)
            pixel_dtype = torch.float32 if self.config.vision.stem == "conv" else self.dtype
            x_FLD = embed_pixels(self.vision, self.normalise(state.values, pixel_dtype))
        else:
            x_FLD = state.values.to(self.device)
        x_FLD = run_vit_blocks(self.vision, x_FLD)
        if self.vision_head is None:
            return TowerState(x_FLD, state.lengths)
        projected_FE = self.vision_head(pool_vit_tokens(self.vision, x_FLD))
        return TowerState(unit_rows(projected_FE, lengths), state.lengths.clamp(max=1))

    def _run_text(self, state: TowerState) -> TowerState:
        from shards.heads import unit_rows
        from shards.text import Padding, check_tokens, embed_tokens, pool_albert_tokens, run_albert_layers

        text, layers = self.config.text, self.spec.text
        lengths = state.lengths[state.lengths > 0]
        if not len(lengths):
            return self._empty(state, self.text_output, (0, text.hidden_size))
        padding = Padding.of(lengths, self.device)
        if layers.holds_front():
            check_tokens(state.values, lengths, text)
            ids_RT = padding.pad(state.values.to(self.device), fill=text.pad_token_id)
            x_RTD = embed_tokens(self.text, ids_RT)
        else:
            x_RTD = padding.pad(state.values.to(self.device))
        x_RTD = run_albert_layers(self.text, text, layers, x_RTD, padding.mask)
        if self.text_head is None:
            return TowerState(padding.pack(x_RTD), state.lengths)
        projected_RE = self.text_head(pool_albert_tokens(self.text, text, x_RTD, lengths))
        return TowerState(unit_rows(projected_RE, torch.ones_like(lengths)), state.lengths.clamp(max=1))

    def _empty(self, state: TowerState, output: Output | None, activation_shape: tuple[int, ...]) -> TowerState:
        """State of a batch in which no row has this side."""
        if output == "embedding":
            values = torch.empty((0, self.config.embedding_dim), device=self.device)
        else:
            values = torch.empty(activation_shape, dtype=self.dtype, device=self.device)
        return TowerState(values, state.lengths)


def _output(layers: LayerRange, depth: int) -> Output | None:
    if not len(layers):
        return None
    return "embedding" if layers.holds_head(depth) else "activation"
