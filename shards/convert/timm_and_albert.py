"""Import of a timm ViT and a transformers ALBERT, each trained elsewhere, with fresh projections into one space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shards.config import CONFIG_FILE, TOKENIZER_FILE, ModelConfig, TextConfig, describe, read_json
from shards.convert.albert import import_text_config, rename_albert
from shards.convert.tokenisers import import_tokenizer, max_caption_tokens
from shards.errors import ModelError
from shards.model_folder import find_model_folder
from shards.saving import staged_folder, write_weights
from shards.tensor_shapes import LOGIT_SCALE, model_shapes
from shards.weights import find_weights

if TYPE_CHECKING:
    import torch

# Captions are short; a fresh model need not use the whole position table.
MAX_CAPTION_TOKENS = 64


def import_timm_and_albert(
    vision_src: str | Path, albert_src: str | Path, out: str | Path, embedding_dim: int, *, seed: int = 0
) -> ModelConfig:
    """Join a timm ViT and an ALBERT to a model folder whose projections are fresh (`trained` is false).

    Args:
        vision_src: a folder with timm's config.json and model.safetensors.
        albert_src: a transformers ALBERT folder with its tokeniser.
        out: the model folder to write; must not exist yet, or be empty.
        embedding_dim: size of the common space.
        seed: seed of the projections.

    Raises:
        ModelError: a checkpoint has something that can't be mapped, or lacks something.
    """
    from shards.convert.timm_vit import load_timm_vit, read_timm_preprocess, read_vit_config

    vit_folder, albert_folder = find_model_folder(vision_src), find_model_folder(albert_src)
    vit = load_timm_vit(vit_folder)
    albert = _open_albert(albert_folder)
    vision = read_vit_config(vit, vit_folder)
    max_tokens = min(MAX_CAPTION_TOKENS, max_caption_tokens(albert_folder, albert.config))
    try:
        config = ModelConfig(
            name=Path(out).name,
            trained=False,
            embedding_dim=embedding_dim,
            vision=vision,
            text=albert.config,
            preprocess=read_timm_preprocess(vit, vision.image_size, max_tokens, vit_folder),
        )
    except ValidationError as error:
        raise ModelError(f"{vit_folder} and {albert_folder}: {describe(error)}") from None
    tokenizer = import_tokenizer(albert_folder, config.text)
    with staged_folder(Path(out)) as stage:
        write_weights(stage, _joined_tensors(config, vit, albert, seed))
        (stage / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")
        (stage / CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")
    return config


@dataclass(frozen=True)
class _Albert:
    """ALBERT checkpoint: its configuration, its files by tensor, and its name of each of our tensors."""

    config: TextConfig
    files: Mapping[str, Path]
    names: Mapping[str, str]


def _open_albert(folder: Path) -> _Albert:
    """Read an ALBERT's configuration and names; without a pooler, tokens are averaged."""
    path = folder / CONFIG_FILE
    tree = read_json(path, "give a transformers ALBERT folder")
    files = find_weights(folder)
    names = rename_albert(files)
    config = import_text_config(tree, path, has_pooler="text.pooler.weight" in names)
    return _Albert(config, files, names)


def _joined_tensors(config: ModelConfig, vit: Any, albert: _Albert, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    from shards.loading import read_tensor
    from shards.towers import fresh_tensors

    fresh = dict(fresh_tensors(config, seed, ("vision_head.", "text_head.", LOGIT_SCALE)))
    vision = {f"vision.{name}": tensor for name, tensor in vit.state_dict().items()}
    for name, shape in model_shapes(config).items():
        if name in fresh:
            yield name, fresh[name]
        elif name in vision:
            yield name, vision[name]
        else:
            yield name, read_tensor(albert.files, albert.names.get(name, name), shape)
    yield LOGIT_SCALE, fresh[LOGIT_SCALE]
