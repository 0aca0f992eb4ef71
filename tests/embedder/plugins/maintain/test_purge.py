"""Purged items are nowhere: not in what is published, not in what was, not in a text; and they stay away."""

import json
import shutil
from contextlib import suppress
from io import BytesIO
from itertools import count

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from published_rows import delta_rows
from store_samples import begin, reject, row, table
from store_states import (
    Killed,
    dying,
    finished_ids,
    new_store,
    no_index,
    publish_refresh,
    rows_at,
    rows_now,
    state_now,
    vectors_now,
)

import embedder
from embedder.errors import RunFailedError, StoreError
from embedder.plugins.maintain.purge import purge as purge_module
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.purge.purge_plan import plan_purge
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import write_part
from embedder.store.layout import read_current
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.history import one_before, past_runs, publications, readable
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import finish_publication, publish
from embedder.store.publish.tombstones import allow_again, read_purged, without_purged
from embedder.store.schema import TABLES

GONE = "people/anna müller.jpg"


@pytest.fixture
def files(tmp_path):
    return new_store(tmp_path / "store")


@pytest.fixture
def three_runs(files):
    """The item comes with the second run and changes in the third; reports and journals name it."""
    publish_refresh(files, row("a.jpg"), row("z.jpg"))
    publish_refresh(files, row(GONE, caption="Anna"), row("b.jpg"))
    last = publish_refresh(files, row(GONE, modified="t1"), row("people/zoe.jpg"))
    report = {"outcome": "published", "examples": [f"/pictures/{GONE}: truncated", "b.jpg"], "num_items": 2}
    files.write(f"runs/{last.run_id}/report.json", json.dumps(report).encode())
    files.write("runs/nightly.log", f"read {GONE}\nread b.jpg\n".encode())


def traces(files, name: str) -> list[str]:
    """Every file with the name in it, read as bluntly as can be: Parquet by value, all else by its bytes."""
    found = []
    for info in files.list(""):
        content = files.read(info.path)
        if info.path.endswith(".parquet"):
            text = json.dumps(pq.read_table(BytesIO(content)).to_pylist(), default=str, ensure_ascii=False)
        else:
            text = content.decode(errors="replace")
        text += text.encode().decode("unicode_escape", errors="replace")
        if any(form in text for form in (name, json.dumps(name)[1:-1], json.dumps(json.dumps(name))[3:-3])):
            found.append(info.path)
    return found


def test_the_item_is_nowhere_and_the_others_are_untouched(files, three_runs):
    before = state_now(files)
    assert len(traces(files, "anna")) > 10
    done = purge(files, [GONE], no_index)
    others = {name: {key: each for key, each in rows.items() if key[0] != GONE} for name, rows in before.items()}
    assert state_now(files) == others
    assert traces(files, GONE) == []
    assert (done.plan.num_published, done.plan.num_vectors, done.scan.found_in) == (1, 1, ())
    assert done.scan.num_files == len(list(files.list("")))
    assert done.published.kind == "purge"


def rows_for_others(files, version, name: str) -> dict:
    """The rows of one publication as any other program reads them, which trusts the sizes that the log says."""
    found = delta_rows(files.uri(name), getattr(version, name)).to_pylist()
    return {(each["item_id"], each.get("segment")): each for each in found}


def test_an_item_whose_name_goes_on_from_there_stays(files):
    publish_refresh(files, row("a.jpg"), row("a.jpg.png"), row("aa.jpg"))
    purge(files, ["a.jpg"], no_index)
    assert list(vectors_now(files)) == ["a.jpg.png", "aa.jpg"]


def test_every_version_that_could_be_read_still_can_and_holds_the_others_as_they_were(files, three_runs):
    before = {
        version.run_id: {name: rows_at(files, version, name) for name in TABLES} for version in publications(files)
    }
    done = purge(files, [GONE], no_index)
    assert (len(done.plan.versions), done.unreadable) == (2, ())
    assert all(run.can_be_read for run in past_runs(files))
    for version in publications(files)[:-1]:
        for name, rows in before[version.run_id].items():
            others = {key: each for key, each in rows.items() if key[0] != GONE}
            assert rows_at(files, version, name) == others
            assert rows_for_others(files, version, name) == others, "size and statistics in the log are true"
    assert [(each.num_items, each.num_vectors) for each in publications(files)] == [(2, 2), (3, 3), (4, 4), (4, 4)]


