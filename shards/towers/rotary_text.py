"""transformers' text encoders with rotary positions: NomicBertModel, JinaEmbeddingsV3Model, EuroBertModel.

The first two are BERTs otherwise, with norms behind attention and MLP; EuroBERT has the layers of a Llama, without its
causal mask. Published files of the first two have the names of their own code; `save_pretrained` writes them, and those
of the classes are read as well.

Legend: `R` captions, `T` tokens of the longest one, `N` tokens of all captions, `D` width. Source: transformers 5.23,
the `forward` of these classes, whose steps these methods follow, and conversion_mapping.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from shards.file_schema import require_multiple
from shards.ranges import LayerRange
from shards.towers.base import Shapes, TowerFlops, TowerImport, linear_shapes, norm_shapes
from shards.towers.decoder_text import DecoderTextTower
from shards.towers.from_transformers import QKV, QKV_ROWS, own_names, read_settings
from shards.towers.text_encoder import IGNORED, TextActivation, TextEncoderTower, TextPooling, TokenPoolings

if TYPE_CHECKING:
    import torch


class RotaryTextTower(TextEncoderTower):
    """A text encoder whose layers get rotary positions."""

    layer_prefix = "layers."
    has_gated_mlp = True

    family: str
    rope_theta: float = Field(10000.0, gt=0, description="base of rotary positions")

    @model_validator(mode="after")
    def _rotates_pairs(self) -> Self:
        pairs = 2 * self.num_attention_heads
        require_multiple("hidden_size", self.hidden_size, "two values of each attention head", pairs)
        return self

    def library_settings(self) -> dict[str, Any]:
        """Return the settings of transformers' configuration, by its names."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        return self.model_dump(exclude={"family", "pool", "rope_theta"}) | {"rope_parameters": rope}

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order, with the positions of all tokens."""
        import torch

        positions = module.rotary_emb(x_FLD, torch.arange(x_FLD.shape[1], device=x_FLD.device)[None])
        for layer in range(layers.start, layers.stop):
            x_FLD = module.layers[layer](x_FLD, attention_mask=layout.mask, position_embeddings=positions)
        return x_FLD


class NomicBertTower(RotaryTextTower):
    """A Nomic BERT: no biases, a gated MLP."""

    label = "Nomic BERT"
    kernels_per_layer = 24
    library_class = "NomicBertModel"

    family: Literal["nomic_bert"] = "nomic_bert"
    vocab_size: int = Field(30528, ge=1)
    hidden_size: int = Field(768, ge=1)
    num_hidden_layers: int = Field(12, ge=1, description="layers")
    num_attention_heads: int = Field(12, ge=1)
    intermediate_size: int = Field(3072, ge=1)
    hidden_act: TextActivation = "silu"
    max_position_embeddings: int = Field(2048, ge=1, description="longest caption, in tokens")
    type_vocab_size: int = Field(2, ge=1)
    layer_norm_eps: float = Field(1e-12, gt=0)
    pad_token_id: int = Field(0, ge=0)
    pool: TextPooling = Field("mean", description="of the tokens")

    def front_shapes(self) -> Shapes:
        """Return the shapes of the embeddings, which have no position table."""
        tables = {"word": self.vocab_size, "token_type": self.type_vocab_size}
        shapes: Shapes = {f"embeddings.{name}_embeddings.weight": (n, self.hidden_size) for name, n in tables.items()}
        return shapes | norm_shapes("embeddings.LayerNorm", self.hidden_size)

    def block_shapes(self) -> Shapes:
        """Return the shapes of a layer."""
        width, hidden, bias = self.hidden_size, self.intermediate_size, not self.has_gated_mlp
        shapes = norm_shapes("post_attention_layernorm", width) | norm_shapes("post_mlp_layernorm", width)
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes |= linear_shapes(f"self_attn.{part}", width, width, bias=bias)
        into, out = (("gate_proj", "up_proj"), "down_proj") if self.has_gated_mlp else (("fc1",), "fc2")
        for part in into:
            shapes |= linear_shapes(f"mlp.{part}", width, hidden, bias=bias)
        return shapes | linear_shapes(f"mlp.{out}", hidden, width, bias=bias)


class JinaEmbeddingsV3Tower(NomicBertTower):
    """The encoder of jina-embeddings-v3: biases, a plain MLP."""

    label = "Jina embeddings 3"
    library_class = "JinaEmbeddingsV3Model"
    has_gated_mlp = False

    family: Literal["jina_embeddings_v3"] = "jina_embeddings_v3"  # type: ignore[assignment]
    vocab_size: int = Field(250002, ge=1)
    hidden_size: int = Field(1024, ge=1)
    num_hidden_layers: int = Field(24, ge=1, description="layers")
    num_attention_heads: int = Field(16, ge=1)
    intermediate_size: int = Field(4096, ge=1)
    hidden_act: TextActivation = "gelu"
    max_position_embeddings: int = Field(8194, ge=1, description="longest caption, in tokens")
    type_vocab_size: int = Field(1, ge=1)
    layer_norm_eps: float = Field(1e-5, gt=0)
    pad_token_id: int = Field(1, ge=0)
    rope_theta: float = Field(20000.0, gt=0, description="base of rotary positions")
    pool: TextPooling = Field("pooler", description="dense + tanh on the first token, or of the tokens")


class EuroBertTower(RotaryTextTower, DecoderTextTower):
    """A EuroBERT: the layers of a Llama, in which each token sees all others."""

    label = "EuroBERT"
    kernels_per_layer = 38
    library_class = "EuroBertModel"

    family: Literal["eurobert"] = "eurobert"
    vocab_size: int = Field(128256, ge=1)
    hidden_size: int = Field(768, ge=1)
    num_hidden_layers: int = Field(12, ge=1, description="layers")
    num_attention_heads: int = Field(12, ge=1)
    num_key_value_heads: int | None = Field(None, ge=1, description="heads of keys and values; none: as many")
    intermediate_size: int = Field(3072, ge=1, description="width of the gated MLP")
    hidden_act: TextActivation = "silu"
    max_position_embeddings: int = Field(8192, ge=1, description="longest caption, in tokens")
    rms_norm_eps: float = Field(1e-5, gt=0)
    attention_bias: bool = False
    mlp_bias: bool = False
    pad_token_id: int = Field(128001, ge=0)
    pool: TokenPoolings = Field("mean", description="of the tokens")

    @model_validator(mode="after")
    def _shares_heads(self) -> Self:
        require_multiple("num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_heads)
        return self

    @property
    def num_key_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    def block_shapes(self) -> Shapes:
        """Return the shapes of a layer."""
        width, hidden = self.hidden_size, self.intermediate_size
        keys = width // self.num_attention_heads * self.num_key_heads
        shapes: Shapes = {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
        for part, size in (("q_proj", width), ("k_proj", keys), ("v_proj", keys), ("o_proj", width)):
            shapes |= linear_shapes(f"self_attn.{part}", width, size, bias=self.attention_bias)
        for part in ("gate_proj", "up_proj"):
            shapes |= linear_shapes(f"mlp.{part}", width, hidden, bias=self.mlp_bias)
        return shapes | linear_shapes("mlp.down_proj", hidden, width, bias=self.mlp_bias)

    def head_shapes(self) -> Shapes:
        """Return the shapes of the last norm."""
        return {"norm.weight": (self.hidden_size,)}

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one caption; shared keys and values are computed once for several heads."""
        saved = 4 * num_tokens * self.hidden_size**2 * (1 - self.num_key_heads / self.num_attention_heads)
        return TowerFlops(0, super().flops(num_tokens).layer - saved, 0)

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the last norm, and pool each caption's tokens, in float32; (R, T, D) to (R, D)."""
        return super().pool_tokens(module, module.norm(x_FLD.float()), layout)


