"""Errors of decoding one file."""

from embedder.storage.item_error import ItemError

STILL_IMAGE, UNSUPPORTED_CAMERA, TRUNCATED_IMAGE = "StillImage", "UnsupportedCamera", "TruncatedImage"
"""Error types that callers handle specially."""


class DecodeError(ItemError):
    """One file could not be decoded, or not to its end."""