def test_what_was_published_before_can_be_gone_back_to(files, three_runs):
    _, second, third = publications(files)
    purge(files, [GONE], no_index)
    assert one_before(publications(files)).run_id == second.run_id, "the purge changed nothing but what is gone anyway"
    rollback(files, second.run_id, no_index)
    assert set(vectors_now(files)) == {"a.jpg", "z.jpg", "b.jpg"}
    rollback(files, third.run_id, no_index)
    assert set(vectors_now(files)) == {"a.jpg", "z.jpg", "b.jpg", "people/zoe.jpg"}
    publish_refresh(files, row("later.jpg"))
    compact(files, PartTarget())
    assert len(vectors_now(files)) == 5
    assert traces(files, GONE) == []


def test_a_part_file_that_held_nothing_else_is_empty_afterwards_and_harms_nobody(files):
    publish_refresh(files, row(GONE))
    only = publications(files)[0]
    publish_refresh(files, row("a.jpg"))
    purge(files, [GONE], no_index)
    assert rows_at(files, only) == rows_for_others(files, only, "embeddings") == {}
    rollback(files, only.run_id, no_index)
    assert vectors_now(files) == {}
    publish_refresh(files, row("b.jpg"))
    assert list(vectors_now(files)) == ["b.jpg"]


def test_no_part_file_holds_its_vector(files):
    vector, caption = [0.6, 0.8], [0.8, -0.6]
    publish_refresh(files, row("a.jpg"), row(GONE, image_embedding=vector, text_embedding=caption))
    publish_refresh(files, row(GONE, modified="t1"))
    written = [np.array(each, np.float32).tobytes() for each in (vector, caption)]

    def holders() -> list[str]:
        tables = {info.path: files.read(info.path) for info in files.list("embeddings") if "_delta" not in info.path}
        rows = {path: pq.read_table(BytesIO(content)).to_pylist() for path, content in tables.items()}
        lists = {
            path: [each[name] for each in rows[path] for name in ("image_embedding", "text_embedding")] for path in rows
        }
        return [
            path for path, found in lists.items() if {np.float32(each or []).tobytes() for each in found} & {*written}
        ]

    assert len(holders()) == 1
    purge(files, [GONE], no_index)
    assert holders() == []


def test_texts_lose_the_name_and_keep_the_rest(files, three_runs):
    last = read_current(files).run_id
    purge(files, [GONE], no_index)
    report = json.loads(files.read(f"runs/{last}/report.json"))
    assert report == {"outcome": "published", "examples": ["[purged]: truncated", "b.jpg"], "num_items": 2}
    assert files.read("runs/nightly.log") == b"read [purged]\nread b.jpg\n", "who appends begins a new line"


def test_a_file_of_json_lines_stays_one(files, three_runs):
    files.write("runs.jsonl", json.dumps({"error": f"{GONE}: odd"}).encode() + b"\n")
    purge(files, [GONE], no_index)
    assert files.read("runs.jsonl") == b'{"error": "[purged]: odd"}\n'


def test_a_later_listing_comes_without_it_until_it_is_allowed_again(files, three_runs):
    purge(files, [GONE], no_index)
    listing = pa.table({"item_id": ["a.jpg", GONE, "b.jpg"]})
    assert without_purged(listing, read_purged(files))["item_id"].to_pylist() == ["a.jpg", "b.jpg"]
    assert allow_again(files, [GONE, "b.jpg"]) == 1
    assert without_purged(listing, read_purged(files)) == listing


