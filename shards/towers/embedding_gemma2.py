"""transformers' EmbeddingGemma 2: one tower for pictures and texts, in which every token sees all others or those near.

A picture goes through vision blocks, a pooler that makes one token of each square of patches, and then the layers that
texts go through.

Legend: `F` pictures (frames) of all rows, `N` patches, `P` patches of the largest picture, `M` squares of patches, `R`
captions, `L` tokens, `V` width of the vision blocks, `D` width of the text layers, `E` size of a vector. Source:
transformers 5.23, `EmbeddingGemma2Model.forward` and `Gemma4VisionModel.forward`, whose steps these methods follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from shards.file_schema import require_multiple
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.towers.base import (
    CLIP,
    CheckpointPlace,
    OneTowerImport,
    Part,
    Rows,
    Shape,
    Shapes,
    attention_flops,
    linear_shapes,
)
from shards.towers.embedding_gemma2_text import EmbeddingGemma2TextTower, read_texts
from shards.towers.from_transformers import check_settings
from shards.towers.picture_decoder import PictureDecoderTower, make_empty
from shards.towers.text_encoder import TextEncoderTower

if TYPE_CHECKING:
    import torch

    from shards.layouts import Move, Padding

MAX_PATCHES = 280 * 3**2  # 280 tokens, the processor's default
CLIPS = ("input_min", "input_max", "output_min", "output_max")
UNCLIPPED = 1e4  # a limit that no value of a fresh tower reaches


@dataclass(frozen=True)
class PaddedPatches:
    """Layout of patches in a `rectangle` as wide as the largest picture.

    `places` int64 (F, P, 2) has column and row of each patch, -1 for padding; `squares` lay out squares of patches.
    """

    rectangle: Padding
    places: torch.Tensor
    squares: Padding

    def move_to(self, move: Move) -> PaddedPatches:
        """Move what the blocks need to their device."""
        return PaddedPatches(self.rectangle.move_to(move), move(self.places), self.squares.move_to(move))


class EmbeddingGemma2Tower(PictureDecoderTower):
    """Vision blocks, pooler and the layers of texts; a picture's vector is the mean of its tokens."""

    label = "EmbeddingGemma 2"
    kernels_per_layer = 100
    layer_prefix = "encoder.layers."
    lookup_prefixes = ("patch_embedder.",)
    prompts_pictures = False

    temporal_patch_size: ClassVar[int] = 1  # type: ignore[misc]
    num_position_embeddings: ClassVar[int] = 36**2  # type: ignore[misc] # any size of images fits
    deepstack_visual_indexes: ClassVar[tuple[int, ...]] = ()  # type: ignore[misc]
    min_patches: ClassVar[int] = 0  # type: ignore[misc] # only the budget gives an image's size

    family: Literal["embedding_gemma2"] = "embedding_gemma2"
    depth: int = Field(16, ge=1, description="vision blocks")
    hidden_size: int = Field(768, ge=1, description="width of the vision blocks")
    num_heads: int = Field(12, ge=1, description="heads of a vision block")
    num_key_value_heads: int = Field(12, ge=1, description="heads of keys and values of a vision block")
    head_dim: int = Field(64, ge=4, multiple_of=4, description="width of one head of a vision block")
    intermediate_size: int = Field(3072, ge=1, description="width of a vision block's gated MLP")
    spatial_merge_size: int = Field(3, ge=2, description="side of the squares of patches that become one token")
    position_embedding_size: int = Field(10240, ge=1, description="rows, and columns, of patches that have a position")
    max_patches: int = Field(MAX_PATCHES, ge=1, description="budget: an image is resized to at most so many patches")
    rms_norm_eps: float = Field(1e-6, gt=0)
    rope_theta: float = Field(100.0, gt=0, description="base of a vision block's rotary positions")
    use_clipped_linears: bool = Field(False, description="linear layers of vision blocks limit what goes in and out")
    standardize: bool = Field(False, description="tokens are shifted and scaled behind the pooler")
    decoder: EmbeddingGemma2TextTower = Field(  # type: ignore[assignment]
        default_factory=EmbeddingGemma2TextTower, description="equal to the text tower"
    )

    @model_validator(mode="after")
    def _has_positions(self) -> Self:
        require_multiple("num_heads", self.num_heads, "num_key_value_heads", self.num_key_value_heads)
        longest = self.max_patches // self.spatial_merge_size
        if longest > self.position_embedding_size:
            raise ValueError(
                f"max_patches ({self.max_patches}) allows a strip of {longest} patches, and position_embedding_size is "
                f"{self.position_embedding_size}"
            )
        return self

    @property
    def pooled_dim(self) -> int:
        """Size of a vector."""
        return self.decoder.embedding_dim

    def values_at(self, layer: int, num_tokens: int) -> int:
        """Return the values of one image's activation in front of a layer."""
        inside = layer - self.first_decoder_layer
        return (
            self.decoder.values_at(inside, self.decoder_tokens) if inside > 0 else super().values_at(layer, num_tokens)
        )

    def activation_shape(self, layer: int = 0) -> Shape:
        """Return the shape of an element: a square, or a token as between the layers of texts."""
        inside = layer - self.first_decoder_layer
        return self.decoder.activation_shape(inside) if inside > 0 else super().activation_shape(layer)

    def front_shapes(self) -> Shapes:
        """Return the shapes of the patches' projection and the tables of columns and rows."""
        table = (2, self.position_embedding_size, self.hidden_size)
        projection = linear_shapes("patch_embedder.input_proj", self.patch_values, self.hidden_size, bias=False)
        return projection | {"patch_embedder.position_embedding_table": table}

    def block_shapes(self) -> Shapes:
        """Return the shapes of a vision block."""
        width, hidden = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        linears = {"q_proj": (width, queries), "k_proj": (width, keys), "v_proj": (width, keys)}
        linears = {f"self_attn.{name}": sizes for name, sizes in (linears | {"o_proj": (queries, width)}).items()}
        linears |= {"mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden), "mlp.down_proj": (hidden, width)}
        shapes: Shapes = {f"self_attn.{each}_norm.weight": (self.head_dim,) for each in "qk"}
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{name}_layernorm.weight"] = (width,)
        for name, sizes in linears.items():
            shapes |= linear_shapes(f"{name}.linear", *sizes, bias=False)
            shapes |= {f"{name}.{limit}": () for limit in CLIPS if self.use_clipped_linears}
        return shapes

    def _merger_shapes(self, name: str, norm_width: int) -> Shapes:
        del name
        scales: Shapes = {"std_bias": (norm_width,), "std_scale": (norm_width,)} if self.standardize else {}
        return scales | linear_shapes("embed_vision.embedding_projection", norm_width, self.dim, bias=False)

    def part_of(self, name: str) -> Part:
        """Return the part of the tower that a tensor belongs to; the pooler is a layer."""
        return "front" if name.startswith("patch_embedder.") else "layers"

    def fresh_value(self, name: str) -> float | None:
        """Return limits that change nothing."""
        return {"min": -UNCLIPPED, "max": UNCLIPPED}.get(name.rpartition("_")[2]) if name.endswith(CLIPS) else None

    def _block_flops(self, layer: int) -> float:
        """Count the operations of a vision block with its gated MLP."""
        del layer
        return attention_flops(self.max_patches, self.hidden_size, 3 * self.intermediate_size // 2)

    def layer_flops(self, num_tokens: int) -> list[float]:
        """Count the operations of each layer for one image."""
        del num_tokens
        squares = self.max_patches // self.spatial_merge_size**2
        blocks = [self._block_flops(layer) for layer in range(self.depth)]
        return [*blocks, 2 * squares * self.hidden_size * self.dim, *self.decoder.layer_flops(self.decoder_tokens)]

    @property
    def kinds_of_layers(self) -> tuple[tuple[int, int], ...]:
        """The first of the vision blocks, the pooler, the first text layer of each kind."""
        texts = [(self.first_decoder_layer + layer, number) for layer, number in self.decoder.kinds_of_layers]
        return ((0, self.depth), (self.depth, 1), *texts)

    def _settings(self) -> dict[str, Any]:
        names = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "hidden_act": "hidden_activation"}
        names["spatial_merge_size"] = "pooling_kernel_size"
        excluded = {"family", "max_patches", "ids_before", "ids_between", "ids_after", "decoder", "rope_theta"}
        settings = {names.get(key, key): value for key, value in self.model_dump(exclude=excluded).items()}
        return settings | {"rope_parameters": {"rope_type": "axial", "rope_theta": self.rope_theta}}

    def build(self) -> Any:
        """Build vision blocks with what leads to the text layers; `join` gives them those."""
        from shards.compat import deferred_compiler

        with deferred_compiler():
            from transformers import Gemma4VisionConfig, Gemma4VisionModel
            from transformers.initialization import no_init_weights
            from transformers.models.embedding_gemma2.modeling_embedding_gemma2 import (
                EmbeddingGemma2MultimodalEmbedder,
                EmbeddingGemma2TextConfig,
            )
        config = Gemma4VisionConfig(**self._settings(), attn_implementation="sdpa")
        with no_init_weights():
            module = Gemma4VisionModel(config)
            texts = EmbeddingGemma2TextConfig(**self.decoder.library_settings())
            module.embed_vision = EmbeddingGemma2MultimodalEmbedder(config, texts)
        return module

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Fill the frequencies of the rotary positions, which every vision block needs."""
        import torch

        with torch.device(device):
            module.encoder.rotary_emb = type(module.encoder.rotary_emb)(module.config)

    def pixel_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32: the library scales pixels in it."""
        import torch

        del dtype
        return torch.float32

    def _lay_out_patches(self, grids: torch.Tensor, layers: LayerRange) -> PaddedPatches:
        """Lay out patches in a rectangle."""
        import torch

        from shards.layouts import Padding

        del layers
        frames, side = grids[:, 1:].repeat_interleave(grids[:, 0], 0), self.spatial_merge_size
        padding = Padding.of(frames.prod(1))
        number = torch.arange(padding.shape[1])
        square, inner, columns = number // side**2, number % side**2, frames[:, 1:] // side
        x_FP = square % columns * side + inner % side
        y_FP = square // columns * side + inner // side
        places = torch.stack([x_FP, y_FP], -1).masked_fill(~padding.is_token[:, :, None], -1)
        return PaddedPatches(padding, places, Padding.of(padding.lengths // side**2))

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Embed patches and positions; (N, values) to packed squares."""
        padding, places = layout.patches.rectangle, layout.patches.places
        x_FPV = module.patch_embedder(padding.pad(values), places, ~padding.is_token)
        packed: torch.Tensor = padding.pack(x_FPV).reshape(-1, self.square_width)
        return packed

    def _run_vision(
        self, module: Any, layers: LayerRange, x_NV: torch.Tensor, inputs: list[torch.Tensor], layout: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run vision blocks and pooler; (N, V) to (N, V), or behind the pooler to (M, D)."""
        padding, places = layout.patches.rectangle, layout.patches.places
        x_FPV = padding.pad(x_NV)
        positions = module.encoder.rotary_emb(x_FPV, places)
        for layer in range(layers.start, min(layers.stop, self.depth)):
            x_FPV = module.encoder.layers[layer](
                x_FPV, attention_mask=padding.mask, position_embeddings=positions, position_ids=places
            )
        if layers.stop <= self.depth:
            return padding.pack(x_FPV), inputs
        num_squares = x_FPV.shape[1] // self.spatial_merge_size**2
        x_FMV, _ = module.pooler(x_FPV, places, ~padding.is_token, num_squares)
        x_MV = layout.patches.squares.pack(x_FMV)
        if self.standardize:
            x_MV = (x_MV - module.std_bias.float()) * module.std_scale.float()
        return module.embed_vision(x_MV.to(x_FPV.dtype)), inputs

    def _run_decoder(
        self, decoder: Any, layers: LayerRange, x: torch.Tensor, inputs: list[torch.Tensor], layout: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run text layers; in front of the first, squares (M, D) take their places among the tokens, (F, L, D)."""
        if layers.start == 0:
            x = self._place_squares(decoder, x, layout)
        return self.decoder.run(decoder, layers, x, layout.tokens), inputs

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Average the tokens of each picture, as of a text; packed tokens to (F, E)."""
        return self.decoder.pool_tokens(module.decoder, layout.tokens.pad(x_FLD), layout.tokens)

    def reference(self, module: Any, rows: Rows) -> torch.Tensor:
        """Compute pooled features by transformers' own forward function."""
        whole = self.arrange(rows, LayerRange(0, self.num_layers))
        layout: Any = whole.move_to(lambda each: each.to(rows.values.device))
        model = self._assemble(module, self._unused_id(layout))
        ids = layout.ids.flatten().index_fill(0, layout.picture, model.config.image_token_id).view_as(layout.ids)
        output = model(
            input_ids=ids,
            attention_mask=layout.tokens.is_token.long(),
            pixel_values=layout.patches.rectangle.pad(rows.values),
            image_position_ids=layout.patches.places,
        )
        return TextEncoderTower.pool_tokens(self.decoder, module.decoder, output.last_hidden_state, layout.tokens)

    def _assemble(self, module: Any, picture_id: int) -> Any:
        from transformers import EmbeddingGemma2Model

        model = make_empty(
            EmbeddingGemma2Model,
            vision_config=self._settings() | {"model_type": "gemma4_vision"},
            text_config=self.decoder.library_settings(),
            image_token_id=picture_id,
        )
        model.vision_tower, model.embed_vision = module, module.embed_vision
        model.language_model = self.decoder.whole_module(module.decoder)
        return model


def _read(theirs: Any, where: Path) -> EmbeddingGemma2Tower | EmbeddingGemma2TextTower:
    texts, vision = read_texts(theirs.text_config, where), theirs.vision_config
    if vision is None:
        return texts
    if vision.model_type != "gemma4_vision":
        raise ModelError(
            f"{where}: embedding_gemma2: vision_config.model_type = {vision.model_type!r}; only "
            "'gemma4_vision' can be imported"
        )
    rope = vision.rope_parameters or {}
    if rope.get("rope_type", "axial") != "axial":
        raise ModelError(
            f"{where}: embedding_gemma2: vision_config.rope_parameters = {rope}; only 'axial' can be imported"
        )
    keys = ("hidden_size", "num_key_value_heads", "head_dim", "intermediate_size", "patch_size", "rms_norm_eps")
    return check_settings(
        EmbeddingGemma2Tower,
        where,
        vision,
        {"attention_bias": False},
        **{
            key: getattr(vision, key)
            for key in (*keys, "position_embedding_size", "use_clipped_linears", "standardize")
        },
        depth=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        hidden_act=vision.hidden_activation,
        spatial_merge_size=vision.pooling_kernel_size,
        max_patches=min(MAX_PATCHES, vision.position_embedding_size * vision.pooling_kernel_size),  # a processor's wins
        rope_theta=rope.get("rope_theta", vision.default_theta),
        decoder=texts,
    )


def _place(name: str, num_layers: int) -> CheckpointPlace | None:
    """Find rows of the library's one projection for all layers, and what it keeps next to the vision tower."""
    inner = name.removeprefix("vision.embed_vision.")
    if inner != name:
        return CheckpointPlace("beside", inner)
    _, _, number, *rest = [*name.split(".", 3), ""][:4]
    if rest == ["ple_projection.weight"]:
        return CheckpointPlace(
            "text", "ple.per_layer_model_projection.weight", (int(number), int(number) + 1, num_layers)
        )
    return CheckpointPlace("text", "ple.per_layer_projection_norm.weight") if rest == ["ple_norm.weight"] else None


ONE_TOWERS = {
    "embedding_gemma2": OneTowerImport(
        "EmbeddingGemma2Config",
        _read,
        {"vision": "vision_tower.", "text": "language_model.", "beside": "embed_vision."},
        ignored=("audio_tower.", "embed_audio.", "model.audio_tower.", "model.embed_audio."),
        place=_place,
        is_chat=False,
        video_processor="EmbeddingGemma2VideoProcessor",
        clip_frame=CLIP,
    )
}
TOWERS = (EmbeddingGemma2Tower, EmbeddingGemma2TextTower)
