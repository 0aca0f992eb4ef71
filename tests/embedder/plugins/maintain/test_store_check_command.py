"""`embedder store check`: its lines, its JSON, and how it ends."""

import json

from store_samples import row
from store_states import new_store, publish_refresh
from typer.testing import CliRunner

from embedder.cli import app
from embedder.errors import ConfigError, RunFailedError, StoreError
from embedder.store.layout import read_current

runner = CliRunner()


def run(*arguments):
    return runner.invoke(app, ["store", "check", *map(str, arguments)])


def test_a_whole_store_is_clean_and_ends_with_0(tmp_path):
    files = new_store(tmp_path / "store")
    publish_refresh(files, row("a.jpg"), row("b.jpg"))
    done = run("--store", files.address, "--deep", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: found[name] for name in ("findings", "num_errors", "num_items", "num_vectors", "deep")} == {
        "findings": [],
        "num_errors": 0,
        "num_items": 2,
        "num_vectors": 2,
        "deep": True,
    }
    assert found["store"] == files.address
    assert found["readable"] == found["publications"] == [read_current(files).run_id]
    text = run("--store", files.address).stdout
    assert "2 items, 0 rejects among them, 2 rows of embeddings" in text
    assert "0 errors, 0 warnings, 0 notes" in text


def test_damage_is_told_in_a_line_with_its_cure_and_ends_with_1(tmp_path):
    files = new_store(tmp_path / "store")
    publish_refresh(files, row("a.jpg"))
    (part,) = (files.folder / "embeddings").glob("*.parquet")
    part.unlink()
    done = run("--store", files.address)
    assert f"error: embeddings/{part.name}: missing; each part file of the published version is there" in done.stdout
    assert isinstance(done.exception, RunFailedError)
    assert str(done.exception).endswith("1 error found; each is listed with its cure")
    found = json.loads(run("--store", files.address, "--json").stdout.splitlines()[-1])
    assert found["num_errors"] == 1
    assert set(found["findings"][0]) == {"severity", "place", "found", "rule", "cure"}


def test_a_mistake_of_the_user_makes_nothing(tmp_path):
    assert isinstance(run().exception, ConfigError)
    assert isinstance(run("--store", tmp_path / "typo").exception, StoreError)
    assert not (tmp_path / "typo").exists()