def test_what_is_remembered_names_nobody_and_differs_from_store_to_store(files, tmp_path):
    publish_refresh(files, row("a.jpg"))
    other = new_store(tmp_path / "other")
    publish_refresh(other, row("a.jpg"))
    for each in (files, other):
        purge(each, ["a.jpg"], no_index)
    assert set(read_purged(files).hashes) != set(read_purged(other).hashes)
    assert len(read_purged(files).hashes) == 1
    assert b"a.jpg" not in files.read("purged.json")


@pytest.mark.medium
def test_checkpoints_that_name_it_are_made_anew(files, three_runs):
    for name in ("items", "embeddings"):
        DeltaTable(files.uri(name)).create_checkpoint()
    first = publications(files)[0]
    purge(files, [GONE], no_index)
    checkpoints = [info.path for info in files.list("items/_delta_log") if info.path.endswith(".parquet")]
    assert len(checkpoints) == 1
    assert traces(files, GONE) == []
    assert len(rows_now(files, "items")) == 4
    assert embedder.open_store(files.address, version=first.run_id).items().num_rows == 2
    for version in publications(files):
        assert rows_for_others(files, version, "items") == rows_at(files, version, "items")
    publish_refresh(files, row("later.jpg"))
    assert len(rows_now(files, "items")) == 5


def test_parts_of_an_unfinished_run_lose_it_and_the_run_goes_on_without(files):
    _, metadata = begin(files)
    write_part(files, metadata, 0, table(row("a.jpg"), row("m.jpg"), row("z.jpg")))
    write_part(files, metadata, 1, table(row("other.jpg")))
    done = purge(files, ["m.jpg"], no_index)
    assert (done.plan.num_published, done.published) == (0, None)
    assert traces(files, "m.jpg") == []
    run, metadata = begin(files)
    assert finished_ids(run) == ["other.jpg"]
    publish([ModelWork(run, metadata)])
    assert list(vectors_now(files)) == ["other.jpg"]


def test_a_run_that_must_be_given_up_for_it_is_named(files, said):
    publish_refresh(files, row("a.jpg"), row("b.jpg"))
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("c.jpg")))
    purge(files, ["a.jpg"], no_index)
    assert [run.run_id in message for message in said] == [True]


def test_an_unfinished_run_goes_on_where_only_old_versions_held_the_item(files):
    publish_refresh(files, row("a.jpg"), row("old.jpg"))
    first = read_current(files)
    publish_refresh(files, row("b.jpg"), retired=["old.jpg"])
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("c.jpg")))
    done = purge(files, ["old.jpg"], no_index)
    assert (done.published, done.plan.num_published, done.plan.versions) == (None, 0, (first.run_id,))
    assert traces(files, "old.jpg") == []
    assert set(rows_at(files, first)) == {("a.jpg", 0)}
    assert begin(files)[0].run_id == run.run_id > first.run_id


def test_what_is_still_found_is_named_and_the_command_fails(files, three_runs, monkeypatch):
    monkeypatch.setattr(purge_module, "redact_texts", lambda files, names: 0)
    with pytest.raises(
        RunFailedError, match=r"purge: an item is still held or named in 2 of \d+ files: runs/.*nightly.log"
    ):
        purge(files, [GONE], no_index)
    assert ("b.jpg", 0) in rows_now(files)


@pytest.mark.parametrize("gone", [GONE, "zwei\u2028drei.jpg", "a\x85b.jpg"])
def test_files_that_another_program_has_written_lose_it_too(files, gone):
    publish_refresh(files, row("b.jpg"), row(gone))
    for name in TABLES:
        DeltaTable(files.uri(name)).update({"uri": "uri"})
    finish_publication(files)
    purge(files, [gone], no_index)
    assert traces(files, gone) == []
    assert {key[0] for key in rows_now(files)} == {"b.jpg"}


def test_a_purge_that_was_cut_off_at_its_end_can_be_ended_where_the_item_was_allowed_again(
    files, three_runs, monkeypatch
):
    with monkeypatch.context() as killed:
        killed.setattr(purge_module, "finish_purge", lambda files, item_ids: None)
        purge(files, [GONE], no_index)
    allow_again(files, [GONE])
    with pytest.raises(StoreError, match="run the same `embedder purge` again, then roll back"):
        rollback(files, None, no_index)
    purge(files, [GONE], no_index)
    assert rollback(files, None, no_index)


