"""What runs read and compute, watched and disturbed."""

import pyarrow.compute as pc
import pytest
from model_runs import other_towers

from embedder.sources.fetch import Fetcher
from embedder.sources.source_errors import FetchError
from embedder.steps.stage import TowerStage


@pytest.fixture(scope="session")
def other_model(tmp_path_factory) -> str:
    """A model folder of other weights than the tiny model's, whose preprocessing is the same."""
    return other_towers(tmp_path_factory.mktemp("models"))


@pytest.fixture
def computed(monkeypatch):
    """Ids of the items that have reached the main model, each once for each stage."""
    ids = []
    original = TowerStage.process

    def process(stage, table):
        if "modality" in table.schema.names:  # a further model's tables have only inputs
            ids.extend(table.filter(pc.is_valid(table["modality"]))["item_id"].to_pylist())
        return original(stage, table)

    monkeypatch.setattr(TowerStage, "process", process)
    return ids


@pytest.fixture
def failing(monkeypatch):
    """Names of files that a disk fails to read in passing."""
    names = set()
    fetch = Fetcher.fetch

    def fetch_or_fail(self, uri, **options):
        if any(uri.endswith(name) for name in names):
            raise FetchError("ReadError", f"{uri}: Input/output error", transient=True)
        return fetch(self, uri, **options)

    monkeypatch.setattr(Fetcher, "fetch", fetch_or_fail)
    return names
