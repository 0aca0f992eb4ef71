"""The layers of texts of transformers' EmbeddingGemma 2, in which every token sees all others or those near.

Each layer also reads the embeddings that its tokens began with (per-layer embeddings), so that activations between them
carry both. The vector is the mean of all tokens, each projected.

Legend: `R` captions, `L` tokens, `D` width, `E` size of a vector. Source: transformers 5.23,
`EmbeddingGemma2TextModel.forward`, whose steps these methods follow.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from shards.file_schema import require_multiple
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.towers.base import Rows, Shape, Shapes, TowerFlops, linear_shapes
from shards.towers.decoder_text import DecoderTextTower
from shards.towers.from_transformers import read_settings
from shards.towers.qwen3_vl_text import MAX_CAPTION_TOKENS
from shards.towers.text_encoder import FULL, SLIDING, TextActivation, window_mask

if TYPE_CHECKING:
    import torch


class EmbeddingGemma2TextTower(DecoderTextTower):
    """The layers of texts; a caption's vector is the mean of its tokens."""

    label = "EmbeddingGemma 2 text"
    kernels_per_layer = 109
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

    def reference(self, module: Any, rows: Rows) -> torch.Tensor:
        """Compute pooled features by transformers' own forward function."""
        return super().reference(self.whole_module(module), rows)


def read_texts(theirs: Any, where: Path) -> EmbeddingGemma2TextTower:
    """Read the layers of texts from transformers' configuration; raises a ModelError for what can't be built."""
    kinds, rope = theirs.layer_types, theirs.rope_parameters
    for kind in (FULL, SLIDING):
        base = (rope.get(kind) or {}).get("rope_theta")
        if base is None or rope[kind] != {"rope_type": "default", "rope_theta": base}:
            raise ModelError(
                f"{where}: embedding_gemma2: {kind} has rope_parameters {rope.get(kind)}; only a base can be imported"
            )
    local, last = (theirs.per_layer_config[kinds.index(kind) if kind in kinds else -1] for kind in (SLIDING, FULL))
    tower = read_settings(
        EmbeddingGemma2TextTower,
        where,
        theirs,
        {"attention_bias": False},
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
