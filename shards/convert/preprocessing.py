"""Conversion of preprocessing: transformers' image processors to our settings and back, tokenisers to tokenizer.json.

Source: transformers 5.23, ViTImageProcessor and CLIPImageProcessor; `resample` counts as Pillow does.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shards.config import TOKENIZER_FILE, PreprocessConfig
from shards.errors import ModelError
from shards.schema import read_json
from shards.tokenizer import check_tokenizer, parse_tokenizer
from shards.towers.kinds import TextTower

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
PROCESSOR_FILE = "preprocessor_config.json"
COMBINED_PROCESSOR_FILE = "processor_config.json"

Resize = Literal["squash", "crop", "pad", "pad_black"]
Interpolation = Literal["bilinear", "bicubic", "lanczos"]

_RESAMPLE: dict[int, Interpolation] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


def _read_processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Read an image processor's settings from its own file, or from the one it shares with a tokeniser.

    Raises:
        ModelError: the folder has neither.
    """
    path = folder / PROCESSOR_FILE
    if path.is_file():
        return path, read_json(path, "")
    path = folder / COMBINED_PROCESSOR_FILE
    tree = read_json(path, f"save the image processor beside the model, too ({PROCESSOR_FILE})")
    settings = tree.get("image_processor")
    if not isinstance(settings, dict):
        raise ModelError(f"{path}: found no image_processor; save the image processor beside the model, too")
    return path, settings


def import_processor(folder: Path, image_size: int, max_caption_tokens: int) -> PreprocessConfig:
    """Convert an image processor's settings to our preprocessing.

    Args:
        folder: a checkpoint's folder.
        image_size: side of the model's images, px.
        max_caption_tokens: longest caption.

    Raises:
        ModelError: our preprocessing can't do the same.
    """
    path, settings = _read_processor(folder)
    for key in ("do_resize", "do_rescale"):
        _require(path, key, settings.get(key, True), True)
    _require(path, "do_pad", settings.get("do_pad") or False, False)
    factor = settings.get("rescale_factor", 1 / 255)
    if not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-6:
        raise ModelError(f"{path}: rescale_factor = {factor!r}: pixels are scaled by 1/255 here; retrain or rescale")
    resample = settings.get("resample", 2)
    if resample not in _RESAMPLE:
        raise ModelError(f"{path}: resample = {resample!r}: expected 1 (lanczos), 2 (bilinear) or 3 (bicubic)")
    normalise = settings.get("do_normalize", True)
    return PreprocessConfig(
        image_size=image_size,
        resize=_resize(path, settings, image_size),
        interpolation=_RESAMPLE[resample],
        resampler="torchvision",  # AutoImageProcessor takes that backend, whichever class the file names
        mean=_three(path, settings, "image_mean") if normalise else (0.0, 0.0, 0.0),
        std=_three(path, settings, "image_std") if normalise else (1.0, 1.0, 1.0),
        reduced_decode=False,  # so that pixels equal those that the model was trained with
        max_caption_tokens=max_caption_tokens,
    )


def export_processor(preprocess: PreprocessConfig) -> dict[str, Any]:
    """Convert our preprocessing to an image processor's settings, without the resampler, which they don't have.

    Raises:
        ModelError: no image processor of transformers does the same.
    """
    size = preprocess.image_size
    square = {"height": size, "width": size}
    shapes: dict[str, dict[str, Any]] = {
        "squash": {"image_processor_type": "ViTImageProcessor", "size": square},
        "crop": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": size},
            "do_center_crop": True,
            "crop_size": square,
        },
    }
    if preprocess.resize not in shapes:
        raise ModelError(f'preprocess.resize = "{preprocess.resize}": transformers has "squash" and "crop" only')
    return shapes[preprocess.resize] | {
        "do_resize": True,
        "resample": next(number for number, name in _RESAMPLE.items() if name == preprocess.interpolation),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }


def _resize(path: Path, settings: Mapping[str, Any], image_size: int) -> Resize:
    size, crop = settings.get("size"), settings.get("crop_size")
    crops = bool(settings.get("do_center_crop"))
    square = {"height": image_size, "width": image_size}
    if size in (square, image_size) and (not crops or crop in (square, image_size)):
        return "squash"
    if size == {"shortest_edge": image_size} and crops and crop in (square, image_size):
        return "crop"
    raise ModelError(
        f"{path}: size = {size}, crop_size = {crop if crops else None}: expected {square}, or "
        f"{{'shortest_edge': {image_size}}} with a centre crop of that size, as the model takes {image_size} px"
    )


