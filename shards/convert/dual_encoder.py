"""Export as transformers' VisionTextDualEncoderModel with a ViT and a text encoder that has a pooler."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.convert.preprocessing import (
    PROCESSOR_FILE,
    TOKENIZER_CONFIG_FILE,
    export_processor,
    export_tokenizer_config,
)
from shards.convert.transformers_model import their_names
from shards.model_config import CONFIG_FILE, TOKENIZER_FILE, ModelConfig, load_model_config
from shards.model_errors import ModelError
from shards.saving import staged_folder, write_weights
from shards.tensor_shapes import LOGIT_SCALE, model_shapes
from shards.towers.text_encoder import TextEncoderTower
from shards.towers.vit import VitTower
from shards.weights import find_weights

if TYPE_CHECKING:
    import torch

MODEL_TYPE = "vision-text-dual-encoder"

_THEIR_ACTIVATION = {"gelu_tanh": "gelu_pytorch_tanh"}


def export_vision_text_dual_encoder(folder: str | Path, out: str | Path) -> None:
    """Write a new or empty folder for `VisionTextDualEncoderModel.from_pretrained`; raises a ModelError if it can't."""
    folder = Path(folder)
    config = load_model_config(folder)
    tree = _export_config(config, folder)
    processor = export_processor(config.preprocess)
    with staged_folder(Path(out)) as stage:
        write_weights(stage, _export_tensors(find_weights(folder), config, tree["text_config"]["model_type"]))
        (stage / PROCESSOR_FILE).write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")
        if (folder / TOKENIZER_FILE).is_file():
            tokenizer = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
            settings = export_tokenizer_config(tokenizer, config.required_text, config.preprocess.max_caption_tokens)
            (stage / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")
            (stage / TOKENIZER_CONFIG_FILE).write_text(settings, encoding="utf-8")
        (stage / CONFIG_FILE).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _export_config(config: ModelConfig, folder: Path) -> dict[str, Any]:
    vision, text = _check_exportable(config, folder)
    return {
        "architectures": ["VisionTextDualEncoderModel"],
        "model_type": MODEL_TYPE,
        "projection_dim": config.embedding_dim,
        "vision_config": {
            "model_type": "vit",
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "num_channels": 3,
            "hidden_size": vision.width,
            "num_hidden_layers": vision.depth,
            "num_attention_heads": vision.num_heads,
            "intermediate_size": vision.mlp_width,
            "qkv_bias": vision.qkv_bias,
            "layer_norm_eps": vision.norm_eps,
            "hidden_act": _THEIR_ACTIVATION.get(vision.activation, vision.activation),
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "text_config": {"model_type": text.dual_encoder_type} | text.library_settings(),
    }


def _check_exportable(config: ModelConfig, folder: Path) -> tuple[VitTower, TextEncoderTower]:
    vision, text = config.required_vision, config.required_text
    if not isinstance(vision, VitTower) or not isinstance(text, TextEncoderTower) or text.dual_encoder_type is None:
        raise ModelError(
            f"{folder}: {vision.label} + {text.label}; a ViT with a text encoder that has a pooler can be exported"
        )
    found = {f"vision.{key}": value for key, value in vision.model_dump(exclude={"family"}).items()}
    found |= {"text.pool": text.pool, "projection_bias": config.projection_bias}
    found |= {f"{side}_projection": projection for side, projection in config.projections.items()}
    expected = {
        "vision.class_token": True,
        "vision.num_reg_tokens": 0,
        "vision.pos_embed": "learn",
        "vision.no_embed_class": False,
        "vision.pre_norm": False,
        "vision.final_norm": True,
        "vision.fc_norm": False,
        "vision.init_values": None,
        "vision.pool": "token",
        "vision.pooler": "tanh",
        "vision.mlp": "mlp",
        "vision.qk_norm": False,
        "vision.scale_attn_norm": False,
        "vision.scale_mlp_norm": False,
        "vision.norm": "layer",
        "vision.embed_norm": False,
        "vision.proj_bias": True,
        "text.pool": "pooler",
        "projection_bias": False,
        "vision_projection": "linear",
        "text_projection": "linear",
    }
    for key, value in expected.items():
        if found[key] != value:
            raise ModelError(
                f"{folder}: {key} = {found[key]!r}; transformers' model has {value!r}, so it can't be exported"
            )
    return vision, text


def _export_tensors(
    files: Mapping[str, Path], config: ModelConfig, text_type: str
) -> Iterator[tuple[str, torch.Tensor]]:
    from shards.loading import read_tensor

    shapes = model_shapes(config) | ({LOGIT_SCALE: ()} if LOGIT_SCALE in files else {})
    types, names = {"vision": "vit", "text": text_type}, {"vision": frozenset[str](), "text": frozenset[str]()}
    for name, shape in shapes.items():
        theirs, tensor = their_names(name, types, names), read_tensor(files, name, shape)
        yield from zip(theirs, [tensor] if len(theirs) == 1 else tensor.chunk(len(theirs)), strict=True)
