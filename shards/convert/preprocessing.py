"""Conversion of preprocessing: transformers' image processors to our settings and back, tokenisers to tokenizer.json.

Source: transformers 5.23, ViTImageProcessor and CLIPImageProcessor; `resample` uses Pillow's numbers.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shards.convert.sentence_transformers import find_sentence_model
from shards.convert.siglip_tokenizer import FINAL_SIGMA, convert_siglip_tokenizer, is_siglip_tokenizer
from shards.file_schema import read_json
from shards.model_config import CONFIG_FILE, TOKENIZER_FILE
from shards.model_errors import ModelError
from shards.preprocess import PreprocessConfig
from shards.tokenizer import check_tokenizer, parse_tokenizer
from shards.towers.tower_kinds import TextTower, VisionTower

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
PROCESSOR_FILE = "preprocessor_config.json"
VIDEO_PROCESSOR_FILE = "video_preprocessor_config.json"
COMBINED_PROCESSOR_FILE = "processor_config.json"
LEAST_TOKENS = 3  # a limit below leaves no token of a caption between its first and its last
SENTINEL = re.compile(r"<extra_id_\d+>")
"""Name of one of T5's sentinels, which mark gaps in its training."""

Resize = Literal["squash", "crop", "pad", "pad_black", "patches"]
Interpolation = Literal["bilinear", "bicubic", "lanczos"]

# Settings and extra steps that image processor classes may have.
_CLASS_KEYS = (
    *("size", "crop_size", "do_center_crop", "default_to_square", "resample", "image_mean", "image_std"),
    *("do_normalize", "patch_size", "max_num_patches", "merge_size", "temporal_patch_size"),
    *("pooling_kernel_size", "max_soft_tokens"),
)
_STEPS = ("_preprocess", "resize", "center_crop", "rescale", "normalize", "rescale_and_normalize")
# DINOv3's resizes floats, without rounding to 8 bits; shards rounds. Siglip2's cuts images into patches, as we
# do for a tower that takes patches, and so do Qwen2VL's and Gemma4's, in squares of them.
_EQUAL_CLASSES = (
    *("DINOv3ViTImageProcessor", "Siglip2ImageProcessor", "Qwen2VLImageProcessor"),
    *("Gemma4ImageProcessor", "Gemma4ImageProcessorPil"),
)

RESAMPLE: dict[int, Interpolation] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


def import_budget(folder: Path, vision: VisionTower) -> VisionTower:
    """Give a vision tower its image processor's patch budget, if any; raises a ModelError if they don't fit."""
    if vision.patch_px is None or not _has_processor(folder):
        return vision
    path, settings = read_processor(folder)
    settings = _class_settings(path, settings) | settings
    if settings.get("patch_size") != vision.patch_px:
        raise ModelError(
            f"{path}: patch_size = {settings.get('patch_size')}: expected patches of {vision.patch_px} px, as the "
            "model takes images of their own proportions; save its own image processor"
        )
    budget = settings.get("max_num_patches")
    if not isinstance(budget, int) or budget < 1:
        raise ModelError(f"{path}: max_num_patches = {budget!r}: expected a number of patches, from 1 up")
    return vision.model_copy(update={"max_patches": budget})


def read_image_settings(folder: Path, *, is_required: bool = True) -> tuple[Path, dict[str, Any]] | None:
    """Read an image processor's settings, with its class's own, and their file; raises a ModelError.

    None for a folder without any, unless `is_required`.
    """
    if not is_required and not _has_processor(folder):
        return None
    path, settings = read_processor(folder)
    return path, _class_settings(path, settings) | settings


def _has_processor(folder: Path, file: str = PROCESSOR_FILE) -> bool:
    return any((folder / name).is_file() for name in (file, COMBINED_PROCESSOR_FILE))


def read_processor(folder: Path, kind: Literal["image", "video"] = "image") -> tuple[Path, dict[str, Any]]:
    """Read a processor's settings, from its own file or one shared with a tokeniser, or raise a ModelError."""
    file = PROCESSOR_FILE if kind == "image" else VIDEO_PROCESSOR_FILE
    own, path = folder / file, folder / COMBINED_PROCESSOR_FILE
    # transformers takes what is in the shared file first.
    if own.is_file() and not (path.is_file() and f"{kind}_processor" in read_json(path, "")):
        return own, read_json(own, "")
    tree = read_json(path, f"save the {kind} processor next to the model, too ({file})")
    settings = tree.get(f"{kind}_processor")
    if not isinstance(settings, dict):
        raise ModelError(f"{path}: found no {kind}_processor; save the {kind} processor next to the model, too")
    return path, settings


