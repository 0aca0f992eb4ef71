"""Each kind of damage is found where it is, as bad as it is, and with its cure."""

import json
import socket
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damaged_stores import lose_rows
from index_stores import indexed_store
from model_stores import add_model, vector_row
from store_samples import begin, row, table
from store_states import new_store, no_index, publish_refresh

from embedder.errors import StoreError
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.store_check.check import check_store
from embedder.plugins.maintain.store_check.logs import missing_entries
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import store_part, write_part
from embedder.store.layout import read_current
from embedder.store.publish.current import move_current
from embedder.store.publish.tombstones import remember_purged
from embedder.store.tables.tables import RecordTable


@pytest.fixture
def files(tmp_path):
    """A store of two publications."""
    store = new_store(tmp_path / "store")
    publish_refresh(store, *(row(f"{name}.jpg") for name in "abcd"))
    publish_refresh(store, row("e.jpg"))
    return store


@pytest.fixture
def indexed(tmp_path):
    return indexed_store(tmp_path / "store", 30)


def findings(files, severity="error", *, deep=False):
    """Findings of one severity, as (place, found, cure)."""
    found = check_store(StoreFiles(files.address), deep=deep).findings
    return [(each.place, each.found, each.cure) for each in found if each.severity == severity]


def only(files, severity="error", *, deep=False):
    """The one finding of a severity."""
    (found,) = findings(files, severity, deep=deep)
    return found


def parts(files, name: str) -> list[Path]:
    """Part files of what is published."""
    table_now = RecordTable(files, name, getattr(read_current(files), name))
    return [files.folder / name / path for path in table_now.paths()]


def change(path: Path, **fields):
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_items_without_their_vectors_are_named(files):
    lose_rows(files, ["b.jpg", "c.jpg"])
    place, found, cure = only(files)
    assert (place, found) == ("items", "2 items in state embedded without all vectors: 'b.jpg', 'c.jpg'")
    assert "embedder refresh CONFIG.toml --repair" in cure


def test_rows_without_an_item_are_named(files):
    lose_rows(files, ["b.jpg"], "items")
    change(files.folder / "runs" / read_current(files).run_id / "published.json", num_items=4, num_vectors=5)
    assert only(files)[:2] == ("embeddings", "1 item with vectors, in no row of items: 'b.jpg'")


@pytest.mark.parametrize(("name", "severity"), [("items", "error"), ("embeddings", "error")])
def test_what_stands_twice_is_named(files, name, severity):
    current = read_current(files)
    table_now = RecordTable(files, name, getattr(current, name))
    content = table_now.read()
    twice = store_part(files, name, f"part-{current.run_id}-rewrite-1.parquet", content.slice(0, 1), "")
    version = RecordTable(files, name).commit_files("twice", [*table_now.parts(), twice])
    move_current(files, current.model_copy(update={name: version}))
    item_id = content["item_id"][0].as_py()
    found = [each for each in findings(files, severity) if each[0] == name]
    what = "in more than one row" if name == "items" else "with a segment in more than one row"
    assert [each[1] for each in found] == [f"1 item {what}: {item_id!r}"]


def test_counts_that_are_not_those_of_the_tables(files):
    run_id = read_current(files).run_id
    change(files.folder / "runs" / run_id / "published.json", num_items=9)
    place, found, _ = only(files)
    assert (place, found) == (f"runs/{run_id}/published.json", "num_items is 9")


@pytest.mark.parametrize("name", ["items", "embeddings"])
def test_a_missing_part_file_and_the_way_back(files, name):
    before, _ = (each for each in check_store(files).publications)
    newest = next(path for path in parts(files, name) if read_current(files).run_id in path.name)
    newest.unlink()
    place, found, cure = only(files)
    assert (place, found) == (f"{name}/{newest.name}", "missing")
    assert f"embedder rollback {before} --store" in cure


def test_a_part_file_that_was_cut_short(files):
    path = parts(files, "embeddings")[0]
    path.write_bytes(path.read_bytes()[:-100])
    place, found, cure = only(files)
    assert place == f"embeddings/{path.name}"
    assert found.startswith("not of the size that the log names (")
    assert "restore the file from a backup" in cure
    assert [each[0] for each in findings(files, "note")] == ["items"], "ids can't be compared then"


