"""Factory of small indexes, in which a test changes only what it is about."""

from pathlib import Path
from typing import Any

import pytest
from index_samples import Build, make_ids, make_vectors

from index.build import build_index
from index.manifest import Manifest


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Build an index of 300 vectors of 16 dimensions; any argument of `build_index` may be given instead."""

    def build_with(vectors: Any = None, **changes: Any) -> tuple[Path, Manifest]:
        vectors = make_vectors(300) if vectors is None else vectors
        arguments: dict[str, Any] = {
            "out": tmp_path / "index" / "000001",
            "model_fingerprint": "model-a",
            "embeddings_version": 7,
            "num_threads": 1,
        } | changes
        if "ids" not in arguments:
            arguments["ids"] = make_ids(len(vectors))
        return arguments["out"], build_index(vectors, **arguments)

    return build_with
