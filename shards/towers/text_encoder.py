"""Text towers of transformers: what they share, and the reader of those in which every token sees all others.

Legend: `R` captions, `T` tokens of the longest one, `N` tokens of all captions, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from shards.file_schema import require_multiple
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.towers.base import Rows, Shapes, TowerFlops, TowerImport, attention_flops, linear_shapes
from shards.towers.from_transformers import check_settings, without_token_id_warnings
from shards.towers.tower_kinds import TextTower

if TYPE_CHECKING:
    import torch

TextActivation = Literal[
    "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh"
]
FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' names of layers that attend to all tokens, and to a window around each."""
TokenPooling = Literal["cls", "mean", "max", "last", "weighted_mean", "mean_sqrt_len"]
"""How a caption's tokens become a vector; the means are weighted by position (1, 2, ...), or divided by the root."""
SeveralPoolings = Annotated[tuple[TokenPooling, ...], Field(min_length=2)]
TokenPoolings = TokenPooling | SeveralPoolings
TextPooling = Literal["pooler"] | TokenPoolings

# Heads of transformers' classes that an encoder doesn't need, and tables that follow from the shapes.
IGNORED = ("classifier.", "qa_outputs.", "embeddings.position_ids", "embeddings.token_type_ids")


class TextEncoderTower(TextTower):
    """A text encoder as transformers builds it; a family declares the fields, mostly under transformers' names."""

    library_class: ClassVar[str]
    """Name of transformers' class."""
    attention: ClassVar[str] = "sdpa"
    """Transformers' name of how attention is computed: torch's fused kernel where the class takes it."""
    positions_need_padding_id: ClassVar[bool] = False
    """Whether positions are counted from the padding id, as in RoBERTa."""
    dual_encoder_type: ClassVar[str | None] = None
    """`model_type` under which transformers' dual-encoder class builds it; None if it has no pooler."""
    has_gated_mlp: ClassVar[bool] = False
    """Whether the MLP of a layer has three products, where others have two."""
    masks_padding: ClassVar[bool] = True
    """Whether the library's own forward function is told which tokens are padding."""
    depth_field = "num_hidden_layers"
    head_prefixes: ClassVar[tuple[str, ...]] = ("pooler.",)
    lookup_prefixes = ("embeddings.",)

    if TYPE_CHECKING:  # a family sets defaults and order
        vocab_size: int
        hidden_size: int
        num_hidden_layers: int
        num_attention_heads: int
        intermediate_size: int
        hidden_act: TextActivation
        max_position_embeddings: int
        pad_token_id: int
        pool: TextPooling

    @model_validator(mode="after")
    def _is_encoder(self) -> Self:
        require_multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if self.pad_token_id >= self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} is outside the vocabulary of {self.vocab_size}")
        return self

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.num_hidden_layers

    @property
    def dim(self) -> int:
        """Width of the activations."""
        return self.hidden_size

    @property
    def pooled_dim(self) -> int:
        """Width of a caption's vector: several poolings stand in sequence."""
        pool = getattr(self, "pool", "")  # CLIP's kind has no choice
        return self.hidden_size * (1 if isinstance(pool, str) else len(pool))

    @property
    def _has_pooler(self) -> bool:
        return getattr(self, "pool", "") == "pooler"

    @property
    def max_tokens(self) -> int:
        """Longest caption, in tokens."""
        return self.max_position_embeddings

    @property
    def num_vocabulary(self) -> int:
        """Size of the embedding table's vocabulary."""
        return self.vocab_size

    @property
    def padding_id(self) -> int:
        """Token id that captions are padded with."""
        return self.pad_token_id

    def describe(self) -> str:
        """Describe the tower and its sizes."""
        return f"{self.label} {self.num_hidden_layers} layers x {self.hidden_size}, {self.vocab_size:,} tokens"

    def head_shapes(self) -> Shapes:
        """Return the shapes of the pooler."""
        return linear_shapes("pooler.dense", self.hidden_size, self.hidden_size) if self._has_pooler else {}

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one caption; its front only looks up tokens."""
        hidden = 3 * self.intermediate_size // 2 if self.has_gated_mlp else self.intermediate_size
        layer = attention_flops(self.tokens_in(num_tokens), self.hidden_size, hidden)
        return TowerFlops(0, layer, 2 * self.hidden_size**2 if self._has_pooler else 0)

    def workspace_values(self, num_tokens: int) -> int:
        """Count residual, norm, q, k, v, and the hidden width of a layer twice, or three times if it is gated."""
        hidden = (3 if self.has_gated_mlp else 2) * self.intermediate_size
        return self.tokens_in(num_tokens) * (5 * self.hidden_size + hidden)

    def library_settings(self) -> dict[str, Any]:
        """Return the settings of transformers' configuration."""
        return self.model_dump(exclude={"family", "pool"})

    def build(self) -> Any:
        """Build the whole encoder, with its kind of attention."""
        from shards.compat import deferred_compiler

        with deferred_compiler():
            import transformers
            from transformers.initialization import no_init_weights

            model_class = getattr(transformers, self.library_class)
        # transformers 5.23 and older give AIMv2's text model the class of the whole model's configuration.
        name = self.library_class.replace("Model", "Config")
        config_class = getattr(transformers, name, model_class.config_class)
        with without_token_id_warnings():
            config = config_class(**self.library_settings(), attn_implementation=self.attention)
        takes_pooler = "add_pooling_layer" in signature(model_class).parameters
        with no_init_weights():  # all weights are loaded; on the meta device, it would import torch's compiler
            return model_class(config, **({"add_pooling_layer": self._has_pooler} if takes_pooler else {}))

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Fill the tables of positions and types, and the frequencies of rotary positions, which every layer needs."""
        import torch

        embeddings: Any = getattr(module, "embeddings", None)
        if hasattr(embeddings, "position_ids"):
            shape = embeddings.position_ids.shape
            embeddings.position_ids = torch.arange(shape[-1], device=device).expand(shape)
            if hasattr(embeddings, "token_type_ids"):
                embeddings.token_type_ids = torch.zeros(shape, dtype=torch.long, device=device)
        if hasattr(module, "rotary_emb"):
            with torch.device(device):
                module.rotary_emb = type(module.rotary_emb)(module.config)

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run token, position and type embeddings; (N,) to (R, T, D)."""
        tokens: torch.Tensor = module.embeddings(layout.pad(values, fill=self.pad_token_id))
        return tokens

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order."""
        modules = module.get_submodule(self.layer_prefix.removesuffix("."))
        for layer in range(layers.start, layers.stop):
            x_FLD = modules[layer](x_FLD, layout.mask)
        return x_FLD

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Pool each caption's tokens into one vector, in float32; (R, T, D) to (R, D), or wider by several poolings."""
        if self.pool == "pooler":
            return self.run_pooler(module, x_FLD[:, 0].float())
        if isinstance(self.pool, str):
            return pool_by(self.pool, x_FLD.float(), layout)
        import torch

        return torch.cat([pool_by(each, x_FLD.float(), layout) for each in self.pool], dim=1)

    def run_pooler(self, module: Any, first_FD: torch.Tensor) -> torch.Tensor:
        """Run the pooler, dense and tanh, on the first token of each caption."""
        pooled: torch.Tensor = module.pooler(first_FD[:, None])
        return pooled

    def reference(self, module: Any, rows: Rows) -> torch.Tensor:
        """Compute pooled features by transformers' own forward function."""
        layout = self.layout(rows.lengths).move_to(lambda each: each.to(rows.values.device))
        ids_RT = layout.pad(rows.values, fill=self.pad_token_id)
        mask = {"attention_mask": layout.is_token.long()} if self.masks_padding else {}
        output = module(input_ids=ids_RT, **mask)
        if getattr(self, "pool", "pooler") == "pooler":  # CLIP's kind has no choice
            pooled: torch.Tensor = output.pooler_output
            return pooled
        # If a family has a norm after the layers, this output has passed it.
        return TextEncoderTower.pool_tokens(self, module, output.last_hidden_state, layout)

    def use_plain_attention(self, module: Any) -> None:
        """Turn off fused attention."""
        module.set_attn_implementation("eager")