def _three(path: Path, settings: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    values = settings.get(key)
    if not isinstance(values, list) or len(values) != 3 or not all(isinstance(value, int | float) for value in values):
        raise ModelError(f"{path}: {key} = {values!r}: expected three numbers, of red, green and blue")
    return (float(values[0]), float(values[1]), float(values[2]))


def _require(path: Path, key: str, found: object, expected: bool) -> None:
    if found is not expected:
        raise ModelError(f"{path}: {key} = {found!r}: only {expected} can be imported; save the processor so")


def import_tokenizer(folder: Path, text: TextTower) -> str:
    """Read a checkpoint's tokeniser as transformers would, without truncation.

    It pads where the text tower takes captions of a fixed length only: to that length, with its own padding token.

    Returns:
        The content of tokenizer.json.

    Raises:
        ModelError: the folder has no tokeniser, it has no fast form, or its ids don't fit the text tower.
    """
    if (folder / TOKENIZER_FILE).is_file() and not (folder / TOKENIZER_CONFIG_FILE).is_file():
        tokenizer = parse_tokenizer((folder / TOKENIZER_FILE).read_text(encoding="utf-8"), str(folder))
        padding = tokenizer.padding or _padding_of(tokenizer.id_to_token(text.padding_id), text.padding_id)
    else:
        tokenizer, padding = _load_through_transformers(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if text.has_fixed_length:
        if padding["pad_token"] is None:
            raise ModelError(f"{folder}: the tokeniser has no padding token, and a {text.label} tower needs one")
        length = max_caption_tokens(folder, text)
        tokenizer.enable_padding(**(padding | {"length": length, "pad_to_multiple_of": None}))
    check_tokenizer(tokenizer, text, str(folder))
    content: str = tokenizer.to_str()
    return content


def max_caption_tokens(folder: Path, text: TextTower) -> int:
    """Find the longest caption: the tokeniser's limit where it has one, else that of the position table."""
    path = folder / TOKENIZER_CONFIG_FILE
    limit = read_json(path, "").get("model_max_length") if path.is_file() else None
    if not isinstance(limit, int | float):
        return text.max_tokens
    return min(int(limit), text.max_tokens)  # where no limit was set, transformers writes 1e30


def export_tokenizer_config(tokenizer_json: str, text: TextTower, max_tokens: int) -> str:
    """Make the tokenizer_config.json with which transformers loads our tokenizer.json.

    Args:
        tokenizer_json: content of tokenizer.json.
        text: configuration of the text tower.
        max_tokens: longest caption.
    """
    tokenizer = parse_tokenizer(tokenizer_json, TOKENIZER_FILE)
    empty = tokenizer.encode("").tokens
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "cls_token": empty[0],
        "sep_token": empty[-1],
        "pad_token": tokenizer.id_to_token(text.padding_id),
    }
    return json.dumps(settings, indent=2) + "\n"


def _padding_of(token: str | None, token_id: int | None, side: str = "right") -> dict[str, Any]:
    """Make tokenizers' settings of padding."""
    return {"pad_token": token, "pad_id": token_id, "direction": side}


def _load_through_transformers(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Load a tokeniser and its padding as transformers does; SigLIP's, which has no fast form there, in one of ours."""
    from transformers import AutoTokenizer

    from shards.convert.siglip_tokenizer import convert_siglip_tokenizer, is_siglip_tokenizer

    settings = read_json(folder / TOKENIZER_CONFIG_FILE, "") if (folder / TOKENIZER_CONFIG_FILE).is_file() else {}
    if is_siglip_tokenizer(folder, settings):
        tokenizer, pad_token = convert_siglip_tokenizer(folder, settings)
        side = str(settings.get("padding_side", "right"))
        return tokenizer, _padding_of(pad_token, tokenizer.token_to_id(pad_token), side)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{folder}: no tokeniser could be loaded ({reason}); save one beside the model ({TOKENIZER_FILE})"
        ) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{folder}: {type(tokenizer).__name__} has no fast form; convert it to {TOKENIZER_FILE} first")
    return backend, _padding_of(tokenizer.pad_token, tokenizer.pad_token_id, tokenizer.padding_side)
