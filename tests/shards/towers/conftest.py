"""Tests of families that the installed transformers does not have yet are left out."""

from importlib.util import find_spec

NEWER_FAMILIES = ("embedding_gemma2", "videoprism")

collect_ignore = [f"test_{name}.py" for name in NEWER_FAMILIES if find_spec(f"transformers.models.{name}") is None]
