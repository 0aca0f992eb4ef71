"""A store that has an index keeps one: updated, else rebuilt, else exact; none goes live that finds too little."""

from pathlib import Path

import numpy as np
import pytest
from index_stores import DIM, NO_FIRST_INDEX, indexed_run, indexed_store, item, unit, vector_of
from store_samples import INFO
from store_states import build_store_index, new_store, rows_now

from embedder.config_toml.sections import IndexConfig
from embedder.errors import RunFailedError, StoreError
from embedder.retrieval.store_api import open_store
from embedder.store.layout import read_current
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.publish.publish import finish_publication
from embedder.store.tables.tables import RecordTable
from embedder.store_index import indexed_rows as index_rows
from embedder.store_index.build_or_update import IndexJob, make_index
from embedder.store_index.index_versions import list_manifests, manifest_of
from embedder.store_index.indexed_rows import IndexRows
from embedder.store_index.keep_index import index_builder, update_store_index
from index import build, faiss_build, update
from index.index_errors import ConstraintsMissedError, GateRefusedError

MODULES = {"build_index": build, "update_index": update}


@pytest.fixture
def files(tmp_path):
    return indexed_store(tmp_path / "store", kind="hnsw")


def assert_whole(files):
    """The index finds each published row first where its own vector asks, and nothing that is not published."""
    rows = {key: row["image_embedding"] for key, row in rows_now(files).items() if row["image_embedding"]}
    store = open_store(files.address)
    for key, vector in rows.items():
        best = store.search(np.array(vector, np.float32), 1)[0]
        assert (best.item_id, best.segment) == key
    everything = store.search(np.array(next(iter(rows.values())), np.float32), len(rows) + 50)
    assert {(hit.item_id, hit.segment) for hit in everything} == rows.keys()


def worse(monkeypatch, recall: float, *names: str, but: str = "none"):
    """Let what makes an index find less than it does, by its manifest; but for designs of one name."""

    def patched(make):
        def make_worse(*arguments, **options):
            manifest = make(*arguments, **options)
            return manifest if manifest.design == but else manifest.model_copy(update={"recall_at_10": recall})

        return make_worse

    for name in names:
        module = MODULES[name]
        monkeypatch.setattr(module, name, patched(getattr(module, name)))


def test_a_night_adds_and_masks_and_reads_no_vector_but_the_new(files, monkeypatch, said):
    read = []
    read_vectors = RecordTable._read_vectors

    def note(self, path, column, place=None):
        read.extend([path] if column == "image_embedding" else [])
        return read_vectors(self, path, column, place)

    monkeypatch.setattr(RecordTable, "_read_vectors", note)
    run = indexed_run(files, item(3, 1), item(200), item(201), retired=["0007.jpg"])
    assert said == ["index 2: updated, 3 added, 2 masked (1 % of its rows are)"]
    assert read and all(path.startswith(f"part-{run.run_id}-") and "rewrite" not in path for path in read)
    manifest = manifest_of(files, read_current(files).index)
    assert (manifest.num_vectors, manifest.num_rows, manifest.embeddings_version) == (201, 203, run.embeddings)
    assert_whole(files)


@pytest.mark.medium
def test_many_nights_end_in_what_a_comparison_with_every_vector_finds(files):
    for night in range(1, 6):
        changed = [item(number, night) for number in range(night, 200, 40)]
        indexed_run(files, *changed, item(200 + night), retired=[f"{night * 30:04d}.jpg"])
    assert manifest_of(files, read_current(files).index).num_masked > 0
    assert_whole(files)
    updated = answers(files)
    build_store_index(files, kind="flat")
    shared = [len(some & exact) for some, exact in zip(updated, answers(files), strict=True)]
    assert sum(shared) >= 0.95 * 10 * len(shared)


def answers(files) -> list[set]:
    """Ten items for each of 50 captions that no night wrote: what the index is tuned for is captions near a picture."""
    store = open_store(files.address)
    noise = [0.1 * vector_of(f"query {number}") for number in range(50)]
    asked = [unit(vector_of(f"{4 * number:04d}.jpg") + off) for number, off in enumerate(noise)]
    return [{hit.item_id for hit in store.search(query, 10)} for query in asked]


def test_where_no_vector_changed_the_index_is_bound_again_without_faiss(files, monkeypatch, said):
    for name in ("build_index", "update_index"):
        monkeypatch.setattr(MODULES[name], name, None)
    indexed_run(files, item(500, image_embedding=None, modality="text"))
    assert (read_current(files).index, said) == (1, ["index 1: kept, as no vector changed"])
    compact(files, PartTarget())
    assert update_store_index(files) == 1
    assert_whole(files)


def test_where_too_much_would_be_masked_it_is_rebuilt_and_says_why(files, said):
    indexed_run(files, retired=[f"{number:04d}.jpg" for number in range(80)])
    assert said[-1].startswith("index 2: rebuilt as ")
    assert "40 % of its rows would be masked" in said[-1]
    assert manifest_of(files, 2).num_masked == 0
    assert_whole(files)


