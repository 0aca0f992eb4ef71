"""Fixtures: tests run with a run's finished items in memory, and in parts on disk."""

import pytest

from embedder.storage import hashed_rows
from embedder.store.journal import finished
from embedder.store.publish import publication


@pytest.fixture(params=["memory", "disk"])
def in_memory_and_on_disk(request, monkeypatch):
    """Where `embedder.store.journal.finished` has what it reads; on disk in few parts."""
    if request.param == "disk":
        monkeypatch.setattr(hashed_rows, "NUM_PARTS", 3)
        monkeypatch.setattr(finished, "MEMORY_BYTES", 0)
        monkeypatch.setattr(publication, "MANY_IDS", 0)


@pytest.fixture(autouse=True)
def finished_items_in(in_memory_and_on_disk):
    """Runs each test of a file both ways."""
