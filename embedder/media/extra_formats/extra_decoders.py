"""Chooses the decoder for an image of the extra `formats`."""

from importlib import import_module

from embedder.installation import MISSING_EXTRA, explain_missing
from embedder.media.formats import HEIC, JPEG_XL
from embedder.media.loaded_image import LoadedImage
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec

MODULES = {HEIC.name: "heic", JPEG_XL.name: "jpeg_xl"}


def load_extra(kind: str, encoded: bytes, resize: ResizeSpec, max_pixels: int) -> LoadedImage:
    """Decode an image of a kind from `sniff.extra_kind`; raises a DecodeError, or whatever the decoder raises."""
    try:
        module = import_module(f"{__package__}.{MODULES.get(kind, 'camera_raw')}")
    except ModuleNotFoundError as error:
        raise DecodeError(MISSING_EXTRA, str(explain_missing(error, kind))) from None
    loaded: LoadedImage = module.load(kind, encoded, resize, max_pixels)
    return loaded