def test_a_part_file_with_other_bytes_is_found_by_reading_it_whole(files):
    path = parts(files, "embeddings")[0]
    content = bytearray(path.read_bytes())
    content[4:40] = b"\xff" * 36  # in the first column chunk, or one of another column
    path.write_bytes(bytes(content))
    assert [each[0] for each in findings(files, deep=True)] == [f"embeddings/{path.name}"]


def test_a_part_file_with_other_rows_than_the_log_tells(files):
    path = parts(files, "items")[0]
    size, content = path.stat().st_size, pq.read_table(path)
    pq.write_table(content.slice(1), path, compression="zstd")
    path.write_bytes(path.read_bytes() + b"")
    log = next(each for each in (files.folder / "items/_delta_log").glob("*.json") if path.name in each.read_text())
    log.write_text(log.read_text().replace(f'"size": {size}', f'"size": {path.stat().st_size}'))
    place, found, _ = only(files)
    assert place == f"items/{path.name}"
    assert found == f"damaged (it has {content.num_rows - 1} rows, not {content.num_rows} as the log says)"


@pytest.mark.parametrize(
    ("vector", "what"),
    [([1.0, float("nan")], "with vectors that have NaN or infinity"), ([1.0, 0.0, 0.0], "widths 2 in ")],
)
def test_vectors_that_can_not_be_compared_are_found_by_reading_them(files, vector, what):
    current = read_current(files)
    table_now = RecordTable(files, "embeddings", current.embeddings)
    path = table_now.paths()[-1]
    bad = table_now.read(paths=[path]).to_pylist()[0] | {"image_embedding": vector}
    content = pa.Table.from_pylist([bad], table_now.schema)
    part = store_part(files, "embeddings", f"part-{current.run_id}-rewrite-2.parquet", content, "")
    rest = [each for each in table_now.parts() if each.path != path]
    version = RecordTable(files, "embeddings").commit_files("bad", [*rest, part])
    move_current(files, current.model_copy(update={"embeddings": version}))
    change(files.folder / "runs" / current.run_id / "published.json", embeddings=version)
    assert findings(files) == []
    assert only(files, deep=True)[1].startswith(what)


def test_rows_of_another_model_are_found_by_reading_them(files):
    for path in ("CURRENT.json", "store.json", f"runs/{read_current(files).run_id}/published.json"):
        change(files.folder / path, model_fingerprint="another")
    assert findings(files) == []
    assert "with rows of another model" in only(files, deep=True)[1]


def test_a_damaged_current_json_and_one_that_is_gone(files):
    path = files.folder / "CURRENT.json"
    path.write_text("{")
    place, found, cure = only(files)
    assert place == "CURRENT.json" and found.startswith("not a valid CURRENT.json")
    assert "published.json" in cure
    path.unlink()
    assert only(files)[1] == "missing, though 2 runs published"


def test_a_store_json_that_is_gone_damaged_or_of_another_model(files):
    path = files.folder / "store.json"
    change(path, preprocess_fingerprint="another")
    assert findings(files) == []
    place, found, _ = only(files, "warning")
    assert place == "store.json" and "preprocess_fingerprint another, and CURRENT.json has" in found
    path.write_text("[]")
    assert only(files)[0] == "store.json"
    path.unlink()
    assert only(files)[:2] == ("store.json", "missing")


def test_no_store_and_one_of_a_later_format_are_mistakes_of_the_user(tmp_path, files):
    with pytest.raises(StoreError, match=r"no store\.json there"):
        check_store(StoreFiles(tmp_path / "typo"))
    change(files.folder / "store.json", format_version=99)
    with pytest.raises(StoreError, match="use the embedder that wrote the store"):
        check_store(files)


@pytest.mark.parametrize("name", ["items", "embeddings"])
def test_an_entry_of_a_log_that_is_gone_or_damaged(files, name):
    log = files.folder / name / "_delta_log"
    entry = sorted(log.glob("*.json"))[1]
    content = entry.read_bytes()
    entry.write_bytes(content[:-20])
    places = [each[0] for each in findings(files)]
    assert f"{name}/_delta_log/{entry.name}" in places and name in places
    entry.unlink()
    assert (f"{name}/_delta_log", "lacks entry 1") in [each[:2] for each in findings(files)]


