"""A query service over a store of six images and a clip, really running; one for each file of tests."""

import pytest
from running_server import running
from served import FOLLOW_S, Served, make_store


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    """A server over a store of its own, which looks for publications all the time."""
    folder = tmp_path_factory.mktemp("served")
    config, files = make_store(folder, tiny_model)
    with running(config.store, follow_s=FOLLOW_S, cache_dir=folder / "cache") as url:
        yield Served(url, config, files)