def test_a_checksum_that_another_program_keeps_beside_the_log_goes_if_it_names_it(files, three_runs):
    stats = json.dumps({"numRecords": 1, "minValues": {"item_id": GONE}})
    others = {"allFiles": [{"path": "part-0.parquet", "stats": "{}"}]}
    files.write(f"items/_delta_log/{1:020d}.crc", json.dumps({"allFiles": [{"path": "a", "stats": stats}]}).encode())
    files.write(f"items/_delta_log/{2:020d}.crc", json.dumps(others).encode())
    purge(files, [GONE], no_index)
    assert traces(files, GONE) == []
    assert [info.path for info in files.list("items") if info.path.endswith(".crc")] == [
        f"items/_delta_log/{2:020d}.crc"
    ]


def test_rows_with_its_id_again_leave_too_and_stay_away(files):
    error = {"error_type": "DuplicateId", "error": "the id 'a.jpg' was listed before; ids must be unique in a source"}
    publish_refresh(files, row("a.jpg"), reject("a.jpg#duplicate-1", **error), row("b.jpg"))
    purge(files, ["a.jpg"], no_index)
    assert traces(files, "a.jpg") == []
    listing = pa.table({"item_id": ["a.jpg", "a.jpg#duplicate-1", "b.jpg", "b.jpg#duplicate-1"]})
    left = without_purged(listing, read_purged(files))["item_id"].to_pylist()
    assert left == ["b.jpg", "b.jpg#duplicate-1"]


def test_a_damaged_file_is_no_proof(files, three_runs):
    files.write("embeddings/part-mine.parquet", b"torn")
    with pytest.raises(StoreError, match=r"part-mine.parquet"):
        purge(files, [GONE], no_index)


@pytest.mark.medium
@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_between_two_steps_the_others_are_served_and_it_ends_when_done_again(tmp_path, monkeypatch, stride):
    before = new_store(tmp_path / "before")
    first = publish_refresh(before, row("a.jpg"), row("gone.jpg"), reject("gone.bad"))
    publish_refresh(before, row("gone.jpg", modified="t1"), row("b.jpg"))
    publish_refresh(before, row("c.jpg"), retired=["gone.bad"])
    for name in TABLES:
        DeltaTable(before.uri(name)).create_checkpoint()
    before.write(f"runs/{read_current(before).run_id}/report.json", b'{"outcome": "/pictures/gone.jpg: odd"}')
    others = without_gone(rows_now(before))
    for number in count(0, stride):
        files = StoreFiles(shutil.copytree(before.folder, tmp_path / str(number)))
        with dying(monkeypatch, number) as made, suppress(Killed):
            purge(files, ["gone.jpg", "gone.bad"], no_index)
        assert without_gone(rows_now(files)) == others
        assert without_gone(rows_for_others(files, publications(files)[-1], "embeddings")) == others
        purge(files, ["gone.jpg", "gone.bad"], no_index)
        assert rows_now(files) == others
        assert traces(files, "gone.") == []
        assert rows_for_others(files, first, "embeddings").keys() == {("a.jpg", 0)}
        assert all(each.can_be_read for each in past_runs(files))
        assert [each.num_items for each in publications(files)][:3] == [1, 2, 3]
        assert publications(files)[0].num_rejected == 0
        if len(made) < number:
            break
    assert len(made) >= 15


def without_gone(rows: dict) -> dict:
    return {key: each for key, each in rows.items() if not key[0].startswith("gone.")}


def test_an_unknown_id_refuses_all_names_those_unknown_and_changes_nothing(files, three_runs):
    before = {info.path: files.read(info.path) for info in files.list("")}
    with pytest.raises(StoreError) as refused:
        purge(files, [GONE, "people/anna muller.jpg", "b.jpeg.png", f"/pictures/{GONE}"], no_index)
    message = str(refused.value)
    assert "3 of 4 ids are unknown to store" in message
    assert message.count(f"(did you mean {GONE!r}?)") == 2, "a misspelling, and a URI"
    assert "'b.jpeg.png'" in message
    assert "nothing was purged" in message
    assert {info.path: files.read(info.path) for info in files.list("")} == before