@pytest.mark.medium
def test_another_kind_that_is_asked_for_is_built_and_the_same_is_updated(files, said):
    for kind, expected in (
        ("hnsw", "updated"),
        ("HNSW32,Flat", "updated"),
        ("flat", "rebuilt as Flat"),
        ("auto", "updated"),
    ):
        indexed_run(files, item(300 + len(said)), config=IndexConfig(kind=kind))
        assert expected in said[-1]
    indexed_run(files, item(400), config=IndexConfig(kind="HNSW16,Flat"))
    assert "rebuilt as HNSW16,Flat" in said[-1] and "index.kind = HNSW16,Flat is asked for" in said[-1]


def test_a_full_disk_is_told_in_a_line_by_hand_and_at_night(files, monkeypatch):
    write = faiss_build.write
    monkeypatch.setattr(faiss_build, "write", lambda index, path: write(index, Path("/dev/full")))
    for make in (build_store_index, lambda store: indexed_run(store, item(200))):
        with pytest.raises(StoreError, match="/index: no space left on device; free some space, and try again$"):
            make(files)
    assert read_current(files).index == 1


@pytest.mark.medium
def test_of_a_damaged_or_missing_index_another_is_built(files, said):
    path = files.folder / "index" / "000001" / "index.faiss"
    path.write_bytes(path.read_bytes()[:-1])
    indexed_run(files, item(200))
    assert "index 2: rebuilt" in said[-1] and "cut short" in said[-1]
    for info in list(files.list("index")):
        files.delete(info.path)
    indexed_run(files, item(201))
    assert "rebuilt" in said[-1] and "no index to continue from" in said[-1]
    assert_whole(files)


def test_vectors_of_another_model_are_never_added_to_an_index(files, said):
    other = INFO.model_copy(update={"model_fingerprint": "another"})
    wanted = IndexJob(files, read_current(files).embeddings, other, 1, IndexConfig())
    number = make_index(wanted)
    assert "rebuilt" in said[-1] and "of another model" in said[-1]
    assert manifest_of(files, number).model_fingerprint == "another"


def test_an_update_that_finds_too_little_is_rebuilt_and_a_rebuild_becomes_exact(files, monkeypatch, said):
    worse(monkeypatch, 0.5, "update_index")
    indexed_run(files, item(200))
    assert "rebuilt" in said[-1] and "recall@10 0.500" in said[-1]
    worse(monkeypatch, 0.5, "build_index", but="Flat")
    indexed_run(files, item(201), config=IndexConfig(kind="hnsw"))
    assert said[-1].startswith("index 3: exact; ")
    assert [number for number, _ in list_manifests(files)] == [1, 2, 3], "what was refused leaves nothing"
    assert_whole(files)


def test_a_drop_is_refused_where_the_floor_is_kept(files, monkeypatch, said):
    worse(monkeypatch, 0.95, "update_index")
    indexed_run(files, item(200))
    assert "rebuilt" in said[-1] and "below the" in said[-1]
    indexed_run(files, item(201), config=IndexConfig(max_drop=0.06))
    assert "updated" in said[-1]


@pytest.mark.medium
def test_where_nothing_passes_the_old_publication_stays_and_the_next_run_ends_the_new_one(files, monkeypatch):
    before = read_current(files)
    with pytest.raises(RunFailedError, match=r"index\.memory_bytes = 64 .* run the same command again"):
        indexed_run(files, item(200), config=IndexConfig(kind="hnsw", memory_bytes=64))
    assert read_current(files) == before
    assert [number for number, _ in list_manifests(files)] == [1]
    assert len(open_store(files.address).search(vector_of("query"), 500)) == 200
    done = finish_publication(files, index_builder())
    assert done.num_vectors == 201
    assert_whole(files)


def test_by_hand_what_finds_too_little_is_refused_and_force_passes_the_drop_alone(files, monkeypatch):
    with monkeypatch.context() as patch:
        worse(patch, 0.93, "build_index")
        with pytest.raises(GateRefusedError):
            build_store_index(files, kind="hnsw")
        assert read_current(files).index == 1
        number, _ = build_store_index(files, kind="hnsw", force=True)
        assert read_current(files).index == number
    worse(monkeypatch, 0.5, "build_index")
    with pytest.raises(GateRefusedError):
        build_store_index(files, kind="hnsw", force=True)
    build_store_index(files, kind="hnsw", force=True, config=IndexConfig(min_recall=0.4))


IMPOSSIBLE_MS = 1e-6


@pytest.mark.medium
def test_by_hand_the_nearest_is_published_where_none_keeps_the_limits_unless_the_last_finds_more(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "index.autotune.Meter._times_s", lambda _, run, given: [1e-5 for _ in given]
    )  # or chance says who is near
    files = indexed_store(tmp_path / "store", kind="flat")
    first, exact = read_current(files).index, manifest_of(files, read_current(files).index)
    wanted = IndexConfig(latency_ms=IMPOSSIBLE_MS, min_recall=0.1)
    number, nearest = build_store_index(files, config=wanted, force=True)
    assert nearest.missed and f"latency_ms = {IMPOSSIBLE_MS:g}" in nearest.missed
    assert (exact.missed, read_current(files).index) == (None, number)
    number, again = build_store_index(files, config=wanted)
    assert again.missed and again.recall_at_10 >= nearest.recall_at_10
    assert read_current(files).index == number > first


