"""A query service over a store of six images and a clip, really running; one for each file of tests, over one store.

Tests may only read the stores of the session; whoever publishes or vacuums makes or copies one.
"""

import pytest
from page_store import make_folder_store
from running_server import running
from served import FOLLOW_S, Served, make_store


@pytest.fixture(scope="session")
def made_store(tiny_model, tmp_path_factory):
    """Configuration of a store, and the folder of its files."""
    return make_store(tmp_path_factory.mktemp("served"), tiny_model)


@pytest.fixture(scope="module")
def server(made_store, tmp_path_factory):
    """A server over it, which looks for publications all the time."""
    config, files = made_store
    with running(config.store, follow_s=FOLLOW_S, cache_dir=tmp_path_factory.mktemp("cache")) as url:
        yield Served(url, config, files)


@pytest.fixture(scope="session")
def folder_config(tiny_model, tmp_path_factory):
    """Configuration of a store of a folder as people have it."""
    return make_folder_store(tmp_path_factory.mktemp("folders"), tiny_model)
