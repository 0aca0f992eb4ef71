"""Text tower of transformers' VideoPrismClipModel, whose captions end in a learned token; and what both towers share.

Legend: `R` captions, `N` tokens of all, `T` tokens of the longest, `D` width. Source: transformers 5.23,
modeling_videoprism.py, whose steps these methods follow.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from shards.ranges import LayerRange
from shards.towers.base import Rows, Shapes, linear_shapes, norm_shapes
from shards.towers.from_transformers import read_settings
from shards.towers.text_encoder import TextActivation, TextEncoderTower

if TYPE_CHECKING:
    import torch

    from shards.layouts import EndedCaptions


def layer_shapes(width: int, hidden: int, *, bias: bool) -> Shapes:
    """Return the shapes of a layer of either tower; `bias` is that of queries, keys and values."""
    shapes = norm_shapes("layernorm_before", width) | norm_shapes("layernorm_after", width)
    for part in ("q_proj", "k_proj", "v_proj"):
        shapes |= linear_shapes(f"attention.{part}", width, width, bias=bias)
    shapes |= linear_shapes("attention.o_proj", width, width)
    return shapes | linear_shapes("mlp.fc1", width, hidden) | linear_shapes("mlp.fc2", hidden, width)


def fresh_scale(name: str) -> float | None:
    """Return 0 for the scales of norms, to which the library adds 1, and of the pooling query's dimensions."""
    is_norm = "layernorm" in name and name.endswith(".weight")
    return 0.0 if is_norm or name.endswith("per_dim_scale") else None


def normalise_as_library(x: torch.Tensor, is_wanted: bool) -> torch.Tensor:
    """Apply the library's norm to length 1, where its configuration says so."""
    if not is_wanted:
        return x
    from transformers.models.videoprism.modeling_videoprism import l2norm

    normalised: torch.Tensor = l2norm(x)
    return normalised


class VideoPrismTextTower(TextEncoderTower):
    """The text model: causal, positions of sines, and a learned token behind the caption, whose state is its vector."""

    label = "VideoPrism text"
    kernels_per_layer = 23
    library_class = "VideoPrismTextModel"
    attention = "eager"  # scores are capped, which the fused kernel can't
    layer_prefix = "layers."
    head_prefixes = ("layernorm.",)

    family: Literal["videoprism_text"] = "videoprism_text"
    vocab_size: int = Field(32000, ge=1)
    hidden_size: int = Field(768, ge=2, multiple_of=2)
    num_hidden_layers: int = Field(12, ge=1, description="layers")
    num_attention_heads: int = Field(12, ge=1)
    intermediate_size: int = Field(3072, ge=1)
    hidden_act: TextActivation = "relu"
    max_position_embeddings: int = Field(64, ge=1, description="longest caption, in tokens, without the learned one")
    layer_norm_eps: float = Field(1e-6, gt=0)
    pad_token_id: int = Field(0, ge=0)
    qkv_bias: bool = True
    attn_logit_softcapping: float = Field(50.0, gt=0, description="largest score of attention, by a tanh")
    apply_l2norm: bool = Field(True, description="the library's vectors are of length 1")

    @property
    def needs_special_tokens(self) -> bool:
        """Return False: the learned token is none of the tokeniser's."""
        return False

    def tokens_in(self, num_tokens: int) -> int:
        """Return the tokens of one caption, with the learned one."""
        return num_tokens + 1

    def front_shapes(self) -> Shapes:
        """Return the shapes of the token table and of the learned token; positions are computed."""
        width = self.hidden_size
        return {"embeddings.token_embedding.weight": (self.vocab_size, width), "embeddings.cls_emb": (1, 1, width)}

    def block_shapes(self) -> Shapes:
        """Return the shapes of a layer."""
        return layer_shapes(self.hidden_size, self.intermediate_size, bias=self.qkv_bias)

    def head_shapes(self) -> Shapes:
        """Return the shapes of the last norm."""
        return norm_shapes("layernorm", self.hidden_size)

    def fresh_value(self, name: str) -> float | None:
        """Return the initial value of scales."""
        return fresh_scale(name)

    def build(self) -> Any:
        """Build the whole encoder; its tables of positions follow from the settings, and no weight file holds them."""
        module = super().build()
        for name in ("position_embedding", "position_ids"):
            module.embeddings.register_buffer(name, getattr(module.embeddings, name), persistent=False)
        return module

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Fill the tables of positions, which have no values on the meta device."""
        super().fill_buffers(module, device)
        if module.embeddings is not None:
            from transformers.models.videoprism.modeling_videoprism import create_sinusoidal_positions

            table = create_sinusoidal_positions(self.max_position_embeddings, self.hidden_size)
            module.embeddings.position_embedding = table.to(device)

    def input_lengths(self, lengths: torch.Tensor, layers: LayerRange) -> torch.Tensor:
        """Return the tokens of each caption, int64 (R,), given those in front of a range of layers."""
        return lengths - 1 if layers.start else lengths

    def layout(self, lengths: torch.Tensor, grids: torch.Tensor | None = None) -> EndedCaptions:  # type: ignore[override]
        """Lay out captions, each with its learned token at the end of the rectangle."""
        from shards.layouts import EndedCaptions

        del grids
        return EndedCaptions.of(lengths)

    def arrange(self, rows: Rows, layers: LayerRange) -> EndedCaptions:
        """Lay out captions for a range of layers; behind the front their states count the learned token."""
        return self.layout(self.input_lengths(rows.lengths, layers))

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run token and position embeddings, and put the learned token behind them; (N,) to (R, T + 1, D)."""
        states: torch.Tensor = module.embeddings(layout.captions.pad(values, fill=self.pad_token_id))
        return states

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order; a token sees those before it, and the learned one all of its caption."""
        import torch

        is_seen = torch.nn.functional.pad(layout.captions.is_token, (0, 1), value=True)[:, None, None]
        is_before = torch.ones(x_FLD.shape[1], x_FLD.shape[1], dtype=torch.bool, device=x_FLD.device).tril()
        mask = torch.zeros((), dtype=x_FLD.dtype, device=x_FLD.device)
        mask = mask.masked_fill(~(is_seen & is_before), torch.finfo(x_FLD.dtype).min)
        for layer in range(layers.start, layers.stop):
            x_FLD = module.layers[layer](x_FLD, mask)
        return x_FLD

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the last norm on each caption's learned token, in float32; (R, T + 1, D) to (R, D)."""
        del layout
        return normalise_as_library(module.layernorm(x_FLD[:, -1].float()), self.apply_l2norm)

    def reference(self, module: Any, rows: Rows) -> torch.Tensor:
        """Compute pooled features by transformers' own forward function."""
        layout = self.layout(rows.lengths).move_to(lambda each: each.to(rows.values.device))
        ids_RT = layout.captions.pad(rows.values, fill=self.pad_token_id)
        output = module(input_ids=ids_RT, attention_mask=layout.captions.is_token.long())
        pooled: torch.Tensor = output.pooler_output
        return pooled


def read_text_tower(theirs: Any, names: frozenset[str], where: Path) -> VideoPrismTextTower:
    """Read the text tower; raises a ModelError for settings that it doesn't have."""
    del names
    return read_settings(VideoPrismTextTower, where, theirs, {}, pad_token_id=theirs.pad_token_id or 0)
