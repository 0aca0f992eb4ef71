"""Tests of families that the installed transformers does not have yet are left out."""

from library_versions import is_older

NEWER_FAMILIES = {"embedding_gemma2": "5.19", "qwen2_vl": "5.17", "qwen3_vl": "5.17"}

collect_ignore = [f"test_{name}.py" for name, least in NEWER_FAMILIES.items() if is_older("transformers", least)]
