"""The main job on the local engine: what goes in comes out, once, with the right values."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from embedding_runs import assert_same_vectors, embedded

import embedder
from embedder.errors import ConfigError, SourceError
from embedder.ingest.embed import embed
from embedder.ingest.run_times import measured_times
from embedder.models.model_folder import open_model


def unit(vector):
    return np.isclose(np.linalg.norm(vector), 1, atol=1e-5)


@pytest.mark.medium
def test_a_folder_of_pictures_captions_and_clips_is_embedded_whole(make_run, tmp_path):
    source = samples.folder(tmp_path / "a folder with spaces é", num_clips=1)
    (source / "just words.txt").write_text("seven white horses")
    report, rows = embedded(make_run(source, segment_s=2.0, frames_per_segment=2, captions={"alone": True}))
    assert report.published
    assert (report.num_items, report.num_rejected) == (8, 0)
    modalities = {key: row["modality"] for key, row in rows.items()}
    assert modalities == {
        ("clips/0.mp4", 0): "video",
        ("clips/0.mp4", 1): "video",
        ("just words.txt", 0): "text",
        **{(f"pictures/{number:04d}.png", 0): ("pair", "image")[number % 2] for number in range(6)},
    }
    for row in rows.values():
        assert (row["image_embedding"] is not None) == (row["modality"] != "text")
        assert (row["text_embedding"] is not None) == (row["modality"] in ("text", "pair"))
        assert all(unit(row[name]) for name in ("image_embedding", "text_embedding") if row[name])
    second = rows["clips/0.mp4", 1]
    assert (second["start_s"], second["end_s"]) == pytest.approx((2.0, 3.0), abs=0.11)
    assert rows["pictures/0002.png", 0]["caption"] == samples.SENTENCES[2]


@pytest.mark.medium
def test_vectors_are_those_of_the_query_encoder_and_do_not_depend_on_neighbours(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=40)
    config = make_run(source, batch_size=7)
    _, rows = embedded(config)
    store = embedder.open_store(config.store)
    for number in (0, 13, 39):
        path = source / "pictures" / f"{number:04d}.png"
        expected = store.encode_image([path])[0]
        assert np.allclose(rows[f"pictures/{number:04d}.png", 0]["image_embedding"], expected, atol=1e-5)
    expected = store.encode_text([samples.SENTENCES[4]])[0]
    assert np.allclose(rows["pictures/0004.png", 0]["text_embedding"], expected, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("num_stages", [2, 8])
def test_any_number_of_stages_gives_the_same_vectors(make_run, tmp_path, num_stages):
    source = samples.folder(tmp_path / "in", num_clips=1)
    _, whole = embedded(make_run(source, num_stages=1, store=str(tmp_path / "whole")))
    assert_same_vectors(embedded(make_run(source, num_stages=num_stages))[1], whole)


def test_bad_files_are_rejected_one_by_one_and_their_neighbours_are_not(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=4)
    whole = samples.image_bytes(9)
    (source / "truncated.png").write_bytes(whole[: len(whole) // 2])
    (source / "empty.jpg").write_bytes(b"")
    (source / "program.exe").write_bytes(b"MZ\x90\x00\x03\x00\x00\x00" * 99)
    (source / "truncated pair.png").write_bytes(whole[: len(whole) // 2])
    (source / "truncated pair.txt").write_text("a red car")
    (source / "really a picture.txt").write_bytes(whole)
    report, rows = embedded(make_run(source, max_reject_fraction=1))
    assert (report.num_items, report.num_rejected, report.other_files) == (8, 3, {".exe": 1})
    store = embedder.open_store(str(make_run(source).store))
    rejects = {row["item_id"]: row for row in store.rejects().to_pylist()}
    assert set(rejects) == {"truncated.png", "empty.jpg", "truncated pair.png"}
    for row in rejects.values():
        assert row["step"] in ("read", "decode")
        assert row["error_type"] and row["error"]
    pair = rows["truncated pair.png", 0]
    assert pair["image_embedding"] is None
    assert unit(pair["text_embedding"])
    assert unit(rows["really a picture.txt", 0]["image_embedding"])


@pytest.mark.medium
def test_a_second_run_embeds_only_what_is_new_or_changed_and_retires_nothing(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=6)
    config = make_run(source)
    first, before = embedded(config)
    (source / "pictures" / "0001.png").write_bytes(samples.image_bytes(77))
    (source / "pictures" / "0002.txt").write_text("another caption altogether")
    (source / "pictures" / "0003.png").unlink()
    (source / "new.png").write_bytes(samples.image_bytes(78))
    second, after = embedded(config)
    assert (second.num_new, second.num_changed, second.num_unchanged) == (1, 2, 3)
    fresh = {key for key, row in after.items() if row["run_id"] == second.run_id}
    assert fresh == {("pictures/0001.png", 0), ("pictures/0002.png", 0), ("new.png", 0)}
    assert after.keys() == before.keys() | {("new.png", 0)}
    assert all(after[key] == row for key, row in before.items() if key not in fresh)
    assert after["pictures/0001.png", 0]["image_embedding"] != before["pictures/0001.png", 0]["image_embedding"]
    assert after["pictures/0002.png", 0]["caption"] == "another caption altogether"
    assert first.run_id != second.run_id


def test_a_table_carries_its_columns_over_untouched(make_run, tmp_path):
    table = pa.table(
        {
            "sku": pa.array([11, 12, 13]),
            "photo": pa.array([samples.image_bytes(1), samples.image_bytes(2), None], pa.binary()),
            "title": ["a red car", None, "a blue bird"],
            "price": pa.array([1.5, None, 3.25]),
            "pixels": ["mine", "too", None],
        }
    )
    pq.write_table(table, tmp_path / "catalogue.parquet", row_group_size=2)
    columns = {"id": "sku", "image": "photo", "caption": "title"}
    source = {"path": str(tmp_path / "catalogue.parquet"), "columns": columns, "carryover": ["price", "pixels"]}
    _, rows = embedded(make_run([source]))
    assert {key[0]: (row["modality"], row["price"], row["pixels"]) for key, row in rows.items()} == {
        "11": ("pair", 1.5, "mine"),
        "12": ("image", None, "too"),
        "13": ("text", 3.25, None),
    }


def test_a_webdataset_tar_is_embedded_under_its_keys(make_run, tmp_path):
    captions = {f"k{number}.json": json.dumps({"caption": f"number {number}"}).encode() for number in range(3)}
    members = {f"k{number}.png": samples.image_bytes(number) for number in range(3)} | captions
    path = samples.write_tar(tmp_path / "shard.tar", dict(sorted(members.items(), reverse=True)))
    _, rows = embedded(make_run(path))
    assert {(key[0], row["caption"]) for key, row in rows.items()} == {
        (f"shard/k{number}", f"number {number}") for number in range(3)
    }
    store = embedder.open_store(make_run(tmp_path).store)
    expected = store.encode_image([samples.image_bytes(2)])[0]
    assert np.allclose(rows["shard/k2", 0]["image_embedding"], expected, atol=1e-5)


@pytest.mark.parametrize("missing", ["model", "store", "source"])
def test_what_is_needed_and_not_set_is_named(make_run, tmp_path, missing):
    config = make_run(tmp_path).model_copy(update={missing: None})
    with pytest.raises(ConfigError, match=f"no {missing}"):
        embed(config)


@pytest.mark.medium
def test_a_store_below_its_source_and_all_that_the_run_writes_there_are_never_items(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=3)
    names = {key: str(source / name) for key, name in OWN_FILES.items()}
    config = make_run(source, **names)
    report, _ = embedded(config)
    again = embed(config)
    assert all(Path(name).exists() for name in names.values())
    assert (report.num_items, again.num_unchanged, again.outcome) == (3, 3, "nothing to do")
    other = embed(make_run(source, store=str(tmp_path / "elsewhere")))
    assert (other.num_items, other.other_files) == (3, {"no suffix": 3}), "another run sees them, but nobody's store"


OWN_FILES = {"store": "a store", "log_file": "log", "runs_file": "deep/runs", "metrics_file": "metrics"}


def test_a_store_in_the_very_folder_of_its_source_is_refused_and_nothing_is_written(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=1)
    (tmp_path / "link").symlink_to(source)
    before = sorted(source.rglob("*"))
    for store in (source, tmp_path / "link", source / "pictures" / ".."):
        cure = f"this is the source.*put the store next to it, such as {os.path.normpath(store)}-store$"
        with pytest.raises(ConfigError, match=cure):
            embed(make_run(source, store=str(store)))
    assert sorted(source.rglob("*")) == before


def test_a_store_as_the_source_is_refused(make_run, tmp_path):
    store = tmp_path / "earlier"
    (store / "runs").mkdir(parents=True)
    (store / "store.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"source {store}: this is a store, which holds embeddings and no pictures"):
        embed(make_run(store))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("content", [b"%PDF-1.4 a letter", b"import os\n", b"PK\x03\x04 zipped"])
def test_a_single_file_that_is_no_item_is_the_users_mistake(make_run, tmp_path, content):
    (tmp_path / "letter.pdf").write_bytes(content)
    with pytest.raises(SourceError, match=r"letter.pdf: found .*; a source is an image, .*: check the path"):
        embed(make_run(tmp_path / "letter.pdf"))
    assert not (tmp_path / "store").exists()


@pytest.mark.medium
def test_the_times_of_a_run_are_those_that_the_next_one_is_told(make_run, tmp_path, tiny_model, said):
    source = samples.folder(tmp_path / "in", num_images=12)
    fingerprint = open_model(str(tiny_model)).fingerprint
    report = embed(make_run(source))
    times = measured_times(make_run(source).ray_address, fingerprint)["local"]
    assert min(times.startup_s, times.items_per_s, times.publish_s) > 0
    assert report.startup_s > 0
    few = samples.folder(tmp_path / "few", num_images=1, num_clips=0)
    for _ in range(2):
        embed(make_run(few, store=str(tmp_path / f"few-{_}")))
    corrected = measured_times(None, fingerprint)["local"]
    assert corrected.startup_s != times.startup_s, "a run of one item says how long a start takes"
    assert corrected.items_per_s == pytest.approx(times.items_per_s, rel=0.5), "and little of the rate"
    embed(make_run(source, store=str(tmp_path / "other"), engine="auto"))
    assert any(line.endswith("; the time in one process is from earlier runs here") for line in said)
