"""An update gives what a fresh build gives: the same rows, a recall as high; or it says that a build is needed."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from index_samples import Build, exact_rows, ids_of, make_ids, make_images_and_captions, make_vectors, share_found

from index.autotune import Meter
from index.constraints import Constraints
from index.ids import compare_ids
from index.index_errors import RebuildNeededError, RetrievalError
from index.manifest import Point
from index.recall import GroundTruth
from index.search import open_index
from index.update import update_index

KINDS = ("flat", "hnsw", "ivf", "LeanVec16,HNSW32,Flat", "IVF64,PQ16x4fs")
NUM_BEFORE, NUM_ADDED = 5000, 1000


def updated(build: Build, tmp_path: Path, kind: str, removed: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
    """An index of 5,000 images, without `removed`, with 1,000 more; and the images, and queries of their kind."""
    images, captions = make_images_and_captions(NUM_BEFORE + NUM_ADDED, 400)
    numbers = np.arange(len(images))
    before, _ = build(images[:NUM_BEFORE], ids=ids_of(numbers[:NUM_BEFORE]), kind=kind, queries=captions)
    added = (block for block in np.array_split(images[NUM_BEFORE:], 7))
    mask = np.isin(numbers[:NUM_BEFORE], removed)
    out = tmp_path / "index" / "000002"
    manifest = update_index(before, out, added, ids_of(numbers[NUM_BEFORE:]), mask, embeddings_version=8)
    index = open_index(out)
    assert index.manifest == manifest
    return index, images, captions


@pytest.mark.parametrize("num_rows", [11, 12])
def test_a_row_that_asks_for_its_neighbours_is_none_of_them_after_a_removal(
    build: Build, tmp_path: Path, num_rows: int
) -> None:
    images = make_vectors(num_rows, 8)
    before, _ = build(images, ids=ids_of(np.arange(num_rows)), kind="hnsw")
    removed = np.arange(num_rows) < 2
    out = tmp_path / "index" / "000002"
    made = update_index(before, out, images[:0], ids_of(np.arange(0)), removed, embeddings_version=8)
    assert made.recall_at_10 == 1.0


@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_added_is_found_and_what_was_removed_is_not_with_the_recall_it_tells(
    build: Build, tmp_path: Path, kind: str
) -> None:
    removed = np.arange(0, 1000)
    index, images, captions = updated(build, tmp_path, kind, removed)
    assert (len(index), index.manifest.num_rows, index.manifest.num_masked) == (5000, 6000, 1000)
    assert index.manifest.embeddings_version == 8
    numbers = np.array([int(item_id) for item_id in index.ids["item_id"].to_pylist()])
    left = np.setdiff1d(np.arange(6000), removed)
    held_out = captions[2::4]
    found = numbers[index.search(held_out, 10).rows]
    recall = share_found(found, exact_rows(held_out, images, among=left))
    assert not np.isin(found, removed).any()
    assert (found >= NUM_BEFORE).any()
    assert recall >= 0.94
    assert index.manifest.recall_at_10 == pytest.approx(recall, abs=0.003)  # its own vectors are rounded
    assert index.manifest.built_recall_at_10 >= 0.95
    assert numbers[index.search(images[left[::500]], 1, profile="image").rows[:, 0]].tolist() == left[::500].tolist()


@pytest.mark.parametrize(("loss", "are_kept"), [(0.004, True), (0.02, False)])
def test_a_recall_that_misses_by_chance_alone_costs_no_query_more_time(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: float, are_kept: bool
) -> None:
    images, captions = make_images_and_captions(NUM_BEFORE, 400)
    numbers = np.arange(NUM_BEFORE)
    before, manifest = build(images[:-10], ids=ids_of(numbers[:-10]), kind="hnsw", queries=captions)
    measured = Meter.point

    def lower(meter: Meter, ground_truth: GroundTruth, parameters: dict[str, int]) -> Point:
        point = measured(meter, ground_truth, parameters)
        recall = 0.95 - loss if parameters == manifest.parameters else max(0.96, point.recall_at_10)
        return point.model_copy(update={"recall_at_10": recall})

    monkeypatch.setattr(Meter, "point", lower)
    removed = np.zeros(NUM_BEFORE - 10, bool)
    out = tmp_path / "index" / "000002"
    made = update_index(before, out, images[-10:], ids_of(numbers[-10:]), removed, embeddings_version=8)
    assert (made.parameters == manifest.parameters) == are_kept


@pytest.mark.medium
def test_removing_the_very_answers_of_a_query_leaves_its_recall_true(build: Build, tmp_path: Path) -> None:
    """More than the kept exact neighbours of a query go at once: it is searched again."""
    images, captions = make_images_and_captions(NUM_BEFORE + NUM_ADDED, 400)
    nearest = np.argsort(-(captions[2] @ images[:NUM_BEFORE].T))[:200]
    index, _, _ = updated(build, tmp_path, "hnsw", nearest)
    live = np.flatnonzero(index.is_live)
    recall = share_found(index.search(captions[2::4], 10).rows, exact_rows(captions[2::4], images, among=live))
    assert index.manifest.recall_at_10 == pytest.approx(recall, abs=1e-9)


def test_updates_follow_each_other(build: Build, tmp_path: Path) -> None:
    vectors = make_vectors(900)
    numbers = np.arange(900)
    folder, _ = build(vectors[:300], ids=ids_of(numbers[:300]), kind="hnsw")
    gone = np.zeros(900, dtype=bool)
    for version, (start, removed) in enumerate([(300, [0, 1]), (400, [300, 2]), (500, [])], start=2):
        stop = start + 100
        gone[removed] = True
        changes = compare_ids(open_index(folder).ids, open_index(folder).is_live, ids_of(numbers[:stop][~gone[:stop]]))
        assert changes.num_removed == len(removed)
        rows = numbers[:stop][~gone[:stop]][changes.added]
        assert rows.tolist() == list(range(start, stop))
        out = tmp_path / "index" / f"{version:06d}"
        update_index(folder, out, vectors[rows], ids_of(rows), changes.removed, embeddings_version=version)
        folder = out
    index = open_index(folder)
    assert (len(index), index.manifest.num_masked, index.manifest.num_built) == (596, 4, 300)
    found = index.search(vectors[:600], 1).rows[:, 0]
    assert (found[~gone[:600]] == numbers[:600][~gone[:600]]).all()
    assert not np.isin(found, np.flatnonzero(gone)).any()


def test_nothing_to_do_binds_the_same_files_to_the_new_table(build: Build, tmp_path: Path) -> None:
    before, manifest = build(kind="hnsw")
    out = tmp_path / "index" / "000002"
    bound = update_index(before, out, [], make_ids(0), np.zeros(300, bool), embeddings_version=9)
    assert (bound.embeddings_version, bound.sha256) == (9, manifest.sha256)
    assert open_index(out).search(make_vectors(300)[:5], 1).rows[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("num_added", "num_removed", "message"),
    [(0, 80, "27 % of its rows would be masked; 25 % may be"), (310, 0, "built for 300 vectors and would hold 610")],
)
def test_too_much_change_asks_for_a_build(
    build: Build, tmp_path: Path, num_added: int, num_removed: int, message: str
) -> None:
    before, _ = build()
    out = tmp_path / "index" / "000002"
    with pytest.raises(RebuildNeededError, match=message):
        update_index(
            before,
            out,
            make_vectors(num_added, seed=5),
            make_ids(num_added, "run-2"),
            np.arange(300) < num_removed,
            embeddings_version=8,
        )
    assert not out.exists()


def test_vectors_that_the_index_was_not_made_for_ask_for_a_build(build: Build, tmp_path: Path) -> None:
    """Added vectors lie near one image, so a few lists fill and the others don't grow."""
    images, captions = make_images_and_captions(4000, 400)
    before, _ = build(images, kind="IVF64,Flat", queries=captions, constraints=Constraints(recall=0.9))
    noise = np.random.default_rng(0).standard_normal((3000, 64)) * 0.02
    near = images[:1] + noise
    near = (near / np.linalg.norm(near, axis=1, keepdims=True)).astype(np.float32)
    with pytest.raises(RebuildNeededError, match="fills few of its lists"):
        update_index(before, tmp_path / "2", near, make_ids(3000, "run-2"), np.zeros(4000, bool), embeddings_version=8)


