"""transformers' AlbertModel.

Legend: `R` captions, `T` tokens of the longest one, `N` tokens of all captions, `D` width.
Source: transformers 5.23, `AlbertModel.forward` and `AlbertTransformer.forward`, whose steps these methods follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from shards.errors import ModelError
from shards.ranges import LayerRange
from shards.schema import require_multiple
from shards.towers.base import (
    Shapes,
    TextTower,
    TowerFlops,
    TowerImport,
    attention_flops,
    linear_shapes,
    norm_shapes,
)
from shards.towers.from_transformers import checked, parse_config

if TYPE_CHECKING:
    import torch


TextActivation = Literal[
    "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh"
]


class AlbertTower(TextTower):
    """An ALBERT as transformers builds it; its layers are the applications of shared groups of weights."""

    label = "ALBERT"
    layer_prefix = "encoder.albert_layer_groups."
    head_prefixes = ("pooler.",)
    lookup_prefixes = ("embeddings.",)

    family: Literal["albert"] = "albert"
    vocab_size: int = Field(30000, ge=1)
    embedding_size: int = Field(
        128, ge=1, description="width of the token embeddings, before the mapping to hidden_size"
    )
    hidden_size: int = Field(768, ge=1)
    num_hidden_layers: int = Field(12, ge=1, description="layers, counted by application")
    num_hidden_groups: int = Field(1, ge=1, description="sets of weights that the applications share")
    inner_group_num: int = Field(1, ge=1, description="blocks inside one application")
    num_attention_heads: int = Field(12, ge=1)
    intermediate_size: int = Field(3072, ge=1)
    hidden_act: TextActivation = "gelu_new"
    max_position_embeddings: int = Field(512, ge=1, description="longest caption, in tokens")
    type_vocab_size: int = Field(2, ge=1)
    layer_norm_eps: float = Field(1e-12, gt=0)
    pad_token_id: int = Field(0, ge=0)
    pool: Literal["pooler", "cls", "mean"] = Field("pooler", description="dense + tanh on [CLS], [CLS], or token mean")

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        require_multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if self.num_hidden_groups > self.num_hidden_layers:
            raise ValueError(
                f"num_hidden_groups ({self.num_hidden_groups}) exceeds num_hidden_layers "
                f"({self.num_hidden_layers}); a group without a layer is never applied"
            )
        if self.pad_token_id >= self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} is outside the vocabulary of {self.vocab_size}")
        return self

    def weights_of(self, layer: int) -> int:
        """Number of the group of weights that one application uses.

        Source: transformers 5.23, `AlbertTransformer.forward`; the same float division, so that rounding agrees.
        """
        return int(layer / (self.num_hidden_layers / self.num_hidden_groups))

    @property
    def num_layers(self) -> int:
        """Number of applications of layer groups."""
        return self.num_hidden_layers

    @property
    def dim(self) -> int:
        """Width of the activations."""
        return self.hidden_size

    @property
    def max_tokens(self) -> int:
        """Longest caption, in tokens."""
        return self.max_position_embeddings

    @property
    def num_vocabulary(self) -> int:
        """Number of tokens that the embedding table knows."""
        return self.vocab_size

    @property
    def padding_id(self) -> int:
        """Token id that captions are padded with."""
        return self.pad_token_id

    def describe(self) -> str:
        """Describe the tower with its sizes."""
        return f"{self.label} {self.num_hidden_layers} layers x {self.hidden_size}, {self.vocab_size:,} tokens"

    def front_shapes(self) -> Shapes:
        """Compute the shapes of the embeddings and of the mapping to the layers' width."""
        tables = {"word": self.vocab_size, "position": self.max_position_embeddings, "token_type": self.type_vocab_size}
        return (
            {f"embeddings.{name}_embeddings.weight": (num, self.embedding_size) for name, num in tables.items()}
            | norm_shapes("embeddings.LayerNorm", self.embedding_size)
            | linear_shapes("encoder.embedding_hidden_mapping_in", self.embedding_size, self.hidden_size)
        )

    def block_shapes(self) -> Shapes:
        """Compute the shapes of a group."""
        shapes: Shapes = {}
        for inner in range(self.inner_group_num):
            layer = f"albert_layers.{inner}"
            shapes |= norm_shapes(f"{layer}.full_layer_layer_norm", self.hidden_size)
            for part in ("query", "key", "value", "dense"):
                shapes |= linear_shapes(f"{layer}.attention.{part}", self.hidden_size, self.hidden_size)
            shapes |= norm_shapes(f"{layer}.attention.LayerNorm", self.hidden_size)
            shapes |= linear_shapes(f"{layer}.ffn", self.hidden_size, self.intermediate_size)
            shapes |= linear_shapes(f"{layer}.ffn_output", self.intermediate_size, self.hidden_size)
        return shapes

    def head_shapes(self) -> Shapes:
        """Compute the shapes of the pooler."""
        return linear_shapes("pooler", self.hidden_size, self.hidden_size) if self.pool == "pooler" else {}

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one caption."""
        return TowerFlops(
            front=2 * num_tokens * self.embedding_size * self.hidden_size,
            layer=self.inner_group_num * attention_flops(num_tokens, self.hidden_size, self.intermediate_size),
            head=2 * self.hidden_size**2 if self.pool == "pooler" else 0,
        )

    def workspace_values(self, num_tokens: int) -> int:
        """Count in a layer residual, norm, q, k, v, and the hidden width twice."""
        return num_tokens * (5 * self.hidden_size + 2 * self.intermediate_size)

    def build(self) -> Any:
        """Build the whole ALBERT, with attention by torch's fused kernel."""
        from shards.compat import deferred_compiler

        with deferred_compiler():
            from transformers import AlbertConfig, AlbertModel
            from transformers.initialization import no_init_weights

        # The fields have AlbertConfig's names, but for family and pooling.
        config = AlbertConfig(**self.model_dump(exclude={"family", "pool"}), attn_implementation="sdpa")
        with no_init_weights():  # all weights are loaded; and on the meta device, torch's compiler would make them
            return AlbertModel(config, add_pooling_layer=self.pool == "pooler")

    def prune(self, module: Any, layers: LayerRange) -> None:
        """Remove all modules that a shard with these applications doesn't own; the others keep their names."""
        from torch import nn

        groups = self.weight_numbers(layers)
        for group in range(self.num_hidden_groups):
            if group not in groups:
                module.encoder.albert_layer_groups[group] = nn.Identity()
        if not layers.holds_front():
            module.embeddings = module.encoder.embedding_hidden_mapping_in = None
        if not layers.holds_head(self.num_layers):
            module.pooler = None

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Fill the tables of positions and types; on the meta device they have no values."""
        import torch

        if module.embeddings is not None:
            shape = module.embeddings.position_ids.shape
            module.embeddings.position_ids = torch.arange(shape[-1], device=device).expand(shape)
            module.embeddings.token_type_ids = torch.zeros(shape, dtype=torch.long, device=device)

    def layer_modules(self, module: Any) -> Any:
        """Give the encoder, whose mapping to the layers' width is one of its linear layers."""
        return module.encoder

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run token, position and type embeddings, then the mapping to the layers' width; (N,) to (R, T, D)."""
        ids_RT = layout.pad(values, fill=self.pad_token_id)
        tokens: torch.Tensor = module.encoder.embedding_hidden_mapping_in(module.embeddings(ids_RT))
        return tokens

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Apply a range of layers, each with the weights of its group."""
        for layer in range(layers.start, layers.stop):
            x_FLD = module.encoder.albert_layer_groups[self.weights_of(layer)](x_FLD, layout.mask)
        return x_FLD

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Pool each caption's tokens into one vector, in float32; (R, T, D) to (R, D)."""
        import torch

        if self.pool == "mean":
            is_token = layout.is_token(x_FLD.device)
            mean: torch.Tensor = (x_FLD.float() * is_token[:, :, None]).sum(1) / layout.lengths.to(x_FLD.device)[
                :, None
            ]
            return mean
        first: torch.Tensor = x_FLD[:, 0].float()
        return torch.tanh(module.pooler(first)) if self.pool == "pooler" else first

    def reference(self, module: Any, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Compute pooled features by transformers' own forward function."""
        layout = self.layout(lengths, values.device)
        ids_RT = layout.pad(values, fill=self.pad_token_id)
        output = module(input_ids=ids_RT, attention_mask=layout.is_token(values.device).long())
        if self.pool == "pooler":
            pooled: torch.Tensor = output.pooler_output
            return pooled
        return self.pool_tokens(module, output.last_hidden_state, layout)

    def use_plain_attention(self, module: Any) -> None:
        """Turn off fused attention."""
        module.set_attn_implementation("eager")


def read_albert(tree: Mapping[str, Any], names: frozenset[str], where: Path) -> AlbertTower:
    """Read an ALBERT's section of config.json; without a pooler among its tensors, tokens are averaged.

    Args:
        tree: the section; missing keys have transformers' defaults.
        names: names of its tensors.
        where: path of config.json, for messages.

    Raises:
        ModelError: it has something that we can't build.
    """
    from transformers import AlbertConfig

    if tree.get("position_embedding_type", "absolute") != "absolute":
        found = tree["position_embedding_type"]
        raise ModelError(f"{where}: position_embedding_type = {found!r}; only 'absolute' can be imported")
    theirs = parse_config(AlbertConfig, tree, where)
    fields = {key: getattr(theirs, key) for key in AlbertTower.model_fields if key not in ("family", "pool")}
    # Only padding has this id, and it is masked.
    fields["pad_token_id"] = fields["pad_token_id"] or 0
    return checked(AlbertTower, where, theirs, {}, **fields, pool="pooler" if "pooler.weight" in names else "mean")


def albert_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Give transformers' name of a tensor, which is ours."""
    del names
    return (name,)


TOWERS = (AlbertTower,)
# Heads of transformers' classes, which an encoder doesn't need, and tables that follow from the shapes.
IMPORTS = {
    "albert": TowerImport(
        read_albert,
        albert_names,
        ignored=(
            "predictions.",
            "sop_classifier.",
            "classifier.",
            "qa_outputs.",
            "embeddings.position_ids",
            "embeddings.token_type_ids",
        ),
    )
}
