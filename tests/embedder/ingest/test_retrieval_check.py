"""The sample that a run keeps gives the next run what the whole table would."""

import numpy as np
import pyarrow as pa
import pytest
from store_samples import begin, reject, row, table
from store_states import new_store

from embedder.ingest import retrieval_check
from embedder.ingest.retrieval_check import forget_pairs, sample_pairs
from embedder.ingest.run_result import count_run
from embedder.plugins.maintain.purge.purge_plan import plan_purge
from embedder.plugins.maintain.vacuum import vacuum
from embedder.store.journal.part_writer import write_part
from embedder.store.layout import PAIRS_FILE, read_current, run_file
from embedder.store.maintenance.compact import compact
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import publish
from embedder.store.tables.tables import RecordTable

WIDTH = 4


@pytest.fixture(params=[6, 40, 2048])
def num_pairs(monkeypatch, request):
    """Samples that are much smaller than the store, about as large, and larger than it ever gets."""
    monkeypatch.setattr(retrieval_check, "NUM_PAIRS", request.param)


def item(rng, number, version):
    """One item: mostly a pair, else only a caption or an image, or one that can't be read."""
    sides = {f"{side}_embedding": rng.normal(size=WIDTH).astype(np.float32).tolist() for side in ("image", "text")}
    changes = {"modified": version, "content_version": f"{number}-{version}"}
    kind = rng.choice(["pair", "pair", "pair", "image", "text", "reject"])
    if kind == "reject":
        return reject(f"i{number:03d}", **changes)
    if kind != "pair":
        sides["image_embedding" if kind == "text" else "text_embedding"] = None
    caption = None if kind == "image" else "words"
    return row(f"i{number:03d}", modality=kind, caption=caption, **changes, **sides)


def night(files, rows, retired=(), *, publishes=True):
    """A run over some rows; the sample that it draws with and without the one that is kept."""
    run, metadata = begin(files)
    if rows:
        write_part(files, metadata, 0, table(*rows))
    gone = pa.chunked_array([list(retired)], pa.string())
    result = count_run(run, read_current(files), gone)
    found = sample_pairs(result)
    if publishes:
        publish([ModelWork(run, metadata, retired=gone)])
        forget_pairs(result)
    return run, result, found


def sampled(found):
    return [found.images.tolist(), found.texts.tolist()]


@pytest.mark.medium
@pytest.mark.usefixtures("num_pairs")
@pytest.mark.parametrize("seed", range(4))
def test_any_nights_give_the_sample_of_the_whole_table(tmp_path, seed):
    rng = np.random.default_rng(seed)
    whole, kept = new_store(tmp_path / "whole"), new_store(tmp_path / "kept")
    for version in range(6):
        numbers = rng.choice(120, size=rng.integers(1, 80), replace=False)
        rows = [item(rng, int(number), f"t{version}") for number in numbers[5:]]
        retired = [f"i{number:03d}" for number in numbers[:5]] if version else []
        if rng.random() < 0.3 and version:
            compact(kept)
        found = [night(files, rows, retired)[2] for files in (kept, whole)]
        for run_id in whole.folders("runs"):
            whole.delete(run_file(run_id, PAIRS_FILE))
        assert sampled(found[0]) == sampled(found[1])


def pairs(num, first=0):
    rng = np.random.default_rng(first)
    vectors = rng.normal(size=(num, WIDTH)).astype(np.float32)
    return [
        row(f"i{first + place:03d}", modality="pair", caption="words", image_embedding=each, text_embedding=each)
        for place, each in enumerate(vectors.tolist())
    ]


def test_the_published_vectors_are_not_read_again(files, monkeypatch):
    night(files, pairs(100))
    read = []
    own_read = RecordTable.read
    monkeypatch.setattr(
        RecordTable, "read", lambda table, *args, **named: read.append(1) or own_read(table, *args, **named)
    )
    _, _, found = night(files, pairs(5, first=100), publishes=False)
    assert len(found) == 105
    assert not read


def test_one_sample_is_kept_and_a_vacuum_leaves_it(files):
    night(files, pairs(100))
    last, _, _ = night(files, pairs(5, first=100))
    vacuum(files, keep_days=0, keep_versions=1)
    assert samples_in(files) == [run_file(last.run_id, PAIRS_FILE)]


def test_a_vacuum_deletes_the_sample_of_a_run_that_was_given_up(files):
    night(files, pairs(20))
    last, _, _ = night(files, pairs(5, first=20))
    night(files, pairs(5, first=25), publishes=False)
    vacuum(files, keep_days=0)
    assert len(samples_in(files)) == 2, "it may be gone on with"
    rollback(files, None, lambda version: None)
    vacuum(files, keep_days=0)
    assert samples_in(files) == [run_file(last.run_id, PAIRS_FILE)]


def samples_in(files):
    return sorted(info.path for info in files.list("runs") if info.path.endswith(PAIRS_FILE))


@pytest.mark.parametrize("damage", ["cut short", "another table", "no bound"])
def test_after_a_damage_the_whole_table_is_sampled(files, damage):
    run, _, _ = night(files, pairs(100))
    path = run_file(run.run_id, PAIRS_FILE)
    if damage == "cut short":
        files.write(path, files.read(path)[:300])
    else:
        rows = pa.table({"item_id": ["a"]}) if damage == "another table" else files.read_table(path)
        files.write_table(path, rows.replace_schema_metadata(None))
    assert len(night(files, pairs(5, first=100))[2]) == 105


def test_a_night_that_changes_no_vector_hands_the_sample_on(files):
    night(files, pairs(100))
    run, metadata = begin(files)
    result = count_run(run, read_current(files), pa.chunked_array([[]], pa.string()))
    publish([ModelWork(run, metadata)])
    forget_pairs(result)
    assert samples_in(files) == [run_file(run.run_id, PAIRS_FILE)]


def test_a_purge_deletes_the_sample_that_holds_the_item(files):
    run, _, _ = night(files, pairs(10))
    assert run_file(run.run_id, PAIRS_FILE) in {info.path for info in plan_purge(files, ["i003"]).deleted}