def test_thousands_of_unknown_ids_are_counted_and_some_named(files, three_runs):
    with pytest.raises(StoreError) as refused:
        purge(files, [GONE, *(f"{number:05d}.gif" for number in range(5000))], no_index)
    assert "5,000 of 5,001 ids are unknown" in str(refused.value)
    assert "'00009.gif' and 4,990 more; nothing was purged" in str(refused.value)


def test_an_id_that_was_purged_before_is_no_unknown_one_and_is_told_apart(files, three_runs):
    purge(files, [GONE], no_index)
    before = {info.path: files.read(info.path) for info in files.list("")}
    done = purge(files, [GONE], no_index)
    assert done.plan.finds_nothing
    assert done.published is None
    assert [item.was_purged for item in done.plan.items] == [True]
    assert {info.path: files.read(info.path) for info in files.list("")} == before
    allow_again(files, [GONE])
    with pytest.raises(StoreError, match="unknown"):
        purge(files, [GONE], no_index)


def test_a_word_of_a_text_makes_no_item_of_a_misspelt_id(files, three_runs):
    with pytest.raises(StoreError, match=r"1 of 2 ids .* 'published' \(a word of runs/.*/report.json, no item\)"):
        purge(files, [GONE, "published"], no_index)


def test_a_plan_says_what_the_purge_then_does_and_changes_nothing_itself(files, three_runs):
    before = {info.path: files.read(info.path) for info in files.list("")}
    plan = plan_purge(files, [GONE])
    assert {info.path: files.read(info.path) for info in files.list("")} == before
    purge(files, [GONE], no_index)
    after = {info.path: files.read(info.path) for info in files.list("")}
    assert before.keys() - after.keys() == {info.path for info in plan.deleted}
    records = {path for path in before if path.endswith(("published.json", "CURRENT.json", "store.json"))}
    changed = {path for path in before.keys() & after.keys() if before[path] != after[path]} - records
    assert changed == {info.path for info in (*plan.rewritten, *plan.changed)}
    assert plan.bytes_rewritten == sum(len(before[info.path]) for info in (*plan.rewritten, *plan.published))


def test_part_files_are_written_anew_in_groups_of_bounded_size(files, three_runs, monkeypatch):
    monkeypatch.setattr(purge_module, "GROUP_BYTES", 1)
    test_every_version_that_could_be_read_still_can_and_holds_the_others_as_they_were(files, None)


def test_a_log_that_another_program_shortened_is_kept_readable(files, three_runs):
    for name in TABLES:
        DeltaTable(files.uri(name)).create_checkpoint()
    last = publications(files)[-1]
    for number in range(last.items):
        files.delete(f"items/_delta_log/{number:020d}.json")
    assert readable(files, publications(files)) == {last.run_id}
    done = purge(files, [GONE], no_index)
    assert (done.plan.versions, done.unreadable) == ((last.run_id,), ())
    assert {key[0] for key in rows_for_others(files, last, "items")} == {"a.jpg", "z.jpg", "b.jpg", "people/zoe.jpg"}
    assert traces(files, GONE) == []


def test_a_file_that_is_no_text_is_not_written_over(files, three_runs):
    content = b"\xff\xfe " + GONE.encode()
    files.write("notes.bin", content)
    with pytest.raises(RunFailedError, match=r"held or named in 1 of \d+ files: notes.bin"):
        purge(files, [GONE], no_index)
    assert files.read("notes.bin") == content


def test_pictures_that_a_killed_run_was_given_go_whosever_they_are(files, three_runs):
    files.write("runs/20260101T000000Z-aaaa/input/0a1b.parquet", b"pictures, which nothing here can distinguish")
    purge(files, [GONE], no_index)
    assert not any("/input/" in info.path for info in files.list(""))
