"""A server on loopback, and a client that may reach it."""

import tempfile

import pytest
from web_server import web_server

from embedder.config_toml.run_sections import WebConfig
from embedder.sources.web import client as client_module
from embedder.sources.web.client import WebClient


@pytest.fixture
def server():
    with web_server() as server:
        yield server


@pytest.fixture
def make_client(monkeypatch):
    """Makes clients that may reach loopback; any setting can differ."""
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client_module, "FIRST_WAIT_S", 0.01)
    made = []

    def make(**settings) -> WebClient:
        made.append(WebClient(WebConfig(**{"allow_private": True, "timeout_s": 20, "idle_timeout_s": 5} | settings)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(name="client")
def one_client(make_client):
    return make_client()


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """Folder of temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
