"""Form of a clip as a checkpoint's own processor makes it of a video.

Source: transformers 5.23, the video processors of the families; at most as many pixels and frames as the script of
Qwen3-VL-Embedding (8ce3aab) gives.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shards.clip_sequence import FRAMES, PLACE, PROMPT, ClipForm
from shards.convert.preprocessing import COMBINED_PROCESSOR_FILE, PROCESSOR_FILE, RESAMPLE
from shards.file_schema import read_json
from shards.preprocess import PreprocessConfig
from shards.towers.base import CLIP, OneTowerImport

VIDEO_FILE = "video_preprocessor_config.json"
MAX_FRAMES = 64
MAX_FRAME_TOKENS = 768


def read_clip_form(
    folder: Path, found: OneTowerImport, theirs: Any, written: tuple[str, str], preprocess: PreprocessConfig
) -> ClipForm | None:
    """Read the form of a clip; None if the checkpoint's processor makes none, or one that there is no setting for.

    `theirs` is the checkpoint's configuration, of the library's class. `written` is what the template writes for a
    video, empty if nothing, and the token in it that stands for frames.
    """
    (clip, place), settings = written, _read_settings(folder, found.video_processor)
    vision = found.read(theirs, folder)
    limits = None
    if clip and settings is not None and _fits(settings, vision, preprocess):
        limits = _read_limits(settings, vision)
    if limits is None:
        return None
    return ClipForm(
        form=PROMPT + clip.replace(place, FRAMES) if found.is_chat else FRAMES,
        frame=found.clip_frame.replace(CLIP, clip.replace(place, PLACE)),
        place=place,
        frames_together=vision.temporal_patch_size,
        tokens_per_second=getattr(theirs.vision_config, "tokens_per_second", None),
        shares_pixels=found.clip_shares_pixels,
        **limits,
    )


def _read_settings(folder: Path, processor: str) -> dict[str, Any] | None:
    """Read a video processor's settings with its class's own; older checkpoints have one file for both processors."""
    import transformers

    own: object = None
    for name, key in ((COMBINED_PROCESSOR_FILE, "video_processor"), (VIDEO_FILE, None), (PROCESSOR_FILE, None)):
        if own is None and (folder / name).is_file():
            tree: Mapping[str, object] = read_json(folder / name, "fetch it again")
            own = tree if key is None else tree.get(key)
    if not isinstance(own, dict) or own.get("video_processor_type", processor) != processor:
        return None
    theirs = getattr(transformers, processor, None)
    return {key: value for key in _KEYS if (value := getattr(theirs, key, None)) is not None} | own


def _fits(settings: Mapping[str, Any], vision: Any, preprocess: PreprocessConfig) -> bool:
    """Whether frames are prepared as images are, apart from their size, and no times are written otherwise."""
    expected = {
        **{"do_resize": True, "do_rescale": True, "add_timestamps": False},
        "patch_size": vision.patch_px,
        "merge_size" if vision.fewest_patches else "pooling_kernel_size": vision.merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "resample": next(number for number, name in RESAMPLE.items() if name == preprocess.interpolation),
    }
    is_normalised = settings.get("do_normalize", True)
    mean, std = (settings.get(key) if is_normalised else (plain,) * 3 for key, plain in _NORMALISED.items())
    is_same = [_to_tuple(mean), _to_tuple(std)] == [tuple(preprocess.mean), tuple(preprocess.std)]
    return is_same and all(settings.get(key, value) == value for key, value in expected.items())


def _to_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value  # JSON has lists, a class's own settings may have tuples


_NORMALISED = {"image_mean": 0.0, "image_std": 1.0}
"""Values that change nothing, by key."""
_KEYS = (
    *("patch_size", "merge_size", "temporal_patch_size", "pooling_kernel_size", "resample", "do_normalize"),
    *("image_mean", "image_std", "size", "max_frames", "max_soft_tokens", "add_timestamps"),
)


def _read_limits(settings: Mapping[str, Any], vision: Any) -> dict[str, int] | None:
    """Return the limits of frames and pixels; None if the settings have none."""
    square = (vision.patch_px * vision.merge_size) ** 2
    size = settings.get("size") or {}
    if not isinstance(size, Mapping):
        return None
    least, most = settings.get("min_pixels") or size.get("shortest_edge"), settings.get("max_pixels")
    most = most or size.get("longest_edge")
    frame = MAX_FRAME_TOKENS * square
    if not vision.fewest_patches:  # each frame fills its budget
        tokens = settings.get("max_soft_tokens")
        least, most = 1, tokens * square if type(tokens) is int else None
        frame = most or frame
    frames = settings.get("max_frames") or MAX_FRAMES
    limits = {"min_pixels": least, "max_pixels": most, "max_frame_pixels": frame, "max_frames": frames}
    if not all(type(each) is int and each > 0 for each in limits.values()):
        return None
    return limits | {"max_frames": min(frames, MAX_FRAMES)}
