"""transformers' EmbeddingGemma 2: one tower for pictures and texts, in which every token sees all others or those near.

A picture goes through vision blocks, a pooler that makes one token of each square of patches, and then the layers that
texts go through. Each of these also reads the embeddings that its tokens began with (per-layer embeddings), so that
activations between them carry both. The vector is the mean of all tokens, each projected.

Legend: `F` pictures (frames) of all rows, `N` patches, `P` patches of the largest picture, `M` squares of patches, `R`
captions, `L` tokens, `V` width of the vision blocks, `D` width of the text layers, `E` size of a vector. Source:
transformers 5.23, `EmbeddingGemma2Model.forward` and `Gemma4VisionModel.forward`, whose steps these methods follow.
"""

from __future__ import annotations

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
    Shape,
    Shapes,
    TowerFlops,
    attention_flops,
    linear_shapes,
)
from shards.towers.decoder_text import DecoderTextTower
from shards.towers.from_transformers import check_settings
from shards.towers.qwen3_vl import MAX_CAPTION_TOKENS, Qwen3VlTower
from shards.towers.text_encoder import FULL, SLIDING, TextActivation, TextEncoderTower, window_mask

if TYPE_CHECKING:
    import torch

    from shards.activations import TowerState
    from shards.layouts import Padding

MAX_PATCHES = 280 * 3**2  # 280 tokens, the processor's default
SHARE_TOKENS = 256  # of a caption, by which layers of both kinds are compared: as many as a picture has
CLIPS = ("input_min", "input_max", "output_min", "output_max")
UNCLIPPED = 1e4  # a limit that no value of a fresh tower reaches