def test_bad_additions_are_refused_and_leave_nothing(build: Build, tmp_path: Path) -> None:
    before, _ = build()
    out = tmp_path / "index" / "000002"
    for added, ids in [
        (make_vectors(3, 17), make_ids(3)),
        (make_vectors(3) * 2, make_ids(3)),
        (make_vectors(3), make_ids(2)),
    ]:
        with pytest.raises(RetrievalError):
            update_index(before, out, added, ids, np.zeros(300, bool), embeddings_version=8)
    assert [path.name for path in out.parent.iterdir()] == ["000001"]


def test_a_tampered_version_is_not_gone_on_from(build: Build, tmp_path: Path) -> None:
    before, _ = build()
    content = bytearray((before / "queries.npz").read_bytes())
    content[200] ^= 1
    (before / "queries.npz").write_bytes(bytes(content))
    with pytest.raises(RetrievalError, match="queries.npz: its sha256"):
        update_index(
            before, tmp_path / "2", make_vectors(3), make_ids(3, "run-2"), np.zeros(300, bool), embeddings_version=8
        )


def test_a_row_is_the_same_where_item_segment_and_run_are() -> None:
    before = make_ids(6, "run-1")
    now = pa.concat_tables([make_ids(6, "run-1").slice(2, 3), make_ids(1, "run-2"), ids_of(np.array([7]))])
    changes = compare_ids(before, np.array([True, True, True, True, True, False]), now)
    assert changes.removed.tolist() == [True, True, False, False, False, False]
    assert changes.added.tolist() == [3, 4]
    assert not compare_ids(before, np.ones(6, bool), before)


def test_rows_without_a_run_are_never_the_same() -> None:
    ids = make_ids(3).set_column(2, "run_id", pa.nulls(3, pa.string()))
    changes = compare_ids(ids, np.ones(3, bool), ids)
    assert (changes.num_removed, changes.added.tolist()) == (3, [0, 1, 2])


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_an_index_of_a_few_rows_grows_past_the_answers_that_it_keeps(build: Build, tmp_path: Path, kind: str) -> None:
    vectors = make_vectors(4)
    before, _ = build(vectors[:2], ids=ids_of(np.arange(2)), kind=kind)
    for number in (2, 3):
        out = tmp_path / "index" / f"{number:06d}"
        index = open_index(before)
        added = ids_of(np.arange(number, number + 1))
        update_index(before, out, vectors[number : number + 1], added, np.zeros(len(index), bool), embeddings_version=8)
        before = out
    assert sorted(open_index(before).search(vectors[:1], 4).rows[0].tolist()) == [0, 1, 2, 3]
