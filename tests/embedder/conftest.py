"""One tiny seeded twin tower, media made in code, and an S3 server for the session."""

from pathlib import Path

import pytest
import samples
from bucket_server import bucket_on, running_server
from command_runs import run_apart, run_here
from tiny_models import tiny_config

from embedder.config import RunConfig, load_config
from shards.fresh import init_model
from shards.train_tokenizer import train_tokenizer


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """What is measured here is nobody else's, and what others measured is not taken for this machine's."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _no_times_of_other_tests(_own_cache):
    """How long the runs of one test took decides on no engine of another one."""
    for path in _own_cache.rglob("RunTimes-*.json"):
        path.unlink()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A model folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return init_model(tiny_config(), folder, seed=0, tokenizer_json=train_tokenizer(samples.SENTENCES, 300))


@pytest.fixture
def make_run(tiny_model, tmp_path):
    """Makes configurations: some source, the tiny model, a fresh store, the local engine; any key can differ."""

    def make(source: Path | list, **changes) -> RunConfig:
        settings = {
            "model": str(tiny_model),
            "store": str(tmp_path / "store"),
            "source": [{"path": str(source)}] if isinstance(source, Path) else source,
            "engine": "local",
            "no_progress_timeout_s": 60,
        }
        return load_config(overrides=settings | changes)

    return make


@pytest.fixture
def files(tmp_path):
    """An empty store of the samples' model."""
    from store_states import new_store

    return new_store(tmp_path / "store")


@pytest.fixture(scope="session")
def s3_server():
    """An S3 server with conditional writes, for the session; gives its URL."""
    with running_server() as (url, _):
        yield url


@pytest.fixture
def bucket(s3_server, monkeypatch):
    """A fresh bucket, as a URI; this process and its children find it and its credentials in the environment."""
    yield from bucket_on(s3_server, monkeypatch)


@pytest.fixture
def run_embedder():
    """Runs the command in this process; gives exit code, the JSON of its last line, and standard error."""
    return _answers(run_here)


@pytest.fixture
def run_embedder_apart():
    """Runs the command in a process of its own, which costs seconds of imports; gives the same."""
    return _answers(run_apart)


def _answers(run):
    def answer(*arguments):
        ended = run(*arguments)
        return ended.code, ended.found if "--json" in arguments and ended.code == 0 else None, ended.stderr

    return answer
