"""Import of separately trained timm vision and transformers text towers, with fresh projections into one space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shards.convert.checkpoint import find_checkpoint, find_modules
from shards.convert.checkpoint_hints import check_joined
from shards.convert.known_files import describe_import, write_record
from shards.convert.pickled_weights import checkpoint_weights
from shards.convert.preprocessing import import_tokenizer, max_caption_tokens
from shards.convert.sentence_transformers import MODULES_FILE, find_sentence_model
from shards.convert.single_tower import bare_names
from shards.convert.timm_vision import load_timm_model, read_timm_preprocess, read_timm_tower
from shards.convert.transformers_model import check_all_used, joined_tensor, read_tower
from shards.file_schema import describe, read_json
from shards.model_config import CONFIG_FILE, ModelConfig
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.saving import staged_model, write_weights
from shards.tensor_shapes import LOGIT_SCALE, model_shapes
from shards.towers.registry import IMPORTS
from shards.towers.tower_kinds import TextTower

if TYPE_CHECKING:
    import torch

# Captions are short; a fresh model need not use the whole position table.
MAX_CAPTION_TOKENS = 64

Names = Mapping[str, tuple[str, ...]]
"""The checkpoint's names of each of our tensors."""


def import_timm_and_text(
    vision_src: str | Path, text_src: str | Path, out: str | Path, embedding_dim: int, *, seed: int = 0
) -> ModelConfig:
    """Join a timm vision and a transformers text tower into a model folder with fresh projections (`trained` is false).

    `out` must be missing or empty; `seed` is that of the projections. Raises a ModelError if a checkpoint has something
    that can't be mapped, or lacks something.
    """
    vision_folder, (text_folder, sentence) = find_checkpoint(vision_src), find_modules(find_checkpoint(text_src))
    if sentence is not None and sentence.dense is not None:
        raise ModelError(
            f"{sentence.dense.folder}: --text joins a tower with a fresh projection, in whose place this Dense stands; "
            f"delete it from {sentence.root / MODULES_FILE} to join the tower without it"
        )
    check_joined(vision_folder, text_folder)
    module = load_timm_model(vision_folder)
    with checkpoint_weights(text_folder, Path(out)) as files:
        text, names = _read_text(text_folder, files)
        vision = read_timm_tower(module, vision_folder)
        max_tokens = min(MAX_CAPTION_TOKENS, max_caption_tokens(text_folder, text))
        try:
            images = read_timm_preprocess(module, vision.side_px, max_tokens, vision_folder, patch_px=vision.patch_px)
            config = ModelConfig(
                name=Path(out).name,
                trained=False,
                embedding_dim=embedding_dim,
                vision=vision,
                text=text,
                preprocess=images if sentence is None else sentence.prompt(images),
            )
        except ValidationError as error:
            raise ModelError(f"{vision_folder} and {text_folder}: {describe(error)}") from None
        tokenizer = import_tokenizer(text_folder, text)
        with staged_model(Path(out), config, tokenizer) as stage:
            write_weights(stage, _joined_tensors(config, module, files, names, seed))
    records = [
        describe_import(vision_folder, "timm", config, None),
        describe_import(text_folder, "transformers", config, sentence),
    ]
    write_record(Path(out), {key: [each for record in records for each in record[key]] for key in records[0]})
    return config


def _read_text(folder: Path, files: Mapping[str, Path]) -> tuple[TextTower, Names]:
    """Read a checkpoint's text tower, with or without heads around it, and the checkpoint's names of our tensors."""
    path = folder / CONFIG_FILE
    tree: dict[str, Any] = read_json(path, "give the folder of a text tower that transformers saved")
    model_type = str(tree.get("model_type"))
    bare = bare_names(files)
    text = read_tower(model_type, "text", tree, frozenset(bare), path)
    ignored = IMPORTS[model_type].ignored
    if (sentence := find_sentence_model(folder)) is not None:
        text, ignored = sentence.pool(text), (*ignored, "pooler.")
    if not isinstance(text, TextTower):
        raise ModelError(f"{path}: model_type = {model_type!r}; give a checkpoint of a text tower")
    found, shapes = IMPORTS[model_type], text.shapes(LayerRange(0, text.num_layers))
    theirs = {name: found.theirs(name, frozenset(bare)) for name in shapes}
    used = {their for each in theirs.values() for their in each}
    check_all_used({name: file for name, (_, file) in bare.items()}, used, ignored, {"text": model_type})
    full = {name: full for name, (full, _) in bare.items()}
    return text, {f"text.{name}": tuple(full.get(their, their) for their in each) for name, each in theirs.items()}


def _joined_tensors(
    config: ModelConfig, module: Any, files: Mapping[str, Path], names: Names, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    from shards.fresh import fresh_tensors

    fresh = dict(fresh_tensors(config, seed, ("vision_head.", "text_head.", LOGIT_SCALE)))
    ready = fresh | {f"vision.{name}": tensor for name, tensor in module.state_dict().items()}
    for name, shape in model_shapes(config).items():
        yield name, ready[name] if name in ready else joined_tensor(files, names[name], shape)
    yield LOGIT_SCALE, fresh[LOGIT_SCALE]