def import_processor(
    folder: Path,
    image_size: int,
    max_caption_tokens: int,
    *,
    is_required: bool = True,
    takes_any_size: bool = False,
    patch_px: int | None = None,
    takes_clips: bool = False,
) -> PreprocessConfig:
    """Convert an image processor's settings to a PreprocessConfig; raises a ModelError if none does the same.

    Without an image processor in `folder`, the result has our defaults unless `is_required`. With `takes_any_size`, the
    processor's size replaces `image_size` (side, px). `patch_px` is for images that keep their proportions;
    `takes_clips` asks for the video processor.
    """
    kind: Literal["image", "video"] = "video" if takes_clips else "image"
    if not is_required and not _has_processor(folder, PROCESSOR_FILE if kind == "image" else VIDEO_PROCESSOR_FILE):
        usual: Resize = "crop" if patch_px is None else "patches"
        return PreprocessConfig(image_size=image_size, resize=usual, max_caption_tokens=max_caption_tokens)
    path, settings = read_processor(folder, kind)
    settings = _class_settings(path, settings) | settings
    _check_steps(path, settings)
    normalise = settings.get("do_normalize", True)
    resize: Resize = "patches"
    resize_size = kept_size = image_size
    if patch_px is None:
        resize, resize_size, kept_size = _resize(path, settings, None if takes_any_size else image_size)
    return PreprocessConfig(
        image_size=kept_size,
        resize=resize,
        resize_size=None if resize_size == kept_size else resize_size,
        interpolation=_interpolation(path, settings),
        resampler="torchvision",  # AutoImageProcessor uses that backend, whichever class the file names
        mean=_three(path, settings, "image_mean") if normalise else (0.0, 0.0, 0.0),
        std=_three(path, settings, "image_std") if normalise else (1.0, 1.0, 1.0),
        reduced_decode=False,  # so that pixels equal those of the training
        max_caption_tokens=max_caption_tokens,
    )


