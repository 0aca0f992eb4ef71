"""Hundreds of hostile names and captions through real runs: nothing raw reaches a terminal, and JSON loses nothing."""

import io
import json
import os
import pty
import random
import re
import subprocess
import sys
import threading
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import hostile_texts
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from PIL import Image

import embedder
from embedder.cli import main
from embedder.storage.printable import printable

pytestmark = pytest.mark.medium

NUM_ROWS, NUM_BROKEN, NUM_FILES = 300, 20, 60
SHEET_HITS = 60
NUM_IMAGES = 20
MAX_NAME_BYTES = 200
ROOT = Path(embedder.__file__).parents[1]


class Screen:
    """A pseudo-terminal, and all bytes that were written to it."""

    def __init__(self):
        self.ours, self.theirs = pty.openpty()
        self.shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        while True:
            try:
                data = os.read(self.ours, 1 << 16)
            except OSError:  # all writers have closed it
                return
            if not data:
                return
            self.shown += data

    def close(self):
        """Close the terminal; returns the text that it showed, each line end as one character."""
        os.close(self.theirs)
        self._reader.join(30)
        os.close(self.ours)
        return self.shown.decode().replace("\r\n", "\n")


@contextmanager
def on_screen(monkeypatch):
    """Standard output and error are a terminal without colours."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen()
    stream = os.fdopen(os.dup(screen.theirs), "w", encoding="utf-8")
    with redirect_stdout(stream), redirect_stderr(stream):
        yield screen
    stream.close()


def run_on_screen(monkeypatch, *arguments):
    """Run the command in this process; its exit code and what the terminal got."""
    typed = ["embedder", *map(str, arguments)]
    with on_screen(monkeypatch) as screen, patch.object(sys, "argv", typed), pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0, screen.close()


def run_apart_on_screen(*arguments):
    """Run the command in a process of its own; its exit code and what the terminal got."""
    screen = Screen()
    done = subprocess.run(
        [sys.executable, "-m", "embedder", *map(str, arguments)],
        stdout=screen.theirs,
        stderr=screen.theirs,
        env=os.environ | {"TERM": "dumb", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)},
        timeout=200,
        check=False,
    )
    return done.returncode, screen.close()


def file_names():
    """Names that a file system takes: no slash, no NUL, at most 255 bytes; some are no UTF-8."""
    rng = random.Random(1)
    names = []
    for number, text in enumerate(hostile_texts.texts(NUM_FILES, seed=2)):
        name = text.replace("/", "_").replace("\0", "_").encode()[:MAX_NAME_BYTES].decode(errors="ignore")
        stray = rng.choice([b"", b"", b"\xff", b"\xe9"])
        names.append(f"{number} {name}".encode() + stray + b".png")
    return names


@pytest.fixture(scope="module")
def archive(tmp_path_factory, tiny_model):
    """A store of a table with hostile ids and captions and of a folder with hostile names; and what went in."""
    root = tmp_path_factory.mktemp("hostile")
    for seed in range(NUM_IMAGES):
        (root / f"{seed}.png").write_bytes(samples.image_bytes(seed))
    (root / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    ids, captions = hostile_texts.texts(NUM_ROWS), hostile_texts.texts(NUM_ROWS, seed=1)
    is_broken = [number % (NUM_ROWS // NUM_BROKEN) == 0 for number in range(NUM_ROWS)]
    names = ["broken.png" if broken else f"{number % NUM_IMAGES}.png" for number, broken in enumerate(is_broken)]
    images = [str(root / name) for name in names]
    columns = {"name": ids, "picture": images, "title": captions, "note": captions}
    pq.write_table(pa.table(columns), root / "t.parquet")
    folder = root / "folder"
    folder.mkdir()
    for name in file_names():
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(samples.image_bytes(2))
    config = root / "run.toml"
    config.write_text(
        f"""