class EmbeddingGemma2TextTower(DecoderTextTower):
    """The layers of texts; a caption's vector is the mean of its tokens."""

    label = "EmbeddingGemma 2 text"
    library_class = "EmbeddingGemma2TextModel"
    head_prefixes = ("norm.", "embedding_projection.")

    family: Literal["embedding_gemma2_text"] = "embedding_gemma2_text"
    vocab_size: int = Field(262144, ge=1)
    hidden_size: int = Field(512, ge=1)
    num_hidden_layers: int = Field(24, ge=1, description="layers")
    num_attention_heads: int = Field(4, ge=1)
    num_key_value_heads: int = Field(2, ge=1, description="heads of keys and values, where a window is attended to")
    head_dim: int = Field(256, ge=2, multiple_of=2, description="width of one head there")
    num_global_key_value_heads: int = Field(1, ge=1, description="heads of keys and values, where all is attended to")
    global_head_dim: int = Field(512, ge=2, multiple_of=2, description="width of one head there")
    intermediate_size: int = Field(2048, ge=1, description="width of the gated MLP")
    hidden_size_per_layer_input: int = Field(
        512, ge=1, description="width of what a layer reads of the first embedding"
    )
    embedding_dim: int = Field(768, ge=1, description="size of a vector")
    hidden_act: TextActivation = "gelu_pytorch_tanh"
    max_position_embeddings: int = Field(8192, ge=1, description="longest caption, in tokens")
    rms_norm_eps: float = Field(1e-6, gt=0)
    global_attn_every_n_layers: int = Field(6, ge=1, description="of n layers, the last attends to all tokens")
    sliding_window: int = Field(512, ge=1, description="tokens on each side that the others attend to")
    global_rope_theta: float = Field(1e6, gt=0, description="base of rotary positions where all is attended to")
    local_rope_theta: float = Field(1e4, gt=0, description="the same of the other layers")
    pad_token_id: int = Field(0, ge=0)
    pool: Literal["mean"] = Field("mean", description="of the tokens")

    @model_validator(mode="after")
    def _shares_keys(self) -> Self:
        for key in ("num_key_value_heads", "num_global_key_value_heads"):
            require_multiple("num_attention_heads", self.num_attention_heads, key, getattr(self, key))
        return self

    @property
    def layer_types(self) -> list[str]:
        """Kind of each layer; the last attends to all tokens."""
        every, last = self.global_attn_every_n_layers, self.num_layers - 1
        return [SLIDING if (layer + 1) % every and layer != last else FULL for layer in range(self.num_layers)]

    @property
    def pooled_dim(self) -> int:
        """Size of a vector."""
        return self.embedding_dim

    def _heads(self, layer: int) -> tuple[int, int, int]:
        """Return the widths of a layer's head, and of all its queries and keys."""
        is_full = self.layer_types[layer] == FULL
        width, keys = (
            (self.global_head_dim, self.num_global_key_value_heads)
            if is_full
            else (self.head_dim, self.num_key_value_heads)
        )
        return width, self.num_attention_heads * width, keys * width

    def values_at(self, layer: int, num_tokens: int) -> int:
        """Return the values of one caption's activation in front of a layer."""
        return num_tokens * self.activation_shape(layer)[0]

    def activation_shape(self, layer: int = 0) -> Shape:
        """Return the shape of a token, with its first embedding where a later layer reads that, (D,) or (2 D,)."""
        return (self.hidden_size * (2 if 0 < layer < self.num_layers else 1),)

    def block_shapes(self) -> Shapes:
        """Return the shapes of the first layer."""
        return self.shapes_of(0)

    def shapes_of(self, number: int) -> Shapes:
        """Return the shapes of one layer."""
        width, inner = self.hidden_size, self.hidden_size_per_layer_input
        head, queries, keys = self._heads(number)
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        return (
            {f"{name}_layernorm.weight": (width,) for name in norms}
            | {"layer_scalar": (1,), "self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
            | self.linear_layer_shapes(queries, keys)
            | linear_shapes("ple_projection", width, inner, bias=False)
            | {"ple_norm.weight": (inner,), "ple_block.post_per_layer_input_norm.weight": (width,)}
            | linear_shapes("ple_block.per_layer_input_gate", width, inner, bias=False)
            | linear_shapes("ple_block.per_layer_projection", inner, width, bias=False)
        )

    def head_shapes(self) -> Shapes:
        """Return the shapes of the last norm and the projection behind it."""
        projection = linear_shapes("embedding_projection", self.hidden_size, self.embedding_dim, bias=False)
        return {"norm.weight": (self.hidden_size,)} | projection

    def layer_flops(self, num_tokens: int) -> list[float]:
        """Count the operations of each layer for one caption; a window saves none, because it is a mask."""
        inner = 3 * (self.intermediate_size + self.hidden_size_per_layer_input)
        found = []
        for layer in range(self.num_layers):
            _, queries, keys = self._heads(layer)
            products = self.hidden_size * (2 * queries + 2 * keys + inner)
            found.append(2.0 * num_tokens * products + 4 * num_tokens**2 * queries)
        return found

    @property
    def layer_shares(self) -> tuple[float, ...]:
        """Operations of each layer relative to their mean."""
        flops = self.layer_flops(SHARE_TOKENS)
        return tuple(each * len(flops) / sum(flops) for each in flops)

    @property
    def kinds_of_layers(self) -> tuple[tuple[int, int], ...]:
        """The first layer with a window, and the first without."""
        kinds = self.layer_types
        return tuple((kinds.index(kind), kinds.count(kind)) for kind in dict.fromkeys(kinds))

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one caption; those of a layer are the mean."""
        flops = self.layer_flops(num_tokens)
        return TowerFlops(0, sum(flops) / len(flops), 2 * num_tokens * self.hidden_size * self.embedding_dim)

    def workspace_values(self, num_tokens: int) -> int:
        """Count residual, norm, first embedding, q, k, v, and gate, value and product of a layer's MLP."""
        heads = max(queries + 2 * keys for _, queries, keys in map(self._heads, range(self.num_layers)))
        return num_tokens * (3 * self.hidden_size + heads + 3 * self.intermediate_size)

    def library_settings(self) -> dict[str, Any]:
        """Return the settings of transformers' configuration, by its names."""
        own = {"family", "pool", "hidden_act", "global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"}
        bases = {FULL: self.global_rope_theta, SLIDING: self.local_rope_theta}
        return self.model_dump(exclude=own) | {
            "hidden_activation": self.hidden_act,
            "layer_types": self.layer_types,
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        }

    def fresh_value(self, name: str) -> float | None:
        """Return 1 for the scale of a layer's output."""
        return 1.0 if name.endswith("layer_scalar") else None

    def build(self) -> Any:
        """Build the whole encoder; each layer has its own rows of the library's one projection for all."""
        from torch import nn

        module = super().build()
        norm = type(module.norm)
        for layer in module.layers:
            layer.ple_projection = nn.Linear(self.hidden_size, self.hidden_size_per_layer_input, bias=False)
            layer.ple_norm = norm(self.hidden_size_per_layer_input, eps=self.rms_norm_eps)
        del module.ple
        return module

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Fill the frequencies of the rotary positions, and the scale of the token table."""
        import torch

        super().fill_buffers(module, device)
        if module.embed_tokens is not None:
            module.embed_tokens.embed_scale = torch.tensor(module.embed_tokens.scalar_embed_scale, device=device)

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order, each with positions and mask of its kind; between them (R, L, 2 D)."""
        import torch

        first_FLD, x_FLD = x_FLD[..., -self.hidden_size :], x_FLD[..., : self.hidden_size]
        kinds = self.layer_types[layers.start : layers.stop]
        places = torch.arange(x_FLD.shape[1], device=x_FLD.device)
        positions = {kind: module.rotary_emb(x_FLD, places[None], kind) for kind in set(kinds)}
        masks = {FULL: layout.mask, SLIDING: window_mask(places, layout.mask, self.sliding_window)}
        for number, kind in enumerate(kinds, layers.start):
            layer = module.layers[number]
            read = self._read_first(layer, first_FLD)
            x_FLD = layer(x_FLD, read, attention_mask=masks[kind], position_embeddings=positions[kind])
        return x_FLD if layers.stop == self.num_layers else torch.cat([x_FLD, first_FLD], -1)

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Project each token behind the last norm, and average a caption's, in float32; (R, L, D) to (R, E)."""
        tokens = module.embedding_projection(module.norm(x_FLD.float()))
        return super().pool_tokens(module, tokens, layout)

    def _read_first(self, layer: Any, first_FLD: torch.Tensor) -> torch.Tensor:
        """Compute what a layer reads of its tokens' first embeddings."""
        read: torch.Tensor = layer.ple_norm(layer.ple_projection(first_FLD) * self.hidden_size**-0.5)
        return read

    def whole_module(self, module: Any) -> Any:
        """Let the library's forward function of all layers read the first embeddings by each layer's rows; in-place.

        One product for all layers differs in the last bits.
        """
        import torch

        vars(module)["ple"] = lambda first: torch.stack([self._read_first(each, first) for each in module.layers], 2)
        return module

    def reference(
        self, module: Any, values: torch.Tensor, lengths: torch.Tensor, grids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute pooled features by transformers' own forward function."""
        return super().reference(self.whole_module(module), values, lengths, grids)


class EmbeddingGemma2Tower(Qwen3VlTower):
    """Vision blocks, pooler and the layers of texts; a picture's vector is the mean of its tokens."""

    label = "EmbeddingGemma 2"
    layer_prefix = "encoder.layers."
    lookup_prefixes = ("patch_embedder.",)
    takes_text = False

    temporal_patch_size: ClassVar[int] = 1  # type: ignore[misc]
    num_position_embeddings: ClassVar[int] = 36**2  # type: ignore[misc] # any size of images fits
    deepstack_visual_indexes: ClassVar[tuple[int, ...]] = ()  # type: ignore[misc]
    min_patches: ClassVar[int] = 0  # type: ignore[misc] # the budget alone gives an image's size

    family: Literal["embedding_gemma2"] = "embedding_gemma2"  # type: ignore[assignment]
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

    def _layer_flops(self) -> list[float]:
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

    def prune(self, module: Any, layers: LayerRange) -> None:
        """Remove all modules that a shard with these layers doesn't own; the others keep their names."""
        from torch import nn

        for layer in range(self.depth):
            if not layers.start <= layer < layers.stop:
                module.encoder.layers[layer] = nn.Identity()
        if not layers.start <= self.depth < layers.stop:
            module.embed_vision = None
            if self.standardize:
                module.std_bias = module.std_scale = None
        if not layers.holds_front():
            module.patch_embedder = None

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Fill the frequencies of the rotary positions, which every vision block needs."""
        import torch

        with torch.device(device):
            module.encoder.rotary_emb = type(module.encoder.rotary_emb)(module.config)

    def layer_modules(self, module: Any) -> Any:
        """Return the blocks and what follows them."""
        from torch import nn

        return nn.ModuleList([each for each in (module.encoder, module.embed_vision) if each is not None])

    def pixel_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32: the library scales pixels in it."""
        import torch

        del dtype
        return torch.float32

    def _places(self, layout: Any, device: torch.device) -> tuple[Padding, torch.Tensor]:
        """Lay out patches on a device, with the column and row of each, int64 (F, P, 2); -1 for padding."""
        import torch

        from shards.layouts import Padding

        grids = layout.grids[:, 1:].repeat_interleave(layout.grids[:, 0], 0)
        side, padding = self.spatial_merge_size, Padding.of(grids.prod(1))
        number = torch.arange(padding.shape[1])
        square, inner, columns = number // side**2, number % side**2, grids[:, 1:] // side
        x_FP = square % columns * side + inner % side
        y_FP = square // columns * side + inner // side
        places = torch.stack([x_FP, y_FP], -1).masked_fill(~padding.is_token[:, :, None], -1)
        return padding.move_to(lambda each: each.to(device)), places.to(device)

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Embed patches and positions; (N, values) to packed squares."""
        padding, places = self._places(layout, values.device)
        x_FPV = module.patch_embedder(padding.pad(values), places, ~padding.is_token)
        return padding.pack(x_FPV).reshape(-1, self.square_width)

    def _run_vision(
        self, module: Any, layers: LayerRange, x_NV: torch.Tensor, inputs: list[torch.Tensor], layout: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run vision blocks and pooler; (N, V) to (N, V), or behind the pooler to (M, D)."""
        padding, places = self._places(layout, x_NV.device)
        x_FPV = padding.pad(x_NV)
        positions = module.encoder.rotary_emb(x_FPV, places)
        for layer in range(layers.start, min(layers.stop, self.depth)):
            x_FPV = module.encoder.layers[layer](
                x_FPV, attention_mask=padding.mask, position_embeddings=positions, position_ids=places
            )
        if layers.stop <= self.depth:
            return padding.pack(x_FPV), inputs
        num_squares = x_FPV.shape[1] // self.spatial_merge_size**2
        x_FMV, is_square = module.pooler(x_FPV, places, ~padding.is_token, num_squares)
        x_MV = x_FMV[is_square]
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

    def reference(
        self,
        module: Any,
        values: torch.Tensor,
        lengths: torch.Tensor,
        grids: torch.Tensor | None = None,
        text: TowerState | None = None,
    ) -> torch.Tensor:
        """Compute pooled features by transformers' own forward function."""
        layout = self._layout(lengths, grids, text).move_to(lambda each: each.to(values.device))
        padding, places = self._places(layout, values.device)
        model = self._assemble(module, self._unused_id(layout))
        ids = layout.ids.flatten().index_fill(0, layout.picture, model.config.image_token_id).view_as(layout.ids)
        output = model(
            input_ids=ids,
            attention_mask=layout.tokens.is_token.long(),
            pixel_values=padding.pad(values),
            image_position_ids=places,
        )
        return TextEncoderTower.pool_tokens(self.decoder, module.decoder, output.last_hidden_state, layout.tokens)

    def _assemble(self, module: Any, picture_id: int) -> Any:
        import torch
        from transformers import EmbeddingGemma2Config, EmbeddingGemma2Model
        from transformers.initialization import no_init_weights

        vision = self._settings() | {"model_type": "gemma4_vision"}
        with torch.device("meta"), no_init_weights():
            config = EmbeddingGemma2Config(
                vision_config=vision, text_config=self.decoder.library_settings(), image_token_id=picture_id
            )
            model = EmbeddingGemma2Model(config)
        model.vision_tower, model.embed_vision = module, module.embed_vision
        model.language_model = self.decoder.whole_module(module.decoder)
        return model


_SAME = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("hidden_size_per_layer_input", "embedding_dim", "rms_norm_eps", "sliding_window"),
)


def _read_texts(theirs: Any, where: Path) -> EmbeddingGemma2TextTower:
    kinds, rope = theirs.layer_types, theirs.rope_parameters
    for kind in (FULL, SLIDING):
        base = (rope.get(kind) or {}).get("rope_theta")
        if base is None or rope[kind] != {"rope_type": "default", "rope_theta": base}:
            raise ModelError(
                f"{where}: embedding_gemma2: {kind} has rope_parameters {rope.get(kind)}; only a base can be imported"
            )
    local, last = (theirs.per_layer_config[kinds.index(kind) if kind in kinds else -1] for kind in (SLIDING, FULL))
    tower = check_settings(
        EmbeddingGemma2TextTower,
        where,
        theirs,
        {"attention_bias": False},
        **{key: getattr(theirs, key) for key in _SAME},
        num_key_value_heads=local.num_key_value_heads,
        head_dim=local.head_dim,
        num_global_key_value_heads=last.num_key_value_heads,
        global_head_dim=last.head_dim,
        hidden_act=theirs.hidden_activation,
        max_position_embeddings=min(theirs.max_position_embeddings, MAX_CAPTION_TOKENS),
        global_attn_every_n_layers=kinds.index(FULL) + 1,
        global_rope_theta=rope[FULL]["rope_theta"],
        local_rope_theta=rope[SLIDING]["rope_theta"],
        pad_token_id=theirs.pad_token_id or 0,  # only padding has this id, and it is masked
    )
    if tower.layer_types != kinds:
        raise ModelError(
            f"{where}: embedding_gemma2: layer_types = {kinds}; expected {FULL} at the last of each n layers"
        )
    for layer, kind in enumerate(kinds):
        own, alike = theirs.per_layer_config[layer], last if kind == FULL else local
        for key in ("head_dim", "num_key_value_heads"):
            if getattr(own, key) != getattr(alike, key):
                raise ModelError(
                    f"{where}: embedding_gemma2: layer {layer} has {key} = {getattr(own, key)}; expected "
                    f"{getattr(alike, key)}, as the other layers of {kind} have"
                )
    return tower


def _read(theirs: Any, where: Path) -> EmbeddingGemma2Tower | EmbeddingGemma2TextTower:
    texts, vision = _read_texts(theirs.text_config, where), theirs.vision_config
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
    """Find rows of the library's one projection for all layers, and what it keeps beside the vision tower."""
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