def _check_steps(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise a ModelError if a step that shards always takes is off or scales otherwise, or one that it lacks is on."""
    for key in ("do_resize", "do_rescale"):
        _require(path, key, settings.get(key, True), True)
    _require(path, "do_pad", settings.get("do_pad") or False, False)
    factor = settings.get("rescale_factor", 1 / 255)
    if not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-6:
        raise ModelError(f"{path}: rescale_factor = {factor!r}: pixels are scaled by 1/255 here; retrain or rescale")


def _interpolation(path: Path, settings: Mapping[str, Any]) -> Interpolation:
    resample = settings.get("resample", 2)
    if resample not in RESAMPLE:
        raise ModelError(f"{path}: resample = {resample!r}: expected 1 (lanczos), 2 (bilinear) or 3 (bicubic)")
    return RESAMPLE[resample]


def export_processor(preprocess: PreprocessConfig) -> dict[str, Any]:
    """Make an image processor's settings (no resampler); raises a ModelError if none does what `preprocess` says."""
    size, side = preprocess.resize_size or preprocess.image_size, preprocess.image_size
    shapes: dict[str, dict[str, Any]] = {
        "squash": {
            "image_processor_type": "ViTImageProcessor" if size == side else "DeiTImageProcessor",
            "size": {"height": size, "width": size},
        },
        "crop": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": size}},
    }
    if preprocess.resize not in shapes:
        raise ModelError(f'preprocess.resize = "{preprocess.resize}": transformers has "squash" and "crop" only')
    if (size, preprocess.resize) != (side, "squash"):
        shapes[preprocess.resize] |= {"do_center_crop": True, "crop_size": {"height": side, "width": side}}
    return shapes[preprocess.resize] | {
        "do_resize": True,
        "resample": next(number for number, name in RESAMPLE.items() if name == preprocess.interpolation),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }


def _class_settings(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the class that a file names, else of the model's own.

    Raises a ModelError if it prepares images in its own way.
    """
    from transformers.image_processing_backends import TorchvisionBackend
    from transformers.models.auto.image_processing_auto import (
        IMAGE_PROCESSOR_MAPPING_NAMES,
        get_image_processor_class_from_name,
    )

    if "video_processor_type" in settings:
        return _video_class_settings(path, str(settings["video_processor_type"]))
    older = str(settings.get("feature_extractor_type") or "").replace("FeatureExtractor", "ImageProcessor")
    name = str(settings.get("image_processor_type") or older).removesuffix("Fast")
    if not name and (config := path.with_name(CONFIG_FILE)).is_file():
        kinds = IMAGE_PROCESSOR_MAPPING_NAMES.get(str(read_json(config, "").get("model_type")), {})
        name = kinds.get("torchvision") or ""
    if not name:
        return {}
    found = get_image_processor_class_from_name(name)
    if found is None:
        raise ModelError(
            f"{path}: transformers has no {name}, so what it does to images isn't known; save one of its own"
        )
    changed = [step for step in _STEPS if getattr(found, step, None) is not getattr(TorchvisionBackend, step)]
    if issubclass(found, TorchvisionBackend) and changed and name not in _EQUAL_CLASSES:
        raise ModelError(
            f"{path}: a {name} prepares images in its own way ({', '.join(changed)}), which can't be imported"
        )
    return {key: value for key in _CLASS_KEYS if (value := getattr(found, key, None)) is not None}


def _video_class_settings(path: Path, name: str) -> dict[str, Any]:
    """Return the defaults of a class of video processors; raises a ModelError if it prepares frames in its own way."""
    from transformers.models.auto.video_processing_auto import video_processor_class_from_name
    from transformers.video_processing_utils import BaseVideoProcessor

    found = video_processor_class_from_name(name)
    steps = ("sample_frames", *_STEPS)  # its own sampling would be of other frames
    changed = [step for step in steps if getattr(found, step, None) is not getattr(BaseVideoProcessor, step)]
    if found is None or changed:
        raise ModelError(f"{path}: a {name} prepares clips in its own way, which can't be imported")
    return {key: value for key in _CLASS_KEYS if (value := getattr(found, key, None)) is not None}


def _resize(path: Path, settings: Mapping[str, Any], image_size: int | None) -> tuple[Resize, int, int]:
    """Return the kind of resize, its size, and the size that is cropped from it.

    `image_size` is the side of the model's images, px; None for any.
    """
    size, crop = settings.get("size"), settings.get("crop_size")
    crops = bool(settings.get("do_center_crop"))
    if isinstance(size, int) and settings.get("default_to_square") is False:
        size = {"shortest_edge": size}
    scaled = _side_of(size, ("height", "width")) or _side_of(size, ("shortest_edge",))
    kept = _side_of(crop, ("height", "width")) if crops else _side_of(size, ("height", "width"))
    if scaled is not None and kept is not None and scaled >= kept == (image_size or kept):
        return "squash" if _side_of(size, ("height", "width")) else "crop", scaled, kept
    side = image_size or "N"
    raise ModelError(
        f"{path}: size = {size}, crop_size = {crop if crops else None}: expected {{'height': {side}, 'width': {side}}},"
        f" or at least that or {{'shortest_edge': {side}}} with a centre crop of {side}, as the model takes {side} px"
    )


def _side_of(size: object, keys: tuple[str, ...]) -> int | None:
    """Return the number that a size is, or that it has for exactly these keys."""
    if isinstance(size, int):
        return size if len(keys) == 2 else None
    if not isinstance(size, dict) or {key for key, value in size.items() if value is not None} != set(keys):
        return None
    numbers = {size[key] for key in keys}
    number = numbers.pop()
    return number if not numbers and isinstance(number, int) and number > 0 else None


def _three(path: Path, settings: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    values = settings.get(key)
    if not isinstance(values, list) or len(values) != 3 or not all(isinstance(value, int | float) for value in values):
        raise ModelError(f"{path}: {key} = {values!r}: expected three numbers, of red, green and blue")
    return (float(values[0]), float(values[1]), float(values[2]))


def _require(path: Path, key: str, found: object, expected: bool) -> None:
    if found is not expected:
        raise ModelError(f"{path}: {key} = {found!r}: only {expected} can be imported; save the processor so")


def import_tokenizer(folder: Path, text: TextTower) -> str:
    """Read a checkpoint's tokeniser as transformers would, without truncation; returns the content of tokenizer.json.

    For a text tower that takes only captions of a fixed length, it pads to that length with its own padding token.
    Raises a ModelError if there is no tokeniser, it has no fast form, or its ids don't fit the text tower.
    """
    if (folder / TOKENIZER_FILE).is_file() and not (folder / TOKENIZER_CONFIG_FILE).is_file():
        tokenizer = parse_tokenizer((folder / TOKENIZER_FILE).read_text(encoding="utf-8"), str(folder))
        padding = tokenizer.padding or _padding_of(tokenizer.id_to_token(text.padding_id), text.padding_id)
    else:
        tokenizer, padding = _load_through_transformers(folder)
    tokenizer = drop_sentinels(tokenizer, text.num_vocabulary)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if (sentence := find_sentence_model(folder)) is not None and sentence.lowers_case:
        lower_case(tokenizer)
    if text.has_fixed_length:
        if padding["pad_token"] is None:
            raise ModelError(f"{folder}: the tokeniser has no padding token, and a {text.label} tower needs one")
        length = max_caption_tokens(folder, text)
        tokenizer.enable_padding(**(padding | {"length": length, "pad_to_multiple_of": None}))
    check_tokenizer(tokenizer, text, str(folder))
    content: str = tokenizer.to_str()
    return content


def drop_sentinels(tokenizer: Any, num_vocabulary: int) -> Any:
    """Return a tokeniser without T5's sentinels behind a text tower's vocabulary, ids that it has no embeddings for."""
    from tokenizers import Tokenizer

    tree = json.loads(tokenizer.to_str())
    added, pieces = tree.get("added_tokens") or [], tree["model"].get("vocab")
    behind = [each["content"] for each in added if each["id"] >= num_vocabulary]
    behind += [piece for piece, _ in pieces[num_vocabulary:]] if isinstance(pieces, list) else []
    if not behind or not all(map(SENTINEL.fullmatch, behind)):
        return tokenizer
    tree["added_tokens"] = [each for each in added if each["id"] < num_vocabulary]
    if isinstance(pieces, list):
        tree["model"]["vocab"] = pieces[:num_vocabulary]
    return Tokenizer.from_str(json.dumps(tree))


def lower_case(tokenizer: Any) -> None:
    """Put lower case, as Python's, before a tokeniser's own normaliser."""
    from tokenizers import Regex, normalizers

    own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    steps = [normalizers.Replace(Regex(FINAL_SIGMA), "ς"), normalizers.Lowercase(), *own]
    tokenizer.normalizer = normalizers.Sequence(steps)


def max_caption_tokens(folder: Path, text: TextTower) -> int:
    """Return the longest caption: by sentence-transformers' settings or else the tokeniser, at most the positions."""
    if (sentence := find_sentence_model(folder)) is not None and sentence.limit is not None:
        return min(sentence.limit[1], text.max_tokens)
    path = folder / TOKENIZER_CONFIG_FILE
    limit = read_json(path, "").get("model_max_length") if path.is_file() else None
    if not isinstance(limit, int | float) or not LEAST_TOKENS <= limit < math.inf:
        return text.max_tokens
    return min(int(limit), text.max_tokens)  # transformers writes 1e30 where no limit was set


def export_tokenizer_config(tokenizer_json: str, text: TextTower, max_tokens: int) -> str:
    """Make the tokenizer_config.json with which transformers loads our tokenizer.json."""
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
    return {"pad_token": token, "pad_id": token_id, "direction": side}


def _load_through_transformers(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Load a tokeniser and its padding as transformers does; SigLIP's, without a fast form there, as shards does."""
    settings = read_json(folder / TOKENIZER_CONFIG_FILE, "") if (folder / TOKENIZER_CONFIG_FILE).is_file() else {}
    if is_siglip_tokenizer(folder, settings):
        tokenizer, pad_token = convert_siglip_tokenizer(folder, settings)
        side = str(settings.get("padding_side", "right"))
        return tokenizer, _padding_of(pad_token, tokenizer.token_to_id(pad_token), side)
    tokenizer = load_fast_tokenizer(folder)
    padding = _padding_of(tokenizer.pad_token, tokenizer.pad_token_id, tokenizer.padding_side)
    return tokenizer.backend_tokenizer, padding


def load_fast_tokenizer(folder: Path) -> Any:
    """Load transformers' tokeniser of a checkpoint; raises a ModelError if there is none, or none with a fast form."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:200]  # transformers reads config.json first
        raise ModelError(
            f"{folder}: no tokeniser could be loaded ({reason}); save one next to the model ({TOKENIZER_FILE})"
        ) from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelError(f"{folder}: {type(tokenizer).__name__} has no fast form; convert it to {TOKENIZER_FILE} first")
    return tokenizer
