"""Hints for what can't be imported: weights without their configuration, and towers on the wrong side of `--text`."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from shards.file_schema import read_json
from shards.model_config import CONFIG_FILE
from shards.model_errors import ModelError
from shards.towers.registry import CLASSES, IMPORTS, MODULES, ONE_TOWERS
from shards.towers.tower_kinds import TextTower
from shards.weights import read_header

WEIGHT_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".safetensors", ".pth.tar")
OPEN_CLIP_FILE = "open_clip_config.json"
MAX_SHOWN = 3

# Keys under which training scripts keep a state dict next to optimiser and epoch, likeliest first.
_KEYS = ("state_dict", "model_state_dict", "model", "model_ema", "state_dict_ema", "teacher", "module", "net")
_PREFIX = re.compile(r"^(?:module|_orig_mod|model|backbone)\.")


def weights_hint(path: Path) -> str:
    """Say what a file of weights is, and what makes a checkpoint of it; pickles run no code."""
    if zipfile.is_zipfile(path) and _is_torchscript(path):
        return (
            "this is a TorchScript program, whose weights have no configuration; save the model that it was made of "
            "with its library (transformers: save_pretrained, timm: save_for_hf), and give that folder"
        )
    try:
        names, key = _names_in(path)
    except ModelError as error:
        return str(error).removeprefix(f"{path}: ")
    if not names:
        return "this file holds no tensors by name; give the folder that the model's library saved"
    found = f"this is a state dict ({len(names):,} tensors{f' under {key!r}' if key else ''}) without its configuration"
    return f"{found}; {_cure(path, names, is_bare=not key)}"


def _is_torchscript(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _names_in(path: Path) -> tuple[list[str], str]:
    """Return the names of a file's tensors, and the key under which a pickle has them."""
    if path.suffix == ".safetensors":
        return list(read_header(path)), ""
    from shards.convert.pickled_weights import load_values

    tree = load_values(path)
    if not isinstance(tree, dict):
        return [], ""
    for key in ("", *_KEYS):
        names = _tensor_names(tree.get(key) if key else tree)
        if names:
            return names, key
    return [], ""


def _tensor_names(tree: Any) -> list[str]:
    import torch

    if not isinstance(tree, dict):
        return []
    return [name for name, value in tree.items() if isinstance(name, str) and isinstance(value, torch.Tensor)]


def _cure(path: Path, names: Collection[str], *, is_bare: bool) -> str:
    """Say what turns a state dict into a checkpoint; `is_bare` means that its file holds nothing else."""
    plain = {_PREFIX.sub("", name, count=1) for name in names}
    suffix = "model.safetensors" if path.suffix == ".safetensors" else "pytorch_model.bin"
    prefix = next((found[0] for name in names if (found := _PREFIX.match(name))), "")
    save = "" if is_bare and not prefix else "only its state dict "
    if prefix:
        save += f"without {prefix!r} before its names "
    if any(name.startswith(("visual.", "transformer.resblocks.")) for name in plain):
        return (
            f"its names are those of open_clip: put {save or 'it '}as open_clip_{suffix} into a folder with the "
            f"{OPEN_CLIP_FILE} of its model, and give that folder"
        )
    if any(name.startswith("patch_embed.") for name in plain) and any(name.startswith("blocks.0.") for name in plain):
        return (
            "its names are those of timm: write a folder with timm.models.save_for_hf(timm.create_model(NAME, "
            f"checkpoint_path={str(path)!r}), DIR, safe_serialization=True), where NAME is its architecture, and give "
            "that folder (with --text, if it shall join a text tower)"
        )
    if any(name.startswith(("vision_model.", "text_model.", "embeddings.", "encoder.")) for name in plain):
        return (
            f"its names are those of transformers: put {save or 'it '}as {suffix} into a folder with the {CONFIG_FILE} "
            "of its model, its tokeniser and its image processor, and give that folder"
        )
    shown = ", ".join(sorted(names)[:MAX_SHOWN])
    return (
        f"its names ({shown}, ...) are those of no library that is known here; load it where it was made, save the "
        "model with its library (transformers: save_pretrained, timm: save_for_hf), and give that folder"
    )


def find_weight_file(folder: Path) -> Path | None:
    """Return the file of weights in a folder without a configuration; the first by name."""
    found = sorted(each for each in folder.iterdir() if each.name.lower().endswith(WEIGHT_SUFFIXES) and each.is_file())
    return found[0] if found else None


def check_joined(vision_folder: Path, text_folder: Path) -> None:
    """Raise a ModelError with advice if a folder is recognised as anything but its side's tower.

    `vision_folder` must be a timm vision tower, `text_folder` (`--text`) a text tower of transformers.
    """
    vision, text = _kind_of(vision_folder), _kind_of(text_folder)
    if vision == "text" and text in ("timm", "vision"):
        raise ModelError(
            f"{vision_folder}: this is the text tower, and {text_folder} the one for images; change their places: "
            "SRC is a timm checkpoint, --text the text tower"
        )
    if vision == "both":
        raise ModelError(f"{vision_folder}: this model has a text tower already; import it without --text")
    if vision == "vision":
        raise ModelError(
            f"{vision_folder}: this vision tower was saved by transformers, and --text joins one that timm saved; give "
            "timm's copy of it (hf:timm/...), or join both in transformers by "
            f"VisionTextDualEncoderModel.from_vision_text_pretrained({str(vision_folder)!r}, {str(text_folder)!r})"
            ".save_pretrained(DIR), put tokeniser and image processor next to it, import DIR and train it; without "
            "--text it becomes a model only for images"
        )
    if vision == "text":
        raise ModelError(
            f"{vision_folder}: this is a text tower; SRC of an import with --text is a vision tower that timm saved"
        )
    if text in ("timm", "vision"):
        raise ModelError(f"{text_folder}: --text takes a text tower, and this is one for images; give a text tower")
    if text == "both":
        raise ModelError(
            f"{text_folder}: --text takes only a text tower, and this model has two; give a text tower, or import "
            "this model without the other"
        )


def _kind_of(folder: Path) -> str | None:
    """Return `timm`; `vision`, `text` or `both` for towers of transformers or open_clip; None if unrecognised."""
    path = folder / CONFIG_FILE
    tree = read_json(path, "") if path.is_file() else {}
    model_type = str(tree.get("model_type"))
    if model_type in CLASSES or model_type in ONE_TOWERS or (folder / OPEN_CLIP_FILE).is_file():
        return "both"
    if model_type in IMPORTS:
        return _side_of(model_type)
    return "timm" if "architecture" in tree else None


def _side_of(model_type: str) -> str:
    for side in ("vision", "text"):
        if side in model_type:
            return side
    module = next(each for each in MODULES if model_type in getattr(each, "IMPORTS", {}))
    towers = getattr(module, "TOWERS", ())
    return "text" if towers and all(issubclass(each, TextTower) for each in towers) else "vision"
