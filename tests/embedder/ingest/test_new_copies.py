"""Items of one run with the same bytes are computed once; each is a row of its own."""

import json
import os
import shutil
import time

import numpy as np
import pyarrow as pa
import pytest
import samples
from embedding_runs import assert_same_vectors
from model_runs import model_rows
from refresh_runs import interrupted, items_of, refreshed

import embedder
from embedder.ingest import embed as embed_module
from embedder.ingest import new_copies
from embedder.ingest.dry_run import forecast
from embedder.ingest.new_copies import count_new_copies
from embedder.ingest.work import IngestOptions
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current

VECTORS = ("image_embedding", "text_embedding", "content_version", "caption", "start_s", "modality")


@pytest.fixture
def source(tmp_path):
    root = samples.folder(tmp_path / "in", num_images=6, num_clips=1)
    shutil.copytree(root / "pictures", root / "albums" / "summer")
    shutil.copy(root / "clips" / "0.mp4", root / "again.mp4")
    return root


def assert_as_afresh(rows, make_run, source, monkeypatch):
    """The rows are those of a store where each item was computed."""
    afresh = make_run(source, store=str(source.parent / "afresh"))
    with monkeypatch.context() as patch:
        patch.setattr(new_copies, "_look", lambda **_: 0)
        _, expected = refreshed(afresh)
    same = ("uri", "caption", "modality", "content_version", "width", "content_hash")
    assert_same_vectors(rows, expected, same=same, atol=1e-5)


@pytest.mark.medium
def test_what_is_there_twice_is_computed_once_and_is_two_rows(make_run, source, computed, monkeypatch):
    config = make_run(source, rows_per_part=2)
    planned = forecast(config, IngestOptions(kind="refresh"))
    assert (planned.num_to_embed, planned.num_new_copies) == (14, 7)
    report, rows = refreshed(config)
    assert sorted(set(computed)) == ["again.mp4", *(f"albums/summer/{number:04d}.png" for number in range(6))]
    assert (report.num_items, report.num_taken_over, report.num_left) == (14, 7, 0)
    assert report.taken_from == {report.run_id: 7}
    assert report.caption_places == {"sidecar": sum(1 for _ in source.rglob("*.txt"))}, "those of copies, too"
    for number in range(6):
        first, other = (rows[f"{each}/{number:04d}.png", 0] for each in ("albums/summer", "pictures"))
        assert {name: first[name] for name in VECTORS} == {name: other[name] for name in VECTORS}
        assert other["uri"].endswith(f"in/pictures/{number:04d}.png")
    items = items_of(config)
    assert items["pictures/0001.png"]["modified"] != items["albums/summer/0001.png"]["modified"]
    assert_as_afresh(rows, make_run, source, monkeypatch)
    store = embedder.open_store(config.store)
    found = store.search(np.array(rows["pictures/0003.png", 0]["image_embedding"], np.float32), k=2)
    assert {hit.item_id for hit in found} == {"pictures/0003.png", "albums/summer/0003.png"}
    assert refreshed(config)[0].outcome == "nothing to do"


@pytest.mark.medium
def test_other_captions_share_nothing_and_equal_ones_do(make_run, source, computed):
    for name, caption in (("one", "a red car"), ("two", "a red car"), ("three", "quite another one")):
        shutil.copy(source / "pictures" / "0001.png", source / f"{name}.png")
        (source / f"{name}.txt").write_text(caption)
    _, rows = refreshed(make_run(source))
    assert {"one.png", "three.png", "albums/summer/0001.png"} <= set(computed)
    assert not {"two.png", "pictures/0001.png"} & set(computed)
    assert [rows[f"{name}.png", 0]["caption"] for name in ("one", "two", "three")] == [
        "a red car",
        "a red car",
        "quite another one",
    ]
    assert rows["two.png", 0]["text_embedding"] == rows["one.png", 0]["text_embedding"]


@pytest.mark.medium
def test_values_that_differ_beside_the_pictures_stay_their_own(make_run, tmp_path, computed):
    for folder, seconds in (("a", "1590000000"), ("b", "1560000000"), ("c", "1560000000")):
        (tmp_path / "in" / folder).mkdir(parents=True)
        (tmp_path / "in" / folder / "x.png").write_bytes(samples.image_bytes(1))
        description = {"title": "x.png", "description": "two dogs", "photoTakenTime": {"timestamp": seconds}}
        (tmp_path / "in" / folder / "x.png.json").write_text(json.dumps(description))
    config = make_run(tmp_path / "in", captions={"from": ["takeout"]})
    _, rows = refreshed(config)
    assert sorted(set(computed)) == ["a/x.png", "b/x.png"]
    assert [rows[f"{each}/x.png", 0]["taken_at"].year for each in "abc"] == [2020, 2019, 2019]


