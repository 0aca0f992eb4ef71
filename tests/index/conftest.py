"""Factory of small indexes, in which a test changes only what it is about."""

from pathlib import Path

import pytest
from index_samples import Build, index_builder


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Build an index of 300 vectors of 16 dimensions; any argument of `build_index` may be given instead."""
    return index_builder(tmp_path)
