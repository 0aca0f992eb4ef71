"""Errors of decoding one file."""

from embedder.storage.item_error import ItemError


class DecodeError(ItemError):
    """One file could not be decoded, or not to its end."""