@pytest.mark.medium
def test_the_nearest_is_refused_where_what_is_published_of_the_same_rows_finds_more(files, monkeypatch):
    worse(monkeypatch, 0.985, "build_index")
    with pytest.raises(GateRefusedError, match="no design keeps the constraints; .* finds more, recall@10 .* stays"):
        build_store_index(files, config=IndexConfig(latency_ms=IMPOSSIBLE_MS))
    assert read_current(files).index == 1
    number, _ = build_store_index(files, config=IndexConfig(latency_ms=IMPOSSIBLE_MS), force=True)
    assert read_current(files).index == number


def test_by_hand_the_last_is_kept_or_the_build_fails_where_none_keeps_the_limits(files, said):
    kept = IndexConfig(latency_ms=IMPOSSIBLE_MS, on_missed="keep")
    assert build_store_index(files, config=kept) == (1, manifest_of(files, 1))
    assert said[-1].startswith("index: none of ") and said[-1].endswith("index 1 stays published")
    with pytest.raises(ConstraintsMissedError, match=f"keeps recall = 0.95, latency_ms = {IMPOSSIBLE_MS:g}"):
        build_store_index(files, config=IndexConfig(latency_ms=IMPOSSIBLE_MS, on_missed="fail"))
    assert (read_current(files).index, [number for number, _ in list_manifests(files)]) == (1, [1])


@pytest.mark.parametrize(
    ("on_missed", "expected"),
    [("publish", "no design keeps the constraints, and this one misses "), ("keep", "index 2: exact; ")],
)
def test_a_night_whose_rebuild_misses_the_limits_has_its_index_and_says_so(files, said, on_missed, expected):
    config = IndexConfig(latency_ms=IMPOSSIBLE_MS, on_missed=on_missed)
    indexed_run(files, retired=[f"{number:04d}.jpg" for number in range(80)], config=config)
    assert expected in said[-1]
    assert read_current(files).index == 2
    assert_whole(files)


def test_a_night_that_is_to_fail_where_the_limits_are_missed_publishes_nothing(files):
    before = read_current(files)
    config = IndexConfig(latency_ms=IMPOSSIBLE_MS, on_missed="fail")
    with pytest.raises(RunFailedError, match="latency_ms = 1e-06; the nearest, .* what was published stays"):
        indexed_run(files, retired=[f"{number:04d}.jpg" for number in range(80)], config=config)
    assert read_current(files) == before


def test_an_update_by_hand_does_nothing_where_the_index_holds_what_is_published(files, tmp_path):
    assert update_store_index(files) == 1
    empty = new_store(tmp_path / "empty")
    indexed_run(empty, item(1), config=NO_FIRST_INDEX)
    with pytest.raises(StoreError, match="embedder index build"):
        update_store_index(empty)


def test_rows_without_a_picture_are_in_no_index_and_move_no_number(tmp_path):
    files = new_store(tmp_path / "store")
    texts = [item(number, image_embedding=None, modality="text") for number in (1, 4, 5)]
    pictures = [item(number) for number in (0, 2, 3, 6, 7)]
    indexed_run(files, *sorted([*texts, *pictures], key=lambda each: each["item_id"]))
    rows = IndexRows(files, read_current(files).embeddings)
    ids = rows.ids["item_id"].to_pylist()
    assert sorted(ids) == [each["item_id"] for each in pictures]
    every = np.concatenate(list(rows.vectors()))
    assert every.shape == (5, DIM)
    for number, item_id in enumerate(ids):
        assert np.array_equal(every[number], vector_of(item_id))
    some = np.array([0, 2, 4])
    assert np.array_equal(np.concatenate(list(rows.vectors_at(some))), every[some])


def test_queries_come_from_files_all_over_the_table_and_from_no_more_than_it_takes(files, monkeypatch):
    for night in range(1, 4):
        indexed_run(files, *(item(1000 * night + number) for number in range(10)))
    rows = IndexRows(files, read_current(files).embeddings)
    assert rows.queries().shape == (230, DIM)
    monkeypatch.setattr(index_rows, "MAX_RECALL_QUERIES", 12)
    monkeypatch.setattr(index_rows, "NUM_QUERY_FILES", 4)
    read = []
    read_vectors = RecordTable._read_vectors

    def note(self, path, column, place=None):
        read.append(path)
        return read_vectors(self, path, column, place)

    monkeypatch.setattr(RecordTable, "_read_vectors", note)
    assert rows.queries().shape == (12, DIM)
    assert len(read) == 4
    assert len({path.split("-")[2] for path in read}) > 2, "of several nights"
