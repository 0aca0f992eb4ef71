"""Mapped rows next to the index: the answers of the tables; used only if whole; purged and vacuumed."""

import dataclasses
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from index_stores import indexed_run, indexed_store, item, vector_of
from search_stores import QUERY, ids, picture, searchable, video
from store_samples import INFO, begin, table
from store_states import build_store_index

import embedder
from embedder.config_toml.sections import IndexConfig
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.vacuum import vacuum
from embedder.retrieval.row_files import NAMES, NUMBERS_NAME, ROWS_NAME, DamagedCopyError, check_files
from embedder.retrieval.snapshot import FileCheck, Snapshot
from embedder.retrieval.store_api import keep_row_files, open_store
from embedder.store.journal.part_writer import write_part
from embedder.store.layout import read_current
from embedder.store.lock import write_lock
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.interim import UnpublishedWork
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import InterimWork, PublishIntent, publish, publish_interim
from embedder.store.tables.row_folders import ROWS_FOLDER, rows_path
from embedder.store.tables.tables import RecordTable
from embedder.store_index.keep_index import DEFAULT_INDEX_CONFIG, index_builder, index_choice
from index.checked_files import NUM_SAMPLES, SAMPLE_BYTES, hash_samples
from index.index_errors import RetrievalError
from index.manifest import MANIFEST_NAME
from index.search import open_index

WHERES = ("price > 2", "category = 'sea' AND has_picture", "file_size = 10 OR segment > 0", "file_name = 'v'", "false")