model = {json.dumps(str(tiny_model))}
store = {json.dumps(str(root / "store"))}
log_file = {json.dumps(str(root / "log.txt"))}
engine = "local"
max_reject_fraction = 0.5
[[source]]
name = "table"
path = {json.dumps(str(root / "t.parquet"))}
columns = {{ id = "name", image = "picture", caption = "title" }}
carryover = ["note"]
[[source]]
name = "files"
path = {json.dumps(str(folder))}
"""
    )
    code, shown = run_apart_on_screen("embed", "--config", config)
    assert code == 0, shown
    broken_ids = [f"table:{text}" for text, broken in zip(ids, is_broken, strict=True) if broken]
    captions_by_id = {f"table:{text}": caption for text, caption in zip(ids, captions, strict=True)}
    return {"root": root, "store": root / "store", "shown": shown, "captions": captions_by_id, "broken": broken_ids}


def read_json(archive, *arguments, monkeypatch):
    code, shown = run_on_screen(monkeypatch, *arguments, "--store", archive["store"], "--json")
    assert code == 0, shown
    line = shown.rstrip("\n").split("\n")[-1]
    assert line.isascii()
    assert hostile_texts.raw_characters(shown) == []
    return json.loads(line)


def test_a_run_over_hostile_names_shows_and_logs_nothing_raw(archive):
    assert hostile_texts.raw_characters(archive["shown"]) == []
    assert "items embedded" in archive["shown"]
    log = (archive["root"] / "log.txt").read_bytes().decode()
    assert hostile_texts.raw_characters(log) == []
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in log.rstrip("\n").split("\n"))


def test_json_gives_back_every_name_caption_and_carried_value(archive, monkeypatch):
    found = read_json(archive, "search", "a car", "-k", 3_000, monkeypatch=monkeypatch)
    table = {hit["item_id"]: hit for hit in found["hits"] if hit["item_id"].startswith("table:")}
    wanted = {name: caption for name, caption in archive["captions"].items() if name not in archive["broken"]}
    assert {name: hit["caption"] for name, hit in table.items()} == wanted
    assert {name: hit["carryover"]["note"] for name, hit in table.items()} == wanted
    files = {hit["item_id"] for hit in found["hits"] if hit["item_id"].startswith("files:")}
    readable = {name.decode() for name in file_names() if is_utf8(name)}
    assert files == {f"files:{name}" for name in readable}


def is_utf8(name):
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_json_of_rejects_names_every_broken_row_and_every_name_that_is_no_utf8(archive, monkeypatch):
    found = read_json(archive, "rejects", monkeypatch=monkeypatch)["rejects"]
    assert {row["item_id"] for row in found if row["item_id"].startswith("table:")} == set(archive["broken"])
    stray = [row["item_id"] for row in found if row["item_id"].startswith("files:")]
    bad = [name for name in file_names() if not is_utf8(name)]
    assert len(bad) > 10
    assert len(set(stray)) == len(bad)
    for name in bad:
        start = name.decode("utf-8", "backslashreplace")
        assert any(item_id.startswith(f"files:{start}#name-not-utf8-") for item_id in stray), start


@pytest.mark.medium
def test_the_table_of_hits_shows_one_row_a_hit_and_nothing_raw(archive, monkeypatch):
    code, shown = run_on_screen(monkeypatch, "search", "a car", "-k", 2_000, "--store", archive["store"])
    assert code == 0
    assert hostile_texts.raw_characters(shown) == []
    head, *lines = [line for line in shown.split("\n") if line.strip()]
    assert head.split() == ["score", "item", "caption", "time", "uri"]
    rows = [line for line in lines if re.match(r"-?\d\.\d{3} +(table|files):", line)]
    num_files = sum(is_utf8(name) for name in file_names())
    assert len(rows) == NUM_ROWS - len(archive["broken"]) + num_files
    assert all(line.startswith(" " * 8) for line in lines if line not in rows), "no name begins a line of its own"


@pytest.mark.parametrize("command", [["rejects"], ["history"], ["index", "status"]])
def test_other_tables_show_nothing_raw(archive, command, monkeypatch):
    code, shown = run_on_screen(monkeypatch, *command, "--store", archive["store"])
    assert code == 0, shown
    assert hostile_texts.raw_characters(shown) == []
    assert max(map(len, shown.split("\n"))) < 5_000


@pytest.mark.medium
def test_a_contact_sheet_and_a_notebook_show_hostile_hits(archive, monkeypatch, tmp_path):
    query = "a \x1b[31mcar\x1b[0m\nבית 中文"
    sheet = tmp_path / "sheet \x1b[31m\n.png"
    code, shown = run_on_screen(
        monkeypatch, "search", query, "-k", SHEET_HITS, "--sheet", sheet, "--store", archive["store"]
    )
    assert code == 0, shown
    assert hostile_texts.raw_characters(shown) == []
    assert printable(str(sheet)) in shown
    with Image.open(sheet) as image:
        assert image.width == 896
        assert (np.asarray(image) < 100).any()
    page = embedder.open_store(archive["store"]).search(query, k=10)._repr_html_()
    assert hostile_texts.raw_characters(page) == []


def test_lone_surrogates_in_json_lines_become_escapes_and_crash_nothing(tiny_model, tmp_path, run_embedder):
    (tmp_path / "good.png").write_bytes(samples.image_bytes(1))
    rows = [
        {"name": "one \ud800", "picture": str(tmp_path / "good.png"), "title": "a \udcff caption"},
        {"name": "two", "picture": str(tmp_path / "good.png"), "title": "\udfff"},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ["--id-column", "name", "--image-column", "picture", "--caption-column", "title"]
    store = tmp_path / "store"
    code, report, stderr = run_embedder(
        "embed", path, *columns, "--model", tiny_model, "--store", store, "--engine", "local", "--json"
    )
    assert code == 0, stderr
    assert report["num_rejected"] == 0
    code, found, stderr = run_embedder("search", "x", "--store", store, "--json")
    captions = {hit["item_id"]: hit["caption"] for hit in found["hits"]}
    assert captions == {r"one \ud800": r"a \xff caption", "two": r"\udfff"}


def test_the_same_holds_where_output_goes_into_a_file(archive):
    out = io.StringIO()
    typed = ["embedder", "rejects", "--store", str(archive["store"])]
    with redirect_stdout(out), patch.object(sys, "argv", typed), pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert hostile_texts.raw_characters(out.getvalue()) == []
