"""The commands of the index: what they print, how they end, and what the configuration changes in them."""

import json

import pytest
from index_stores import indexed_run, indexed_store, item
from store_states import no_index
from typer.testing import CliRunner

from embedder.cli import app
from embedder.config import load_config
from embedder.errors import ConfigError, StoreError
from embedder.store.layout import read_current
from embedder.store.maintenance.rollback import rollback
from embedder.store_index.index_versions import list_manifests
from index.index_errors import GateRefusedError

runner = CliRunner()


@pytest.fixture
def files(tmp_path):
    return indexed_store(tmp_path / "store", kind="hnsw")


def run(files, command: str, *arguments) -> tuple[dict, str]:
    """Run a command of the index twice; gives its JSON, and what a person reads."""
    words = ["index", command, "--store", files.address, *map(str, arguments)]
    done = runner.invoke(app, [*words, "--json"])
    assert done.exception is None, done.exception
    return json.loads(done.stdout.splitlines()[-1]), runner.invoke(app, words).stdout


def test_status_shows_what_each_version_is(files):
    indexed_run(files, item(3, 1), item(200), retired=["0007.jpg"])
    found, text = run(files, "status")
    assert [(each["index"], each["published"], each["num_vectors"]) for each in found["versions"]] == [
        (1, False, 200),
        (2, True, 200),
    ]
    columns = text.splitlines()[0].split("  ")
    for name in ("design", "masked", "recall@10", "ms", "MiB", "embeddings", "published"):
        assert name in [column.strip() for column in columns]
    assert "HNSW32,Flat" in text and "1 %" in text


def test_update_says_where_there_is_nothing_to_do(files):
    found, text = run(files, "update")
    assert (found["updated"], found["index"]) == (False, 1)
    assert "index 1 holds what is published: nothing to update" in text
    # A rollback of the rows that took no index along, and one put back by hand.
    first = read_current(files).run_id
    indexed_run(files, item(200))
    rollback(files, first, no_index)
    assert isinstance(runner.invoke(app, ["index", "update", "--store", str(files.address)]).exception, StoreError)


def test_constraints_come_from_options_and_the_table_of_the_choice_is_shown(tmp_path):
    files = indexed_store(tmp_path / "store", number=400, kind="flat")
    options = ["--memory", "2GiB", "--latency-ms", "1000", "--recall", "0.9", "--explain"]
    text = runner.invoke(app, ["index", "build", "--store", str(files.address), *options]).stdout
    _, manifest = list_manifests(files)[-1]
    assert manifest.target_recall == 0.9
    assert len(manifest.trials) > 1
    assert [trial.verdict for trial in manifest.trials].count("chosen") == 1
    for trial in manifest.trials:
        assert trial.design in text
    assert "verdict" in text and f"index 2: {manifest.design}" in text


def test_a_design_can_be_named_and_force_is_an_option(files):
    found, _ = run(files, "build", "--kind", "HNSW16,Flat", "--force")
    assert found["design"] == "HNSW16,Flat"


def test_an_index_that_the_gate_refuses_is_the_users_mistake_and_is_not_published(files):
    limit = ("--set", "index.memory_bytes=64")
    done = runner.invoke(app, ["index", "build", "--store", str(files.address), "--kind", "flat", *limit])
    assert isinstance(done.exception, GateRefusedError)
    assert read_current(files).index == 1


@pytest.mark.parametrize(
    "setting",
    ["index.kind=magic", "index.recall=0", "index.min_recall=1.5", "index.memory_bytes=0", "index.latency_ms=-1"],
)
def test_a_wrong_value_is_named_before_anything_begins(setting):
    with pytest.raises(ConfigError, match=setting.split("=")[0]):
        load_config(settings=[setting])
