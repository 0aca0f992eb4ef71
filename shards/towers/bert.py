"""transformers' BertModel and RobertaModel; XLM-RoBERTa and CamemBERT compute as RoBERTa does.

Source: transformers 5.23, `BertModel.forward` and `RobertaEmbeddings.forward`, whose steps these towers follow.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from shards.towers.base import Shapes, linear_shapes, norm_shapes
from shards.towers.text_encoder import TextActivation, TextEncoderTower, TextPooling, encoder_import


class BertLayersTower(TextEncoderTower):
    """Fields and tensors of a BERT, wherever its positions begin."""

    layer_prefix = "encoder.layer."

    family: str
    vocab_size: int = Field(30522, ge=1)
    hidden_size: int = Field(768, ge=1)
    num_hidden_layers: int = Field(12, ge=1, description="layers")
    num_attention_heads: int = Field(12, ge=1)
    intermediate_size: int = Field(3072, ge=1)
    hidden_act: TextActivation = "gelu"
    max_position_embeddings: int = Field(512, ge=1, description="longest caption, in tokens")
    type_vocab_size: int = Field(2, ge=1)
    layer_norm_eps: float = Field(1e-12, gt=0)
    pad_token_id: int = Field(0, ge=0)
    pool: TextPooling = Field("pooler", description="dense + tanh on [CLS], or of the tokens")

    def front_shapes(self) -> Shapes:
        """Return the shapes of the embeddings."""
        tables = {"word": self.vocab_size, "position": self.max_position_embeddings, "token_type": self.type_vocab_size}
        shapes: Shapes = {
            f"embeddings.{name}_embeddings.weight": (num, self.hidden_size) for name, num in tables.items()
        }
        return shapes | norm_shapes("embeddings.LayerNorm", self.hidden_size)

    def block_shapes(self) -> Shapes:
        """Return the shapes of a layer."""
        width = self.hidden_size
        shapes: Shapes = {}
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= linear_shapes(f"attention.{part}", width, width)
        return (
            shapes
            | norm_shapes("attention.output.LayerNorm", width)
            | linear_shapes("intermediate.dense", width, self.intermediate_size)
            | linear_shapes("output.dense", self.intermediate_size, width)
            | norm_shapes("output.LayerNorm", width)
        )


class BertTower(BertLayersTower):
    """A BERT as transformers builds it."""

    label = "BERT"
    library_class = "BertModel"
    dual_encoder_type = "bert"

    family: Literal["bert"] = "bert"


class RobertaTower(BertLayersTower):
    """A RoBERTa as transformers builds it: a BERT whose positions begin after the padding id."""

    label = "RoBERTa"
    library_class = "RobertaModel"
    dual_encoder_type: ClassVar[str | None] = "roberta"
    positions_need_padding_id = True

    family: Literal["roberta"] = "roberta"
    vocab_size: int = Field(50265, ge=1)
    max_position_embeddings: int = Field(
        514, ge=1, description="rows of the position table; captions have pad_token_id + 1 tokens less"
    )
    type_vocab_size: int = Field(1, ge=1)
    layer_norm_eps: float = Field(1e-5, gt=0)
    pad_token_id: int = Field(1, ge=0)

    @model_validator(mode="after")
    def _has_positions(self) -> Self:
        if self.max_tokens < 1:
            raise ValueError(
                f"max_position_embeddings ({self.max_position_embeddings}) leaves no position behind pad_token_id "
                f"({self.pad_token_id}), where positions begin"
            )
        return self

    @property
    def max_tokens(self) -> int:
        """Longest caption, in tokens; the position table's rows up to the padding's stay unused."""
        return self.max_position_embeddings - self.pad_token_id - 1


TOWERS = (BertTower, RobertaTower)
# A decoder's layers are causal, or attend to another model's output.
_ENCODER = {"is_decoder": False, "add_cross_attention": False}
_ROBERTA_HEADS = ("lm_head.",)
IMPORTS = {
    "bert": encoder_import(BertTower, "BertConfig", expected=_ENCODER, ignored=("cls.",)),
    "roberta": encoder_import(RobertaTower, "RobertaConfig", expected=_ENCODER, ignored=_ROBERTA_HEADS),
    "xlm-roberta": encoder_import(RobertaTower, "XLMRobertaConfig", expected=_ENCODER, ignored=_ROBERTA_HEADS),
    "camembert": encoder_import(RobertaTower, "CamembertConfig", expected=_ENCODER, ignored=_ROBERTA_HEADS),
}