def test_files_of_one_size_that_differ_are_all_computed(make_run, tmp_path, computed):
    root = tmp_path / "in"
    root.mkdir()
    data = samples.image_bytes(1)
    for number in range(4):  # alike in size, and in the middle: it is their last bytes that differ
        (root / f"{number}.png").write_bytes(data + bytes(9000) + bytes([number // 2]))
    _, rows = refreshed(make_run(root))
    assert set(computed) == {"0.png", "2.png", "3.png"}
    assert len(rows) == 4


def test_a_broken_picture_that_is_there_twice_is_two_rejects(make_run, source):
    for name in ("first", "second"):
        (source / f"{name}.png").write_bytes(samples.image_bytes(9)[:40] + bytes(300))
    config = make_run(source, max_reject_fraction=0.5)
    report, _ = refreshed(config)
    items = items_of(config)
    assert (report.num_rejected, report.num_left) == (2, 0)
    first, second = items["first.png"], items["second.png"]
    assert first["state"] == second["state"] == "rejected"
    assert (first["error_type"], first["error"]) == (second["error_type"], second["error"])


@pytest.mark.medium
@pytest.mark.parametrize("step", ["embed.take_over", "takeover.write_copies", "embed.end_run"])
def test_a_run_that_was_killed_ends_in_the_same_rows(make_run, source, computed, monkeypatch, step):
    config = make_run(source, rows_per_part=2)
    interrupted(monkeypatch, config, step)
    num_computed = len(computed)
    report, rows = refreshed(config)
    assert report.published
    assert len(computed) == num_computed, "what was embedded before the kill is taken over by the next run"
    assert_as_afresh(rows, make_run, source, monkeypatch)


@pytest.mark.medium
def test_copies_join_what_was_published_meanwhile(make_run, source, computed, monkeypatch):
    config = make_run(source, publish_every_s=0.05, rows_per_part=1, batch_size=1, min_rejects=1)
    original = embed_module.execute

    def execute(*arguments):
        outcome, deadline = original(*arguments), time.monotonic() + 60
        while read_current(StoreFiles(config.store)) is None or len(items_of(config)) < 7:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return outcome

    monkeypatch.setattr(embed_module, "execute", execute)
    report, rows = refreshed(config)
    assert (report.num_taken_over, report.num_left) == (7, 0)
    assert_as_afresh(rows, make_run, source, monkeypatch)


@pytest.mark.medium
def test_further_models_compute_copies_as_well(make_run, source, tiny_model, other_model):
    config = make_run(source, model=[{"uri": str(tiny_model)}, {"name": "other", "uri": other_model}])
    report, rows = refreshed(config)
    assert (report.num_taken_over, report.num_left, report.models["other"].num_items) == (7, 0, 14)
    assert len(model_rows(config, "other")) == len(rows) == 14
    assert refreshed(config)[0].outcome == "nothing to do"


@pytest.mark.medium
def test_a_copy_that_changed_between_the_sessions_is_embedded(make_run, source, computed, monkeypatch):
    config = make_run(source)
    interrupted(monkeypatch, config, "embed.take_over")
    (source / "pictures" / "0003.png").write_bytes(samples.image_bytes(333))
    _, rows = refreshed(config)
    assert "pictures/0003.png" in computed
    first, other = (rows[f"{each}/0003.png", 0]["image_embedding"] for each in ("albums/summer", "pictures"))
    assert first != other


@pytest.mark.medium
def test_an_original_that_changes_meanwhile_lends_its_copy_nothing(make_run, source, computed, monkeypatch):
    config = make_run(source)
    original = new_copies.find_new_copies

    def change(*arguments):
        found = original(*arguments)
        (source / "albums" / "summer" / "0003.png").write_bytes(samples.image_bytes(333))
        return found

    with monkeypatch.context() as patch:
        patch.setattr("embedder.ingest.embed.find_new_copies", change)
        report, rows = refreshed(config)
    assert (report.num_left, ("pictures/0003.png", 0) in rows) == (1, False)
    _, rows = refreshed(config)
    assert "pictures/0003.png" in computed
    assert ("pictures/0003.png", 0) in rows


@pytest.mark.medium
def test_a_copy_of_a_moved_picture_and_of_its_other_copy_is_one_row(make_run, source, computed):
    config = make_run(source / "pictures")
    refreshed(config)
    computed.clear()
    (source / "pictures" / "0001.png").rename(source / "pictures" / "a.png")
    for name in ("b.png", "c.png"):
        shutil.copy(source / "pictures" / "a.png", source / "pictures" / name)
    _, rows = refreshed(config)
    assert not computed
    assert {"a.png", "b.png", "c.png"} <= {key[0] for key in rows}


def test_carried_columns_are_those_of_the_copys_own_row(make_run, tmp_path, computed):
    root = tmp_path / "in"
    root.mkdir()
    for name in ("x", "y"):
        (root / f"{name}.png").write_bytes(samples.image_bytes(4))
        (root / f"{name}.json").write_text(json.dumps({"caption": "a drawing", "place": name}))
    config = make_run(root, captions={"columns": ["place"]})
    _, rows = refreshed(config)
    assert set(computed) == {"x.png"}
    assert [rows[f"{name}.png", 0]["place"] for name in ("x", "y")] == ["x", "y"]


@pytest.mark.medium
def test_with_a_limit_a_copy_waits_for_no_original(make_run, source, computed):
    config = make_run(source)
    report, _ = refreshed(config, limit=9)
    assert report.num_items == 9
    report, rows = refreshed(config)
    assert len({key[0] for key in rows}) == 14
    assert len(set(computed)) == 7, "what the second run takes from the first is a copy of a published item"


def _listed(rows):
    columns = ("item_id", "uri", "size_bytes", "modified", "error_type", "reason")
    return pa.Table.from_pylist(
        [dict(zip(columns, row, strict=True)) for row in rows],
        pa.schema([(name, pa.int64() if name == "size_bytes" else pa.string()) for name in columns]),
    )


def test_objects_are_compared_by_etags_that_are_hashes_and_nothing_is_read(monkeypatch):
    monkeypatch.setattr(new_copies, "open_item", None)
    tags = [
        "0" * 32,
        "0" * 32 + "|captions:xmp",
        "1" * 32,
        "2" * 32 + "-5",
        "2" * 32 + "-5",
        "2026-01-01",
        "2026-01-01",
    ]
    rows = [(f"{n}", f"s3://bucket/{n}.jpg", 5, tag, None, "new") for n, tag in enumerate(tags)]
    rows += [(f"m{n}", f"s3://bucket/a.tar#member={n}&offset=512&size=5", 5, "3" * 32, None, "new") for n in range(2)]
    assert count_new_copies(_listed(rows)) == 2


def test_only_what_is_new_and_readable_counts(tmp_path):
    for name in "abcdef":
        (tmp_path / name).write_bytes(b"x" * 5000)
    (tmp_path / "short").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")

    def row(name, size=5000, error=None, reason="new"):
        return (name, str(tmp_path / name), size, "t", error, reason)

    items = [row("a"), row("b"), row("c", reason="rejected before"), row("d", error="NotAFile"), row("e", size=None)]
    items += [row("gone"), row("pipe"), row("short"), row("f", reason="model changed")]
    assert count_new_copies(_listed(items)) == 2
    assert count_new_copies(_listed([])) == 0


NAMES = """
import pyarrow as pa

def name(batch):
    return {"album": batch["item_id"]}

def refuse(batch):
    raise ValueError("no picture of ours")

def side(batch):
    return {"wide": pa.array([True] * batch.num_rows)}
"""


def of_file(tmp_path, function, **keys):
    file = tmp_path / "names.py"
    file.write_text(NAMES)
    return {"name": function, "callable": f"{file}:{function}", **keys}


@pytest.mark.medium
@pytest.mark.parametrize("where", ["after_decode", "before_write"])
def test_a_step_that_takes_a_name_sees_each_copy(where, make_run, source, tmp_path, computed):
    own = of_file(tmp_path, "name", inputs=["item_id"], outputs={"album": "string"}, where=where)
    config = make_run(source, step=[own], max_retire_fraction=1)
    assert forecast(config, IngestOptions(kind="refresh")).num_new_copies == 0
    report, rows = refreshed(config)
    assert report.num_taken_over == 0
    assert all(row["album"] == item_id for (item_id, _), row in rows.items())
    (source / "pictures" / "0001.png").rename(source / "pictures" / "moved.png")
    _, rows = refreshed(config)
    assert rows["pictures/moved.png", 0]["album"] == "pictures/moved.png"
    assert ("pictures/0001.png", 0) not in rows


@pytest.mark.medium
def test_a_step_that_takes_content_sees_one_of_all_copies(make_run, source, tmp_path, computed):
    own = of_file(tmp_path, "side", inputs=["image"], outputs={"wide": "bool"})
    report, rows = refreshed(make_run(source, step=[own]))
    assert report.num_taken_over == 7
    assert all(row["wide"] for row in rows.values())


@pytest.mark.medium
def test_copies_that_a_step_rejects_are_rejects_at_once(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=1, captions=False)
    for number in range(3):
        shutil.copy(source / "pictures" / "0000.png", source / f"{number}.png")
    config = make_run(source, step=[of_file(tmp_path, "refuse", inputs=["image"], outputs={})], max_reject_fraction=1)
    report, _ = refreshed(config)
    assert (report.num_items, report.num_rejected, report.num_left) == (4, 4, 0)
    assert {item["step"] for item in items_of(config).values()} == {"refuse"}
    assert refreshed(config)[0].outcome == "nothing to do"


def test_after_its_time_copies_are_computed_like_all_others(make_run, source, monkeypatch):
    monkeypatch.setattr(embed_module, "MAX_COPIES_S", 0.0)
    report, rows = refreshed(make_run(source))
    assert (report.num_items, report.num_taken_over, report.num_left) == (14, 0, 0)
    assert ("pictures/0003.png", 0) in rows


def test_a_reject_is_taken_over_under_the_same_suffix_alone(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=1, captions=False)
    for name in ("a.dng", "b.tif", "c.tif"):
        (source / name).write_bytes(b"II*\0\x08\0\0\0\0\0 no directory of ours")
    config = make_run(source, max_reject_fraction=1)
    refreshed(config)
    kinds = {
        name: items_of(config)[name]["error_type"] for name in ("a.dng", "b.tif", "c.tif") if name in items_of(config)
    }
    assert kinds["b.tif"] == kinds["c.tif"] != kinds.get("a.dng")
