"""Image tower of transformers' VideoPrismClipModel, one vector of a whole clip; and the import of both towers.

Spatial layers see the patches of a frame, temporal layers a place in all frames of a clip, auxiliary layers and the
pooling head all patches of all frames. A row is a clip, its elements are frames: between stages a frame lies with all
its patches, and `Clips` has the frames of a row together, so that no layer looks at another row. A clip of another
number of frames than the model's (a picture has one) takes the times' positions resampled to it, as the library does
with `interpolate_pos_encoding`.

Legend: `R` rows (clips), `N` frames of a clip, `F` frames of all rows, `P` patches of a frame, `D` width.
Source: transformers 5.23, modeling_videoprism.py, whose steps these methods follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from shards.file_schema import require_multiple
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.towers.base import (
    ModelClass,
    Part,
    Rows,
    Shapes,
    TowerFlops,
    TowerImport,
    attention_flops,
    linear_shapes,
    norm_shapes,
)
from shards.towers.capped_attention import ATTENTION, attend_in_parts
from shards.towers.from_transformers import one_side, own_names, read_settings
from shards.towers.text_encoder import TextActivation
from shards.towers.tower_kinds import VisionTower
from shards.towers.videoprism_text import (
    VideoPrismTextTower,
    fresh_scale,
    layer_shapes,
    normalise_as_library,
    read_text_tower,
)

if TYPE_CHECKING:
    import torch

    from shards.layouts import Clips

CHANNELS = 3


class VideoPrismTower(VisionTower):
    """The video model: spatial, temporal and auxiliary layers, and attention of one learned query."""

    label = "VideoPrism"
    kernels_per_layer = 25
    library_class: ClassVar[str] = "VideoPrismVideoModel"
    layer_prefix = "vision_model.spatial_layers."
    head_prefixes = ("head.", "head_layernorm.")
    float32_prefixes = ("vision_model.temporal_embeddings.",)  # resampled in float32
    lookup_prefixes = ("vision_model.spatial_embeddings.",)
    pads_rows = False

    family: Literal["videoprism"] = "videoprism"
    image_size: int = Field(288, ge=1, description="side of a frame, px")
    patch_size: int = Field(18, ge=1, description="side of a patch, px")
    num_frames: int = Field(16, ge=1, description="frames of a clip")
    hidden_size: int = Field(768, ge=1)
    num_attention_heads: int = Field(12, ge=1)
    intermediate_size: int = Field(3072, ge=1)
    hidden_act: TextActivation | Literal["gelu_python"] = "gelu_python"
    layer_norm_eps: float = Field(1e-6, gt=0)
    qkv_bias: bool = True
    num_spatial_layers: int = Field(12, ge=1, description="layers that see the patches of a frame")
    num_temporal_layers: int = Field(4, ge=1, description="layers that see a place in all frames")
    num_auxiliary_layers: int = Field(2, ge=0, description="layers that see all patches of all frames")
    attn_logit_softcapping: float = Field(50.0, gt=0, description="largest score of attention, by a tanh")
    apply_l2norm: bool = Field(True, description="the library's vectors are of length 1")

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        require_multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        require_multiple("intermediate_size", self.intermediate_size, "num_attention_heads", self.num_attention_heads)
        require_multiple("image_size", self.image_size, "patch_size", self.patch_size)
        return self

    @property
    def num_layers(self) -> int:
        """Number of layers of all kinds."""
        return self.first_auxiliary + self.num_auxiliary_layers

    @property
    def first_auxiliary(self) -> int:
        """Number of layers before the auxiliary ones."""
        return self.num_spatial_layers + self.num_temporal_layers

    def keep_layers(self, layers: Sequence[int]) -> Self:
        """Copy the tower with some of its layers; raises a ModelError unless some of both first kinds stay."""
        ends = (0, self.num_spatial_layers, self.first_auxiliary, self.num_layers)
        counts = [sum(start <= layer < stop for layer in layers) for start, stop in pairwise(ends)]
        if not (counts[0] and counts[1]):
            raise ModelError(
                f"a {self.label} tower of the layers {list(layers)}: it needs a spatial one (of 0 to {ends[1] - 1}) "
                f"and a temporal one ({ends[1]} to {ends[2] - 1}); keep one of each"
            )
        names = ("num_spatial_layers", "num_temporal_layers", "num_auxiliary_layers")
        return self.model_copy(update=dict(zip(names, counts, strict=True)))

    @property
    def dim(self) -> int:
        """Width of the activations."""
        return self.hidden_size

    @property
    def side_px(self) -> int:
        """Side of a frame, px."""
        return self.image_size

    @property
    def clip_frames(self) -> int:
        """Number of frames of a clip."""
        return self.num_frames

    @property
    def inputs_per_row(self) -> int:
        """Number of frames of a typical row."""
        return self.num_frames

    @property
    def num_tokens(self) -> int:
        """Number of patches of a frame."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class and register tokens: none."""
        return 0

    def describe(self) -> str:
        """Describe the tower and its sizes."""
        return (
            f"{self.label} {self.num_spatial_layers} spatial, {self.num_temporal_layers} temporal, "
            f"{self.num_auxiliary_layers} auxiliary layers x {self.hidden_size}, clips of {self.num_frames} frames of "
            f"{self.image_size} px, patches of {self.patch_size} px"
        )

    def front_shapes(self) -> Shapes:
        """Return the shapes of the patches' convolution and their positions."""
        side, place = self.patch_size, "vision_model.spatial_embeddings"
        return {
            f"{place}.patch_embeddings.projection.weight": (self.hidden_size, CHANNELS, 1, side, side),
            f"{place}.patch_embeddings.projection.bias": (self.hidden_size,),
            f"{place}.position_embeddings": (1, self.num_tokens, self.hidden_size),
        }

    def block_shapes(self) -> Shapes:
        """Return the shapes of a layer."""
        return layer_shapes(self.hidden_size, self.intermediate_size, bias=self.qkv_bias)

    def prefix_of(self, number: int) -> str:
        """Return the prefix of the tensor names of a layer."""
        if number < self.num_spatial_layers:
            return f"{self.layer_prefix}{number}."
        if number < self.first_auxiliary:
            return f"vision_model.temporal_layers.{number - self.num_spatial_layers}."
        return f"auxiliary_layers.{number - self.first_auxiliary}."

    def shapes(self, layers: LayerRange) -> Shapes:
        """Return all tensor shapes of a range of layers, with what stands around the temporal ones."""
        shapes = super().shapes(layers)
        if self._turns(layers):
            shapes |= norm_shapes("vision_model.layernorm1", self.hidden_size)
            shapes |= {"vision_model.temporal_embeddings.position_embeddings": (1, self.num_frames, self.hidden_size)}
        if self._turns_back(layers):
            shapes |= norm_shapes("vision_model.layernorm2", self.hidden_size)
        return shapes

    def _turns(self, layers: LayerRange) -> bool:
        """Whether a range has the first temporal layer, with norm and positions in front of it."""
        return layers.start <= self.num_spatial_layers < layers.stop

    def _turns_back(self, layers: LayerRange) -> bool:
        """Whether a range has the last temporal layer, with the norm behind it."""
        return layers.start < self.first_auxiliary <= layers.stop

    def head_shapes(self) -> Shapes:
        """Return the shapes of the pooling head."""
        width, inner = self.hidden_size, self.intermediate_size
        shapes: Shapes = {"head.per_dim_scale": (inner // self.num_attention_heads,)}
        shapes["head.pooling_attention_query"] = (1, 1, width)
        for part in ("q_proj", "k_proj", "v_proj"):
            shapes |= linear_shapes(f"head.{part}", width, inner, bias=self.qkv_bias)
        return shapes | linear_shapes("head.o_proj", inner, width) | norm_shapes("head_layernorm", width)

    def part_of(self, name: str) -> Part:
        """Return the part of the tower that a tensor belongs to; norms and times around the turn are layers."""
        if name.startswith(self.head_prefixes):
            return "head"
        return "front" if name.startswith("vision_model.spatial_embeddings.") else "layers"

    def fresh_value(self, name: str) -> float | None:
        """Return the initial value of scales."""
        return fresh_scale(name)

    def layer_flops(self, num_tokens: int) -> list[float]:
        """Count the operations of each layer for one frame of a whole clip."""
        del num_tokens
        patches, frames, width = self.num_tokens, self.num_frames, self.hidden_size
        alone = attention_flops(1, width, self.intermediate_size) - 4 * width  # a patch without its attention
        seen = {patches: self.num_spatial_layers, frames: 0, patches * frames: self.num_auxiliary_layers}
        seen[frames] += self.num_temporal_layers
        return [patches * (alone + 4 * each * width) for each, number in seen.items() for _ in range(number)]

    @property
    def kinds_of_layers(self) -> tuple[tuple[int, int], ...]:
        """The first spatial, the first temporal, and the first auxiliary layer if there is one."""
        kinds = ((0, self.num_spatial_layers), (self.num_spatial_layers, self.num_temporal_layers))
        auxiliary = (self.first_auxiliary, self.num_auxiliary_layers)
        return (*kinds, auxiliary) if self.num_auxiliary_layers else kinds

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one frame of a whole clip; those of a layer are the mean."""
        flops, patches = self.layer_flops(num_tokens), self.num_tokens
        front = 2 * patches * CHANNELS * self.patch_size**2 * self.hidden_size
        # Keys and values of all patches, and one query's attention to them.
        head = 4 * patches * self.intermediate_size * (self.hidden_size + 1)
        return TowerFlops(front, sum(flops) / len(flops), head)

    def workspace_values(self, num_tokens: int) -> int:
        """Count residual, norm, q, k, v, and four times the hidden width of a layer, for one frame."""
        del num_tokens  # the activation that is computed step by step takes two more than a fused one
        return self.num_tokens * (5 * self.hidden_size + 4 * self.intermediate_size)

    def _settings(self) -> dict[str, Any]:
        """Return the settings of transformers' configuration."""
        own = self.model_dump(exclude={"family", "patch_size"})
        return own | {"tubelet_size": (1, self.patch_size, self.patch_size), "num_channels": CHANNELS}

    def build(self) -> Any:
        """Build the whole video model, whose attention has some queries at a time."""
        from shards.compat import deferred_compiler

        with deferred_compiler():
            from transformers import AttentionInterface
            from transformers.initialization import no_init_weights
            from transformers.models.videoprism import modeling_videoprism

            video_model = getattr(modeling_videoprism, self.library_class)
        AttentionInterface.register(ATTENTION, attend_in_parts)
        with no_init_weights():
            return video_model(video_model.config_class(**self._settings(), attn_implementation=ATTENTION))

    def prepare_export(self, module: Any) -> None:
        """Keep the times' positions of one frame, whose resampling exporters don't know."""
        times = module.vision_model.temporal_embeddings
        if self.num_frames > 1:
            one_11D = times.interpolate_pos_encoding(times.position_embeddings[:, :1])
            times.interpolate_pos_encoding = lambda frames: one_11D

    def layout(self, lengths: torch.Tensor, grids: torch.Tensor | None = None) -> Clips:
        """Lay out clips of one number of frames; raises a ModelError for several."""
        from shards.layouts import Clips

        del grids
        return Clips.of(lengths)

    def tokens_per_sequence(self, rows: Rows) -> torch.Tensor:
        """Count the patches of all frames of each row."""
        return rows.lengths * self.num_tokens

    def sample_lengths(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Return rows of whole clips."""
        import torch

        del num_tokens
        return torch.full((num_rows,), self.num_frames)

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Embed normalised pixels and places; (F, 3, H, W) to (F, P, D)."""
        frames: torch.Tensor = module.vision_model.spatial_embeddings(self._as_clips(values, layout))
        return frames

    def _as_clips(self, x: torch.Tensor, layout: Any) -> torch.Tensor:
        """View frames as clips; (F, ...) to (R, N, ...). Without a layout each frame is a clip."""
        return x.reshape(-1, 1 if layout is None else layout.num_frames, *x.shape[1:])

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order; frames (F, P, D) in front of the first and behind the last."""
        first, second = self.num_spatial_layers, self.first_auxiliary
        x_FLD = x_FLD.contiguous()  # the compiler makes a graph for each order of numbers in memory
        for layer in range(layers.start, min(layers.stop, first)):
            x_FLD = module.vision_model.spatial_layers[layer](x_FLD)
        if layers.start < second and layers.stop > first:
            x_FLD = self._run_temporal(module.vision_model, layers, x_FLD, layout)
        if layers.stop > max(second, layers.start):
            x_RLD = self._as_clips(x_FLD, layout).flatten(1, 2)
            for layer in range(max(layers.start, second), layers.stop):
                x_RLD = module.auxiliary_layers[layer - second](x_RLD)
            x_FLD = x_RLD.view(x_FLD.shape)
        return x_FLD

    def _run_temporal(self, vision: Any, layers: LayerRange, x_FPD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run temporal layers, each over a place in all frames of its clip; (F, P, D) to (F, P, D)."""
        first = self.num_spatial_layers
        if self._turns(layers):
            x_FPD = vision.layernorm1(x_FPD)
        x_RPND = self._as_clips(x_FPD, layout).transpose(1, 2)
        x_LND = x_RPND.reshape(-1, *x_RPND.shape[2:]).contiguous()
        if self._turns(layers):
            times = vision.temporal_embeddings
            is_whole = x_LND.shape[1] == self.num_frames
            positions = times.position_embeddings if is_whole else times.interpolate_pos_encoding(x_LND)
            x_LND = x_LND + positions.to(x_LND.dtype)
        for layer in range(max(layers.start, first), min(layers.stop, self.first_auxiliary)):
            x_LND = vision.temporal_layers[layer - first](x_LND)
        if self._turns_back(layers):
            x_LND = vision.layernorm2(x_LND)
        return x_LND.view(x_RPND.shape).transpose(1, 2).reshape(x_FPD.shape)

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the pooling head over all frames of each clip in float32; (F, P, D) to (R, D)."""
        pooled_R1D = module.head(self._as_clips(x_FLD.float(), layout).flatten(1, 2))[0]
        return normalise_as_library(module.head_layernorm(pooled_R1D), self.apply_l2norm)[:, 0]

    def reference(self, module: Any, rows: Rows) -> torch.Tensor:
        """Compute pooled features (R, D) by transformers' own forward function; all rows have one number of frames."""
        layout = self.layout(rows.lengths)
        resamples = layout.num_frames != self.num_frames
        output = module(self._as_clips(rows.values, layout), interpolate_pos_encoding=resamples)
        pooled: torch.Tensor = output.pooler_output
        return pooled[:, 0]

    def use_plain_attention(self, module: Any) -> None:
        """Turn off attention in parts."""
        module.set_attn_implementation("eager")


def _read_vision(theirs: Any, names: frozenset[str], where: Path) -> VideoPrismTower:
    if names and not any(name.startswith("head.") for name in names):
        raise ModelError(
            f"{where}: a VideoPrism without its pooling head has features of patches and no vector of a clip; give a "
            "checkpoint with both towers (videoprism-lvt-...)"
        )
    times, *sides = theirs.tubelet_size
    if times != 1:
        raise ModelError(f"{where}: videoprism: tubelet_size = {theirs.tubelet_size}; only patches of one frame")
    return read_settings(
        VideoPrismTower,
        where,
        theirs,
        {"num_channels": CHANNELS},
        image_size=one_side(theirs.image_size, "vision_config.image_size", where),
        patch_size=one_side(sides, "vision_config.tubelet_size", where),
    )


TOWERS = (VideoPrismTower, VideoPrismTextTower)
IMPORTS = {
    "videoprism_vision_model": TowerImport("VideoPrismVisionConfig", _read_vision, own_names),
    "videoprism_text_model": TowerImport(
        "VideoPrismTextConfig",
        read_text_tower,
        own_names,
        ignored=("embeddings.position_ids", "embeddings.position_embedding"),
    ),
}
CLASSES = {
    "videoprism": ModelClass("videoprism_vision_model", "videoprism_text_model", has_projections=False),
}
