"""The fuzzing script finds no fault of the service, and finds one where there is one."""

import pytest
import samples
from running_server import running
from script_runs import last_json, run_script
from served import make_store
from tiny_models import tiny_config

from embedder.plugins.serve.publications import Publications
from shards.fresh import init_model
from shards.train_tokenizer import train_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzzed")
    model = init_model(tiny_config(), folder / "m", seed=0, tokenizer_json=train_tokenizer(samples.SENTENCES, 300))
    return make_store(folder, model)[0].store


def fuzz(store, folder):
    """Fuzz a server of the store; gives the exit status and what was found."""
    with running(store, cache_dir=folder) as url:
        done = run_script("fuzz_serve.py", url, "--seconds", 20, timeout_s=200)
    return done.returncode, last_json(done), done.stdout


def test_no_fault_is_found_in_twenty_seconds(store, tmp_path):
    code, found, said = fuzz(store, tmp_path)
    assert code == 0, said[-3000:]
    assert found["faults"] == found["failed"] == 0
    assert found["requests"] > 100
    assert {"200", "404", "422"} <= set(found["by_status"])


def test_a_fault_is_found(store, tmp_path, monkeypatch):
    monkeypatch.setattr(Publications, "history", lambda _: 1 / 0)
    code, found, said = fuzz(store, tmp_path)
    assert code == 1
    assert found["faults"] > 0
    assert "/versions" in said