def test_entries_are_missed_from_the_first_or_from_the_first_checkpoint_on():
    assert missing_entries([0, 1, 3], [], 3) == [2]
    assert missing_entries([0, 1], [], 2) == [2]
    assert missing_entries([11, 12], [10], 12) == []
    assert missing_entries([12], [10], 12) == [11]
    assert missing_entries([], [], -1) == []


def test_a_version_newer_than_the_published_one_is_work_that_was_cut_off(files):
    RecordTable(files, "items").commit_files("cut-off", [])
    place, found, cure = only(files, "note")
    assert (place, found) == ("items/_delta_log", "version 3 is newer than the published 2")
    assert "finishes it or reverts it" in cure
    assert findings(files) == []


def test_a_record_that_is_damaged_or_gone_ends_the_chain(files):
    first, second = check_store(files).publications
    path = files.folder / "runs" / first / "published.json"
    content = path.read_text()
    path.write_text("{")
    assert only(files)[0] == f"runs/{first}/published.json"
    path.unlink()
    assert only(files, "warning")[:2] == (
        f"runs/{second}/published.json",
        f"it names {first} as the one before it, which has no record",
    )
    path.write_text(content)
    change(path, previous=second)
    assert only(files)[1] == f"it names {second} as the one before it, which came later"
    (files.folder / "runs" / second / "published.json").unlink()
    assert only(files)[:2] == (f"runs/{second}/published.json", "missing")


def test_a_record_that_tells_another_version_than_current_json(files):
    run_id = read_current(files).run_id
    change(files.folder / "runs" / run_id / "published.json", items=1)
    assert only(files)[1] == "it differs from CURRENT.json in items"


def test_an_index_that_is_gone_altered_or_of_another_model(indexed):
    folder = indexed.folder / "index" / "000001"
    manifest = (folder / "manifest.json").read_text()
    cure = f"`embedder index build --store {indexed.address}` makes another"
    faiss = bytearray((folder / "index.faiss").read_bytes())
    faiss[-1] ^= 1
    (folder / "index.faiss").write_bytes(bytes(faiss))
    assert findings(indexed) == []
    found = ("index/000001", "1 file is altered, by the sha256 of its manifest: index.faiss", cure)
    assert only(indexed, deep=True) == found
    (folder / "index.faiss").write_bytes(bytes(faiss[:-1]))
    assert only(indexed)[0] == "index/000001"
    (folder / "index.faiss").unlink()
    assert only(indexed) == ("index/000001", "1 file is missing: index.faiss", cure)
    (folder / "index.faiss").write_bytes(bytes(faiss))
    change(folder / "manifest.json", model_fingerprint="another")
    assert only(indexed)[:2] == ("index/000001", "it is of the model another")
    (folder / "manifest.json").write_text(manifest[:-9])
    assert only(indexed)[0] == "index/000001/manifest.json"
    (folder / "manifest.json").unlink()
    assert only(indexed)[:2] == ("index/000001/manifest.json", "it is missing")


def test_an_index_and_a_word_index_of_other_rows(indexed):
    change(indexed.folder / "index" / "000001" / "manifest.json", num_vectors=29)
    (words,) = (indexed.folder / "words").glob("*/manifest.json")
    change(words, num_captions=28)
    index, captions = findings(indexed)
    assert index[1].startswith("it finds 29 vectors, built of embeddings version") and "index update" in index[2]
    assert captions[1] == "it has 28 captions" and "index build" in captions[2]


def test_a_word_index_that_is_altered(indexed):
    (lists,) = (indexed.folder / "words").glob("*/docs-*.u32")
    content = bytearray(lists.read_bytes())
    content[0] ^= 1
    lists.write_bytes(bytes(content))
    assert findings(indexed) == []
    place, found, _ = only(indexed, deep=True)
    assert place == f"words/{lists.parent.name}" and "altered" in found


def test_a_further_model_is_checked_as_the_main_one(files, tmp_path):
    add_model(files, "clip", *(vector_row(f"{name}.jpg", np.ones(2, np.float32)) for name in "ab"))
    assert findings(files) == []
    current = read_current(files).models["clip"]
    path = next((files.folder / "models/clip/embeddings").glob(f"part-{current.run_id}*.parquet"))
    path.unlink()
    assert only(files)[0] == f"models/clip/embeddings/{path.name}"


