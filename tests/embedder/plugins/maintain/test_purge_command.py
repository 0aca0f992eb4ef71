"""`embedder purge` shows its plan, asks before it changes anything, and refuses a misspelt id."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from command_runs import run_here
from store_samples import row
from store_states import new_store, publish_refresh, vectors_now
from typer.testing import CliRunner

from embedder.cli import app
from embedder.errors import ConfigError
from embedder.store.backends import FileInfo
from embedder.store.files import StoreFiles

ROOT = Path(__file__).parents[4]
runner = CliRunner()


@pytest.fixture
def files(tmp_path):
    files = new_store(tmp_path / "store")
    publish_refresh(files, row("a.jpg"), row("anna.jpg"))
    publish_refresh(files, row("anna.jpg", modified="t1"), row("b.jpg"))
    return files


def contents(files) -> dict:
    """All files of the store but the lock, which says who held it last."""
    return {info.path: files.read(info.path) for info in files.list("") if info.path != ".lock"}


def purge(files, *arguments, answer: bytes | None = None) -> tuple[int, str, str]:
    """Run the command, with an answer in a process of its own on a terminal; exit code, output, errors."""
    words = ["purge", *map(str, arguments), "--store", str(files.address)]
    if answer is None:
        ended = run_here(*words)
        return ended.code, ended.stdout, ended.stderr
    controller, terminal = pty.openpty()
    os.write(controller, answer)
    command = [sys.executable, "-m", "embedder", *words]
    done = subprocess.run(command, stdin=terminal, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    os.close(controller)
    os.close(terminal)
    return done.returncode, done.stdout, done.stderr


def test_a_misspelt_id_is_exit_2_and_one_line_that_names_it_and_nothing_is_purged(files):
    before = contents(files)
    for more in (["--yes"], []):  # without a terminal, it is reported before anything else is asked
        code, out, errors = purge(files, "anna.jpg", "ana.jpg", *more)
        assert (code, out) == (2, "")
        (line,) = errors.splitlines()
        assert "1 of 2 ids is unknown" in line and "'ana.jpg' (did you mean 'anna.jpg' " in line
    assert contents(files) == before


def test_a_dry_run_beside_a_run_that_renames_its_files_is_told_in_one_line(files, monkeypatch):
    found = StoreFiles.list

    def with_one_that_is_renamed(self, folder, after=None):
        yield from found(self, folder, after)
        if not folder:
            yield FileInfo("CURRENT.json#ab12", 9)

    monkeypatch.setattr(StoreFiles, "list", with_one_that_is_renamed)
    code, _, errors = purge(files, "anna.jpg", "--dry-run")
    (line,) = errors.splitlines()
    assert code == 2 and "CURRENT.json#ab12: gone while the store was searched, as a run is writing to it" in line


@pytest.mark.parametrize("option", ["--dry-run", "--yes", "--allow-again"])
def test_a_name_that_is_not_utf8_is_no_id_and_exit_2_in_one_line(files, option):
    before = contents(files)
    code, out, errors = purge(files, "a.jpg", "bad\udcff.jpg", option)
    assert (code, out) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith(r"embedder: purge: 'bad\xff.jpg' is not UTF-8, as every id is; `embedder rejects` lists")
    assert contents(files) == before


def test_without_a_terminal_it_needs_the_option_yes(files):
    before = contents(files)
    code, out, errors = purge(files, "anna.jpg")
    assert (code, out, len(errors.splitlines())) == (2, "", 1)
    assert "no terminal" in errors and "--yes" in errors and "--dry-run" in errors
    assert contents(files) == before
    code, out, _ = purge(files, "anna.jpg", "--yes", "--json")
    assert (code, json.loads(out)["num_published"]) == (0, 1)
    assert set(vectors_now(files)) == {"a.jpg", "b.jpg"}


@pytest.mark.medium
def test_on_a_terminal_it_says_what_will_be_done_and_asks(files):
    before = contents(files)
    code, out, errors = purge(files, "anna.jpg", answer=b"\n")
    assert (code, out) == (1, "")
    assert "Remove them for good? [y/N]" in errors
    assert "versions that hold them and stay readable, without them: 2: " in errors
    assert contents(files) == before
    code, out, errors = purge(files, "anna.jpg", "--json", answer=b"y\n")
    assert code == 0, errors
    assert json.loads(out)["scan"]["found_in"] == []
    assert set(vectors_now(files)) == {"a.jpg", "b.jpg"}


def test_a_dry_run_lists_what_would_be_done_and_changes_nothing(files):
    before = contents(files)
    shown = runner.invoke(app, ["purge", "anna.jpg", "--dry-run", "--store", str(files.address)]).stdout
    assert "'anna.jpg': 1 vector published" in shown
    assert "nothing was changed" in shown
    done = runner.invoke(app, ["purge", "anna.jpg", "--dry-run", "--json", "--store", str(files.address)])
    data = json.loads(done.stdout)
    assert data["items"] == [{"item_id": "anna.jpg", "is_published": True, "num_vectors": 1, "was_purged": False}]
    assert len(data["versions"]) == 2 and data["bytes_rewritten"] > 0
    assert {path.split("/")[0] for path in data["rewritten"]} == {"items", "embeddings"}
    assert all("/journal/" in path for path in data["deleted"])
    assert {path.split("/")[1] for path in data["changed"]} == {"_delta_log"}
    assert contents(files) == before


@pytest.mark.medium
def test_a_second_purge_of_an_item_is_no_mistake_and_asks_nothing(files):
    assert purge(files, "anna.jpg", "--yes")[0] == 0
    before = contents(files)
    code, out, _ = purge(files, "anna.jpg", answer=b"n\n")
    assert code == 0
    assert "purged before: 1; nothing of them was left" in out
    assert contents(files) == before
    code, _, errors = purge(files, "anna.jpg", "typo.jpg", "--yes")
    assert code == 2 and "'typo.jpg'" in errors and "'anna.jpg'" not in errors


@pytest.mark.medium
def test_a_file_of_thousands_of_ids_is_one_purge(files, tmp_path):
    names = [f"people/{number:05d} a.jpg" for number in range(3000)]
    publish_refresh(files, *(row(name, uri=f"/pictures/{name}") for name in names), row("other.jpg"))
    files.write("runs/nightly.log", "".join(f"read /pictures/{name}\n" for name in names).encode())
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(names))
    done = runner.invoke(app, ["purge", "--from-file", str(ids), "--yes", "--json", "--store", str(files.address)])
    assert json.loads(done.stdout)["num_published"] == 3000
    assert set(vectors_now(files)) == {"a.jpg", "anna.jpg", "b.jpg", "other.jpg"}
    assert set(files.read("runs/nightly.log").decode().splitlines()) == {"read [purged]"}


def test_a_dry_run_of_allowing_items_again_is_refused(files):
    done = runner.invoke(app, ["purge", "a.jpg", "--allow-again", "--dry-run", "--store", str(files.address)])
    assert isinstance(done.exception, ConfigError)
