"""The commands that maintain a store: their output and their exit codes."""

import json

import pytest
from store_samples import row
from store_states import new_store, publish_refresh
from typer.testing import CliRunner

from embedder.cli import app
from embedder.errors import ConfigError

runner = CliRunner()


def run(*arguments):
    """Run a command in this process; gives the JSON of its last line."""
    result = runner.invoke(app, [*map(str, arguments), "--json"])
    assert result.exception is None, result.exception
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.medium
def test_a_store_is_maintained_from_the_command_line(tmp_path):
    files = new_store(tmp_path / "store")
    first = publish_refresh(files, row("a.jpg"), row("b.jpg"))
    second = publish_refresh(files, row("b.jpg", modified="t1"), row("c.jpg"))
    store = ("--store", files.address)

    listed = run("history", *store)["publications"]
    assert [(each["run_id"], each["num_items"], each["current"]) for each in listed] == [
        (first.run_id, 2, False),
        (second.run_id, 3, True),
    ]
    assert run("rollback", *store)["restores"] == first.run_id
    assert run("rollback", second.run_id, *store)["num_items"] == 3
    assert run("compact", *store)["published"]["kind"] == "compaction"
    promised = run("vacuum", *store, "--keep-days", 0, "--keep-versions", 1, "--dry-run")
    assert promised["num_files"] == len(promised["files"]) > 0
    assert run("vacuum", *store, "--keep-days", 0, "--keep-versions", 1)["files"] == promised["files"]
    ids = tmp_path / "ids.txt"
    ids.write_text("\ufeffb.jpg\r\n\r\n", encoding="utf-8")
    planned = run("purge", "a.jpg", "--from-file", ids, *store, "--dry-run")
    assert (planned["num_asked"], planned["num_published"], planned["dry_run"]) == (2, 2, True)
    done = run("purge", "a.jpg", "--from-file", ids, *store, "--yes")
    assert {name: done[name] for name in planned} == planned | {"dry_run": False}
    assert (done["scan"]["found_in"], done["unreadable"]) == ([], [])
    assert run("purge", "--allow-again", "a.jpg", *store) == {"num_forgotten": 1}
    assert run("migrate", *store)["was_older"] is False
    assert [each["can_be_read"] for each in run("history", *store)["publications"]] == [False] * 4 + [True, True]


def test_mistakes_are_reported_as_such(tmp_path):
    assert isinstance(runner.invoke(app, ["history"]).exception, ConfigError)
    assert "purge: no items" in str(runner.invoke(app, ["purge", "--store", str(tmp_path)]).exception)
    missing = runner.invoke(app, ["purge", "--from-file", "nowhere.txt", "--store", str(tmp_path)])
    assert "--from-file nowhere.txt: can't be read" in str(missing.exception)
    for command in ("history", "rollback", "vacuum", "compact", "migrate"):
        missing = runner.invoke(app, [command, "--store", str(tmp_path / "typo")])
        assert "no store.json there" in str(missing.exception)
    assert not (tmp_path / "typo").exists(), "a typing mistake makes no store"
