"""Import and export of transformers' VisionTextDualEncoderModel with a ViT and an ALBERT."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shards.config import CONFIG_FILE, TOKENIZER_FILE, ModelConfig, find_model_folder, load_model_config
from shards.convert.preprocessing import (
    PROCESSOR_FILE,
    TOKENIZER_CONFIG_FILE,
    export_processor,
    export_tokenizer_config,
    import_processor,
    import_tokenizer,
    max_caption_tokens,
)
from shards.convert.transformers_towers import (
    IGNORED,
    import_text_config,
    import_vit_config,
    their_names,
    uses_new_names,
)
from shards.errors import ModelError
from shards.saving import staged_folder, staged_model, write_weights
from shards.schema import describe, read_json
from shards.tensor_shapes import LOGIT_SCALE, model_shapes
from shards.weights import find_weights

if TYPE_CHECKING:
    import torch

MODEL_TYPE = "vision-text-dual-encoder"

_THEIR_ACTIVATION = {"gelu_tanh": "gelu_pytorch_tanh"}


def import_vision_text_dual_encoder(src: str | Path, out: str | Path, *, name: str | None = None) -> ModelConfig:
    """Turn a saved VisionTextDualEncoderModel (ViT + ALBERT) into a model folder.

    Args:
        src: its folder, with tokeniser and image processor.
        out: the model folder to write; must not exist yet, or be empty.
        name: of the model; by default that of the folder `src`.

    Raises:
        ModelError: the checkpoint has something that can't be mapped, or lacks something.
    """
    folder = find_model_folder(src)
    config = _import_config(folder, name or Path(src).name)
    tokenizer = import_tokenizer(folder, config.text)
    with staged_model(Path(out), config, tokenizer) as stage:
        write_weights(stage, _import_tensors(find_weights(folder), config))
    return config


def export_vision_text_dual_encoder(folder: str | Path, out: str | Path) -> None:
    """Write a model folder as `VisionTextDualEncoderModel.from_pretrained` reads it.

    Args:
        folder: a model folder that transformers' classes can represent.
        out: the folder to write; must not exist yet, or be empty.

    Raises:
        ModelError: transformers' classes can't represent the model.
    """
    folder = Path(folder)
    config = load_model_config(folder)
    tree = _export_config(config, folder)
    processor = export_processor(config.preprocess)
    with staged_folder(Path(out)) as stage:
        write_weights(stage, _export_tensors(find_weights(folder), config))
        (stage / PROCESSOR_FILE).write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")
        if (folder / TOKENIZER_FILE).is_file():
            tokenizer = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
            settings = export_tokenizer_config(tokenizer, config.text, config.preprocess.max_caption_tokens)
            (stage / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")
            (stage / TOKENIZER_CONFIG_FILE).write_text(settings, encoding="utf-8")
        (stage / CONFIG_FILE).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _import_config(folder: Path, name: str) -> ModelConfig:
    path = folder / CONFIG_FILE
    tree: dict[str, Any] = read_json(path, "give the folder of a saved VisionTextDualEncoderModel")
    if tree.get("model_type") != MODEL_TYPE:
        raise ModelError(f"{path}: model_type = {tree.get('model_type')!r}; this import takes {MODEL_TYPE!r}")
    vision = import_vit_config(_section(tree, "vision_config", path), path)
    text = import_text_config(_section(tree, "text_config", path), path, has_pooler=True)
    try:
        return ModelConfig(
            name=name,
            trained=True,
            embedding_dim=tree.get("projection_dim", 512),
            vision=vision,
            text=text,
            preprocess=import_processor(folder, vision.image_size, max_caption_tokens(folder, text)),
        )
    except ValidationError as error:
        raise ModelError(f"{path}: {describe(error)}") from None


def _export_config(config: ModelConfig, folder: Path) -> dict[str, Any]:
    _check_exportable(config, folder)
    vision, text = config.vision, config.text
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
        "text_config": {"model_type": "albert"} | text.model_dump(exclude={"family", "pool"}),
    }


def _check_exportable(config: ModelConfig, folder: Path) -> None:
    found = {f"vision.{key}": value for key, value in config.vision.model_dump(exclude={"family"}).items()}
    found |= {"text.pool": config.text.pool, "projection_bias": config.projection_bias}
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
        "text.pool": "pooler",
        "projection_bias": False,
    }
    for key, value in expected.items():
        if found[key] != value:
            raise ModelError(
                f"{folder}: {key} = {found[key]!r}; transformers' model has {value!r}, so it can't be exported"
            )


def _import_tensors(files: Mapping[str, Path], config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    from shards.loading import read_tensor

    shapes = model_shapes(config) | ({LOGIT_SCALE: ()} if LOGIT_SCALE in files else {})
    new = uses_new_names(files)
    names = {name: their_names(name, new=new) for name in shapes}
    _check_all_used(files, names.values())
    for name, theirs in names.items():
        shape = shapes[name] if len(theirs) == 1 else (shapes[name][0] // len(theirs), *shapes[name][1:])
        tensors = [read_tensor(files, their, shape) for their in theirs]
        yield name, tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _export_tensors(files: Mapping[str, Path], config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    from shards.loading import read_tensor

    shapes = model_shapes(config) | ({LOGIT_SCALE: ()} if LOGIT_SCALE in files else {})
    for name, shape in shapes.items():
        theirs, tensor = their_names(name), read_tensor(files, name, shape)
        yield from zip(theirs, [tensor] if len(theirs) == 1 else tensor.chunk(len(theirs)), strict=True)


def _check_all_used(files: Mapping[str, Path], used: Iterable[tuple[str, ...]]) -> None:
    known = {name for names in used for name in names} | IGNORED
    for name, path in files.items():
        if name not in known:
            raise ModelError(f"{path}: found the tensor {name}, which a ViT + ALBERT of that configuration hasn't")


def _section(tree: Mapping[str, Any], key: str, where: Path) -> Mapping[str, Any]:
    section = tree.get(key)
    if not isinstance(section, dict):
        raise ModelError(f"{where}: found no {key}; save the model with transformers' save_pretrained")
    return section