def _read_as(family: type[RotaryTextTower], theirs: Any, where: Path, pool: str) -> RotaryTextTower:
    """Read a configuration; keys of the models' own code, which transformers passes over, must say the same."""
    rope, heads = theirs.rope_parameters or {}, theirs.num_attention_heads
    expected: dict[str, object] = {
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta")},
        "head_dim": theirs.hidden_size // heads,
        **{"n_embd": theirs.hidden_size, "n_layer": theirs.num_hidden_layers, "n_head": heads},
        **{"n_inner": theirs.intermediate_size, "rotary_emb_base": rope.get("rope_theta"), "rotary_emb_fraction": 1.0},
        **{"rotary_emb_interleaved": False, "prenorm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False},
        "num_experts": 0,
    }
    own: dict[str, object] = {"causal": False, "parallel_block": False, "use_rms_norm": False}
    if family is NomicBertTower:
        own |= {"activation_function": "swiglu", "layer_norm_epsilon": theirs.layer_norm_eps}
    expected |= {key: value for key, value in own.items() if getattr(theirs, key, None) is not None}
    return read_settings(family, where, theirs, expected, rope_theta=rope.get("rope_theta"), pool=pool)


def _read_nomic(theirs: Any, names: frozenset[str], where: Path) -> RotaryTextTower:
    return _read_as(NomicBertTower, theirs, where, "pooler" if "pooler.dense.weight" in names else "mean")


def _read_jina(theirs: Any, names: frozenset[str], where: Path) -> RotaryTextTower:
    has_pooler = not names or "pooler.dense.weight" in names
    return _read_as(JinaEmbeddingsV3Tower, theirs, where, "pooler" if has_pooler else "mean")


def _read_eurobert(theirs: Any, names: frozenset[str], where: Path) -> RotaryTextTower:
    del names
    return _read_as(EuroBertTower, theirs, where, "cls" if theirs.classifier_pooling == "bos" else "mean")


_PUBLISHED = {
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}


def nomic_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' names of a tensor; queries, keys and values are rows of those of all three."""
    is_published = "emb_ln.weight" in names
    if not name.startswith("layers."):
        return (name.replace("embeddings.LayerNorm", "emb_ln") if is_published else name,)
    _, layer, part = name.split(".", 2)
    module, _, leaf = part.rpartition(".")
    if not is_published:
        parts = QKV if module in QKV else (module,)
        return tuple(f"layers.{layer}.{each}.{leaf}" for each in parts)
    attention = "mixer" if any(".mixer." in each for each in names) else "attn"
    theirs = _PUBLISHED.get(module, module).replace("self_attn.o_proj", f"{attention}.out_proj")
    return (f"encoder.layers.{layer}.{f'{attention}.Wqkv' if module in QKV else theirs}.{leaf}",)


TOWERS = (NomicBertTower, JinaEmbeddingsV3Tower, EuroBertTower)
_HEADS = (*IGNORED, "cls.", "lm_head.", "rotary_emb.", "score.", "dense.")
IMPORTS = {
    "nomic_bert": TowerImport(
        "NomicBertConfig", _read_nomic, nomic_names, ignored=_HEADS, rows=QKV_ROWS, has_pooled_output=False
    ),
    "jina_embeddings_v3": TowerImport("JinaEmbeddingsV3Config", _read_jina, nomic_names, ignored=_HEADS, rows=QKV_ROWS),
    "eurobert": TowerImport("EuroBertConfig", _read_eurobert, own_names, ignored=_HEADS, has_pooled_output=False),
}