@pytest.fixture(autouse=True)
def for_few_rows(monkeypatch, tmp_path):
    """Small stores have row files, too."""
    monkeypatch.setattr("embedder.retrieval.row_files.MIN_ROWS", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def varied(folder):
    """Pictures, a video and a caption without a picture; carried columns."""
    rows = [*(picture(f"{n}.png", 7 * n, caption=f"sea {n}") for n in range(9)), *video("v", 3, 11, 90)]
    rows.append(picture("broken.png", 0, image_embedding=None, text_embedding=[1.0, 0.0], caption="a boat"))
    kinds = ["sea", "land", None]
    return searchable(
        folder, *rows, price=[float(n) for n in range(13)], category=[kinds[n % 2] for n in range(12)] + [None]
    )


def keep(store):
    with write_lock(store.files):
        keep_row_files(store.files)
    return store.files.folder / rows_path(read_current(store.files))


def from_tables(store):
    """The same store as it is searched without row files."""
    other = open_store(store.files.address)
    vars(other.searcher)["snapshot"] = Snapshot(
        other.files, other.current, other.info, other.searcher.snapshot._models, from_tables=True
    )
    return other


def plain(hits) -> list[dict]:
    return [dataclasses.asdict(hit) for hit in hits]


def test_hits_conditions_and_items_are_those_of_the_tables(tmp_path):
    store = varied(tmp_path / "s")
    folder = keep(store)
    other, mapped = from_tables(store), open_store(store.files.address)
    other.prepare()
    for where in (None, *WHERES):
        for options in ({}, {"group": False}, {"fold": 0.99}):
            assert plain(mapped.search(QUERY, 20, where=where, **options)) == plain(
                other.search(QUERY, 20, where=where, **options)
            ), (where, options)
    ours, theirs = mapped.searcher.snapshot, other.searcher.snapshot
    assert ours.mapped is not None
    assert ours.mapped.folder == folder
    assert theirs.mapped is None
    assert ours.metadata.carried == theirs.metadata.carried
    assert ours.metadata.filter.columns == theirs.metadata.filter.columns
    assert (ours.is_found == theirs.is_found).all()
    for item_id in ("3.png", "v", "broken.png", "none"):
        assert ours.metadata.ids.rows(item_id).tolist() == theirs.metadata.ids.rows(item_id).tolist()
        assert ours.embedded_files.of(item_id, "/p", "image") == theirs.embedded_files.of(item_id, "/p", "image")
    read = ["folder", "file_date", "file_size", "price"]
    assert ours.metadata.filter.read(read).equals(theirs.metadata.filter.read(read))


def test_a_search_reads_neither_tables_nor_ids(tmp_path, monkeypatch):
    keep(store := varied(tmp_path / "s"))
    monkeypatch.setattr(RecordTable, "read", None)
    monkeypatch.setattr("index.search.read_contents", None)
    opened = open_store(store.files.address)
    assert ids(opened.search(QUERY, 2, where="price < 8")) == ["0.png", "1.png"]
    assert opened.search(QUERY, 1, where="segment = 2")[0].item_id == "v"


@pytest.mark.parametrize("harm", ["lost", "cut", "foreign", "no manifest", "bad manifest", "fewer rows"])
def test_files_that_can_not_be_used_are_made_anew_in_the_cache(tmp_path, harm):
    store = varied(tmp_path / "s")
    folder = keep(store)
    if harm == "lost":
        (folder / NUMBERS_NAME).unlink()
    elif harm == "cut":
        (folder / ROWS_NAME).write_bytes((folder / ROWS_NAME).read_bytes()[:-9])
    elif harm == "foreign":
        other = keep(searchable(tmp_path / "other", picture("x.png", 1), picture("y.png", 2)))
        (folder / ROWS_NAME).write_bytes((other / ROWS_NAME).read_bytes())
    elif harm == "no manifest":
        (folder / MANIFEST_NAME).unlink()
    elif harm == "bad manifest":
        (folder / MANIFEST_NAME).write_text("{}")
    else:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        (folder / MANIFEST_NAME).write_text(json.dumps(manifest | {"num_rows": 12}))
    opened = open_store(store.files.address)
    assert plain(opened.search(QUERY, 20)) == plain(from_tables(store).search(QUERY, 20))
    assert opened.searcher.snapshot.mapped.folder.is_relative_to(tmp_path / "cache")
    again = open_store(store.files.address).searcher.snapshot.mapped
    assert again.folder == opened.searcher.snapshot.mapped.folder
    (again.folder / ROWS_NAME).write_bytes(b"")
    assert ids(open_store(store.files.address).search(QUERY, 1)) == ["0.png"], "a damaged copy is replaced"


def test_an_older_store_is_searched_and_gets_its_files_with_the_next_command(tmp_path):
    store = varied(tmp_path / "s")
    shutil.rmtree(store.files.folder / ROWS_FOLDER)
    assert ids(store.search(QUERY, 1)) == ["0.png"]
    assert store.searcher.snapshot.mapped.folder.is_relative_to(tmp_path / "cache")
    folder = keep(store)
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {*times} == {*NAMES, MANIFEST_NAME}
    assert keep(store) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == times, "nothing changed"


def test_samples_tell_a_file_of_another_size_or_with_another_end(tmp_path):
    path = tmp_path / "file"
    content = bytearray(np.random.default_rng(0).bytes(1 << 20))
    path.write_bytes(content)
    known = hash_samples(path)
    for at in (0, 65_535, 65_536, len(content) - 1):
        changed = content.copy()
        changed[at] ^= 1
        path.write_bytes(changed)
        assert hash_samples(path) != known, at
    path.write_bytes(content[:-1])
    assert hash_samples(path) != known
    path.write_bytes(content + b"\0")
    assert hash_samples(path) != known
    assert NUM_SAMPLES * SAMPLE_BYTES < 64 << 10


def alter_between_samples(path) -> None:
    """Change a byte of a long file that no sample has."""
    known, content = hash_samples(path), bytearray(path.read_bytes())
    for at in range(len(content) // 2, len(content), 4096):
        content[at] ^= 1
        path.write_bytes(content)
        if hash_samples(path) == known:
            return
        content[at] ^= 1
    raise AssertionError("the file is too short")


def large_store(folder):
    """A store whose index is long enough to have bytes between the samples, published twice."""
    files = indexed_store(folder, 4000, kind="flat")
    indexed_run(files, item(9000), config=IndexConfig(kind="flat"))
    with write_lock(files):
        keep_row_files(files)
    return files


@pytest.mark.medium
def test_an_altered_byte_is_found_behind_the_first_answers_and_the_publication_before_is_served(tmp_path):
    files = large_store(tmp_path / "s")
    current = read_current(files)
    alter_between_samples(files.folder / "index" / f"{current.index:06d}" / "index.faiss")
    errors = []
    with embedder.follow_store(files.address, every_s=3600, on_error=errors.append) as store:
        assert store.publication.run_id == current.run_id, "sizes and samples are as they were"
        assert isinstance(store.find_damage(30), RetrievalError)
        assert store.look()
        assert store.publication.run_id == current.previous
        assert "altered or cut short" in str(store.last_error)
        assert [str(each) for each in errors] == [str(store.last_error)]
        query = vector_of("0007.jpg")
        assert store.search(query, 1)[0].item_id == "0007.jpg"
        assert not store.look(), "what was altered is not served again"
        assert store.last_error is not None
        build_store_index(files)
        assert store.look()
        assert store.publication.run_id == current.run_id
        assert store.last_error is None


@pytest.mark.medium
def test_an_altered_copy_in_the_cache_is_made_anew_and_the_same_publication_is_served(tmp_path):
    files = large_store(tmp_path / "s")
    shutil.rmtree(files.folder / ROWS_FOLDER)
    copy = open_store(files.address).searcher.snapshot.mapped.folder
    alter_between_samples(copy / ROWS_NAME)
    with embedder.follow_store(files.address, every_s=3600) as store:
        run_id = store.publication.run_id
        assert isinstance(store.find_damage(30), DamagedCopyError)
        assert store.look()
        assert store.publication.run_id == run_id
        assert store.find_damage(30) is None
        assert store.last_error is None
        assert store.search(vector_of("0007.jpg"), 1)[0].item_id == "0007.jpg"


@pytest.mark.medium
def test_a_file_that_is_gone_after_it_was_opened_is_no_damage(tmp_path):
    files = large_store(tmp_path / "s")
    with embedder.follow_store(files.address, every_s=3600) as store:
        _ = store.searcher.snapshot.mapped
        shutil.rmtree(files.folder / ROWS_FOLDER)
        check = FileCheck(partial(check_files, store.searcher.snapshot.mapped, files.folder, {}))
        assert check.wait(30)
        assert check.problem is None
        assert store.searcher.snapshot.checked_bytes == 0


@pytest.mark.medium
def test_processes_that_make_the_copy_at_the_same_time_share_one(tmp_path):
    files = large_store(tmp_path / "s")
    shutil.rmtree(files.folder / ROWS_FOLDER)
    with ThreadPoolExecutor(4) as pool:
        opened = [*pool.map(lambda _: open_store(files.address).searcher.snapshot.mapped, range(4))]
    assert len({each.folder for each in opened}) == 1
    assert (opened[0].folder / ROWS_NAME).exists()


def test_an_altered_byte_without_a_publication_before_is_told_and_served_on(tmp_path):
    store = varied(tmp_path / "s")
    folder = keep(store)
    with embedder.follow_store(store.files.address, every_s=3600) as following:
        following.find_damage(30)
        assert following.last_error is None
        check = following.searcher.snapshot.check
        check.problem = RetrievalError(f"{folder}: altered")
        assert not following.look()
        assert following.last_error is check.problem
        assert ids(following.search(QUERY, 1)) == ["0.png"]


def test_a_purge_leaves_no_trace_in_them(tmp_path):
    files = indexed_store(tmp_path / "s", 60, kind="flat")
    one = item(50)
    with write_lock(files):
        keep_row_files(files)
        held = [one["item_id"].encode() in files.read(info.path) for info in files.list(ROWS_FOLDER)]
        assert any(held), "so that it can fail"
        purge(files, [one["item_id"]], index_choice(files, reuse=False))
        assert list(files.list(ROWS_FOLDER)) == []
        keep_row_files(files)
    assert all(one["item_id"].encode() not in files.read(info.path) for info in files.list(ROWS_FOLDER))
    assert open_store(files.address).search(vector_of(one["item_id"]), 60)[0].item_id != one["item_id"]


def test_a_vacuum_keeps_those_of_kept_publications_and_a_rollback_finds_its_own(tmp_path):
    files = indexed_store(tmp_path / "s", 60, kind="flat")
    first = keep(open_store(files.address))
    for night in range(3):
        indexed_run(files, item(100 + night))
        last = keep(open_store(files.address))
    assert any(first.iterdir())
    with write_lock(files):
        vacuum(files, keep_days=0, keep_versions=1)
    assert {info.path.rsplit("/", 1)[0] for info in files.list(ROWS_FOLDER)} == {f"{ROWS_FOLDER}/{last.name}"}
    indexed_run(files, item(200))
    with write_lock(files):
        rollback(files, None, index_choice(files))
    keep(open_store(files.address))
    opened = open_store(files.address)
    assert opened.searcher.snapshot.mapped.folder.is_relative_to(files.folder)
    assert len(opened.search(vector_of("0001.jpg"), 100)) == 63


@pytest.mark.parametrize("kind", ["IVF8,Flat", "IVF8,SQ8", "LeanVec8,IVF8,SQfp16"])
def test_vectors_of_lists_are_found_by_noted_places_without_a_map_of_all_rows(tmp_path, kind, monkeypatch):
    files = indexed_store(tmp_path / "s", 400, kind=kind)
    indexed_run(files, item(3, night=1), item(900), retired=[item(7)["item_id"]])
    keep(open_store(files.address))
    theirs = from_tables(open_store(files.address)).searcher.snapshot.vectors
    every = np.arange(len(theirs.is_live))[::-1]
    expected = theirs.vectors(every)
    monkeypatch.setattr("faiss.IndexIVF.make_direct_map", None)
    ours = open_store(files.address).searcher.snapshot.vectors
    assert (ours.vectors(every) == expected).all()
    assert ours.dim == theirs.dim == expected.shape[1]
    assert ours.vectors(every[:0]).shape == (0, ours.dim)


@pytest.mark.parametrize("place", [-1, 400, 1 << 30, None], ids=["none", "past the end", "far", "another row's"])
def test_a_foreign_place_is_an_error_and_never_another_rows_vector(tmp_path, place):
    files = indexed_store(tmp_path / "s", 400, kind="IVF8,Flat")
    keep(open_store(files.address))
    snapshot = open_store(files.address).searcher.snapshot
    places = snapshot.mapped.places.copy()
    places[5] = places[6] if place is None else place
    opened = open_index(
        files.folder / "index" / "000001", samples=snapshot.mapped.manifest.index_samples, places=places
    )
    assert (opened.vectors(np.array([4, 6])) == snapshot.vectors.vectors(np.array([4, 6]))).all()
    with pytest.raises(RetrievalError, match="row 5 of the index is not at its place"):
        opened.vectors(np.array([4, 5]))


def test_places_of_an_index_without_lists_are_left_alone(tmp_path):
    files = indexed_store(tmp_path / "s", 60, kind="flat")
    folder = files.folder / "index" / "000001"
    opened = open_index(folder, samples={}, places=np.full(60, 7, np.int32))
    assert (opened.vectors(np.arange(60)) == open_index(folder).vectors(np.arange(60))).all()
    assert opened.places() is None


def test_row_files_of_earlier_releases_have_no_places_and_are_searched(tmp_path, monkeypatch):
    files = indexed_store(tmp_path / "s", 400, kind="IVF8,Flat")
    with monkeypatch.context() as patched:
        patched.setattr("index.search.Index.places", lambda index: None)
        build_store_index(files, kind="IVF8,Flat")
        keep(open_store(files.address))
    store = open_store(files.address)
    assert store.searcher.snapshot.mapped.places is None
    assert store.search(vector_of("0007.jpg"), 3, fold=0.99)[0].item_id == "0007.jpg"


def test_a_publication_of_a_run_that_goes_on_writes_none_and_is_searched_by_the_tables(tmp_path):
    files = indexed_store(tmp_path / "s", 60, kind="flat")
    before = keep(open_store(files.address))
    with write_lock(files):
        run, metadata = begin(files)
        write_part(files, metadata, 0, table(item(900), item(7, night=1)))
        work = UnpublishedWork(run, pa.chunked_array([[]], pa.string()))
        intent = PublishIntent(kind="refresh", info=INFO)
        publish_interim([InterimWork(run, work.next(), metadata, intent)], index_builder(DEFAULT_INDEX_CONFIG))
        keep_row_files(files)
    opened = open_store(files.address)
    assert opened.search(vector_of("0900.jpg"), 1)[0].item_id == "0900.jpg"
    assert opened.search(vector_of("0007.jpg", 1), 1, where="modality = 'image'")[0].item_id == "0007.jpg"
    assert opened.searcher.snapshot.mapped is None
    assert [*before.parent.iterdir()] == [before]
    assert not (tmp_path / "cache" / "embedder" / "indexes").exists()
    with write_lock(files):
        publish([ModelWork(run, metadata, intent)], index_builder(DEFAULT_INDEX_CONFIG))
    last = keep(open_store(files.address))
    assert open_store(files.address).searcher.snapshot.mapped.folder == last != before