def test_what_killed_writers_left_is_told_with_its_size(files):
    (files.folder / "items" / "part-x.parquet#ab12").write_bytes(b"12345")
    run_id = "20250101T000000Z-abcd"
    (files.folder / "embeddings" / f"part-{run_id}-0001-ab-000000.parquet").write_bytes(b"123")
    (files.folder / "index" / "000007").mkdir(parents=True)
    (files.folder / "index" / "000007" / "claim").write_bytes(b"ab")
    (files.folder / "index" / ".building-000008-ab").mkdir()
    (files.folder / "index" / ".building-000008-ab" / "index.faiss").write_bytes(b"1234")
    notes = {place: (found, cure) for place, found, cure in findings(files, "note")}
    assert findings(files) == findings(files, "warning") == []
    vacuum = f"`embedder vacuum --store {files.address}` deletes it"
    assert notes["items/part-x.parquet#ab12"][0].startswith("1 unfinished file that nothing needs, 5 bytes")
    assert notes[f"embeddings/part-{run_id}-0001-ab-000000.parquet"][1] == vacuum
    assert notes["index/000007"] == ("only a claim of its number, 1 file of 2 bytes", vacuum)
    assert "1 file of an index that was cut off" in notes["index/.building-000008-ab/index.faiss"][0]


def test_lists_of_deletions_that_are_not_carried_out(files):
    first = parts(files, "items")[0].name
    current = read_current(files)
    move_current(files, current, ["items/part-nowhere.parquet"])
    (token,) = read_current(files).deleting
    (files.folder / "deletions" / "beef.json").write_text("[]")
    notes = {place: (found, cure) for place, found, cure in findings(files, "note")}
    assert notes[f"deletions/{token}.json"][0] == "1 file listed, 0 of them still there"
    assert "embedder vacuum" in notes[f"deletions/{token}.json"][1]
    assert notes["deletions/beef.json"][0] == "CURRENT.json does not name it"
    path = files.folder / "deletions" / f"{token}.json"
    path.write_text(json.dumps([f"items/{first}"]))
    assert only(files)[:2] == (f"items/{first}", "listed in deletions/")
    path.write_text("{")
    place, _, cure = only(files)
    assert place == f"deletions/{token}.json" and cure.startswith("delete the file")


def test_the_journal_of_an_unfinished_run_whose_part_file_is_gone(files):
    run, metadata = begin(files)
    entry = write_part(files, metadata, 0, table(row("f.jpg")))
    (files.folder / "items" / entry.parts[1].path).unlink()
    place, found, cure = only(files)
    assert place == f"runs/{run.run_id}/journal" and entry.parts[1].path in found
    assert "the same command embeds their items again" in cure


@pytest.mark.parametrize(
    ("content", "severity", "found"),
    [
        (b"", None, None),
        (b"{", "warning", "its content is damaged"),
        (b'{"pid": 1, "host": "elsewhere", "since": "then"}', "note", "held by process 1 on elsewhere, since then"),
    ],
)
def test_the_lock_is_told(files, content, severity, found):
    (files.folder / ".lock").write_bytes(content)
    assert [each.severity for each in check_store(files).findings] == ([] if severity is None else [severity])
    assert severity is None or only(files, severity)[:2] == (".lock", found)


def test_the_lock_of_a_process_that_has_ended(files):
    holder = {"pid": 2**22 + 1, "host": socket.gethostname(), "since": "then"}
    (files.folder / ".lock").write_text(json.dumps(holder))
    assert only(files, "note")[1].endswith("since then, which has ended")


def test_a_purge_that_was_cut_off_and_a_record_of_purges_that_is_damaged(files):
    remember_purged(files, ["a.jpg"])
    place, found, cure = only(files, "warning")
    assert (place, found) == ("purged.json", "a purge of 1 item has not ended")
    assert "run the same `embedder purge" in cure
    purge(files, ["a.jpg"], no_index)
    assert check_store(files).findings == ()
    (files.folder / "purged.json").write_text("[]")
    assert only(files)[0] == "purged.json"