def pool_by(kind: TokenPooling, x_RTD: torch.Tensor, layout: Any) -> torch.Tensor:
    """Pool in one way; (R, T, D) to (R, D). Source: sentence-transformers 6.2, `Pooling`."""
    import torch

    if kind == "cls":
        return x_RTD[:, 0]
    if kind == "last":
        return x_RTD[
            torch.arange(x_RTD.shape[0], device=x_RTD.device), layout.num_tokens - 1
        ]  # len() is traced as a number
    is_token: torch.Tensor = layout.is_token[:, :, None]
    if kind == "max":
        return x_RTD.masked_fill(~is_token, -torch.inf).amax(1)
    if kind == "weighted_mean":
        weights = is_token * torch.arange(1, x_RTD.shape[1] + 1, device=x_RTD.device)[:, None]
        return (x_RTD * weights).sum(1) / weights.sum(1)
    counts_R1: torch.Tensor = layout.num_tokens[:, None]
    return (x_RTD * is_token).sum(1) / (counts_R1 if kind == "mean" else counts_R1.sqrt())


def window_mask(places: torch.Tensor, mask: torch.Tensor | None, reach: int) -> torch.Tensor | None:
    """Whether a token may be attended to from a nearby position, (T,); bool (R or 1, 1, T, T), None if all may."""
    if mask is None and len(places) < reach:
        return None
    is_near = ((places[:, None] - places).abs() <= reach)[None, None]
    return is_near if mask is None else mask & is_near


def encoder_import(
    family: type[TextEncoderTower],
    config_class: str,
    *,
    pool: TextPooling | None = None,
    their_keys: Mapping[str, str] | None = None,
    expected: Mapping[str, object] | None = None,
    ignored: tuple[str, ...] = (),
    has_pooled_output: bool = True,
) -> TowerImport:
    """Make the reader of a kind of encoder.

    `config_class` names transformers' configuration class; `pool` says how the checkpoint's class pools (None: by the
    pooler if there is one, else the token mean); `their_keys` are transformers' names of fields, where they differ;
    `expected` are required values of settings without a field; `ignored` are name prefixes of the family's own heads.
    """

    def read(theirs: Any, names: frozenset[str], where: Path) -> TextEncoderTower:
        positions = getattr(theirs, "position_embedding_type", "absolute")
        if positions != "absolute":
            raise ModelError(f"{where}: position_embedding_type = {positions!r}; only 'absolute' can be imported")
        keys = {key: (their_keys or {}).get(key, key) for key in family.model_fields if key not in ("family", "pool")}
        fields = {key: getattr(theirs, their) for key, their in keys.items()}
        if fields["pad_token_id"] is None and not family.positions_need_padding_id:
            fields["pad_token_id"] = 0  # only padding has this id, and it is masked
        found_pool = "pooler" if not names or any(name.startswith("pooler.") for name in names) else "mean"
        return check_settings(family, where, theirs, expected or {}, **fields, pool=pool or found_pool)

    ignored = (*IGNORED, *ignored)
    return TowerImport(config_class, read, encoder_names, ignored=ignored, has_pooled_output=has_pooled_output)


def encoder_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' name of a tensor: the same, except for norms of old checkpoints."""
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    return (old if old in names else name,)
