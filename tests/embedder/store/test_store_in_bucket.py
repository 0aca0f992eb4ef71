"""Stores on `s3://`: the same store as on a disk, read by others, without requests that are not needed."""

import pickle
import secrets

import duckdb
import polars
import pyarrow as pa
import pytest
import samples
from bucket_server import KEY, SECRET
from embedding_runs import embedded
from store_samples import INFO, begin, publish_rows, row, table
from store_states import build_store_index

import embedder
from embedder.errors import ConfigError, StoreError
from embedder.ingest.embed import embed
from embedder.storage import model_download
from embedder.storage.object_ranges import PIECE_BYTES
from embedder.storage.object_stores import open_place
from embedder.store.backends import WriteConflictError
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import store_part, write_part
from embedder.store.layout import read_current
from embedder.store.store_info import bind_store
from embedder.store.tables.tables import RecordTable
from embedder.store_index import index_versions as versions
from embedder.store_index.index_versions import list_manifests
from index.index_errors import RetrievalError

SAME = ("modality", "uri", "caption", "content_version", "model_fingerprint", "preprocess_fingerprint")
SAME += ("image_embedding", "text_embedding", "start_s", "end_s")


@pytest.fixture
def files(bucket):
    return StoreFiles(f"{bucket}/a folder/störe")


def objects_of(files) -> dict[str, bytes]:
    """Objects that any client sees in the bucket."""
    store = open_place(files.address)
    return {each["path"]: bytes(store.get(each["path"]).bytes()) for page in store.list() for each in page}


@pytest.mark.medium
def test_source_model_and_store_may_all_lie_in_buckets(make_run, bucket, tiny_model, tmp_path):
    source, there = samples.folder(tmp_path / "in", num_images=4), StoreFiles(f"{bucket}/everything")
    for path in [*source.rglob("*.*"), *tiny_model.iterdir()]:
        root, name = (source, "in") if path.is_relative_to(source) else (tiny_model, "model")
        there.upload(path, f"{name}/{path.relative_to(root)}")
    _, expected = embedded(make_run(source))
    model, store = there.uri("model"), there.uri("store")
    _, found = embedded(make_run([{"path": there.uri("in")}], model=model, store=store))
    assert found.keys() == expected.keys()
    for key, each in expected.items():
        for name in ("image_embedding", "text_embedding", "caption", "content_version"):
            assert found[key][name] == each[name]
    assert embedder.open_store(store).search("a red car", k=1)[0].uri.startswith(there.uri("in"))
    before = {info.path for info in there.list("")}
    with pytest.raises(ConfigError, match="this is the source"):
        embedded(make_run([{"path": there.uri("in")}], model=model, store=there.uri("in")))
    assert {info.path for info in there.list("")} == before, "a command that refuses writes nothing"


@pytest.mark.medium
def test_a_store_below_its_source_in_a_bucket_is_never_listed(make_run, bucket, tmp_path):
    source, there = samples.folder(tmp_path / "in", num_images=3), StoreFiles(f"{bucket}/in")
    for path in source.rglob("*.*"):
        there.upload(path, str(path.relative_to(source)))
    for store in ("one", "deep/two"):
        config = make_run([{"path": there.uri("")[:-1]}], store=there.uri(store))
        report, rows = embedded(config)
        assert (report.num_items, len(rows)) == (3, 3)
        assert embed(config).outcome == "nothing to do"


@pytest.mark.medium
def test_an_index_in_a_bucket_is_searched_from_a_copy_that_is_checked(make_run, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = make_run(samples.folder(tmp_path / "in"), store=f"{bucket}/store")
    embedded(config)
    files = StoreFiles(config.store)
    assert read_current(files).index == 1
    expected = embedder.open_store(config.store).search("two cats", k=3)
    (copy,) = (path for path in (tmp_path / "cache" / "embedder" / "indexes").iterdir())
    (copy / "index.faiss").write_bytes(b"damaged on this machine")
    assert embedder.open_store(config.store).search("two cats", k=3) == expected  # fetched again
    (copy / "manifest.json").unlink()  # as what cleans caches may do
    assert embedder.open_store(config.store).search("two cats", k=3) == expected
    monkeypatch.setenv("XDG_CACHE_HOME", str(copy / "index.faiss"))
    with pytest.raises(StoreError, match=r"indexes: no copy of s3.*000001 can be kept there .*XDG_CACHE_HOME$"):
        embedder.open_store(config.store).search("two cats", k=3)  # torch encodes it, without a copy of the towers
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # What is damaged in the store itself is refused, however it was fetched.
    versions.shutil.rmtree(copy)
    files.write("index/000001/index.faiss", files.read("index/000001/index.faiss") + b"x")
    with pytest.raises(RetrievalError, match="sha256"):
        embedder.open_store(config.store).search("two cats", k=3)
    assert build_store_index(files)[0] == 2
    assert [number for number, _ in list_manifests(files)] == [1, 2]
    assert embedder.open_store(config.store).search("two cats", k=3) == expected
    files.delete("index/000002/manifest.json")
    with pytest.raises(StoreError, match=r"index version 2 is not there; build one"):
        embedder.open_store(config.store).search("two cats", k=3)


def test_an_upload_of_an_index_that_was_cut_off_is_no_version_and_its_number_is_not_used_again(files):
    files.write("index/000003/index.faiss", b"half")
    assert list_manifests(files) == []
    built_in = []

    def build(folder):
        built_in.append(folder.name)
        raise RuntimeError("cut off again")

    with pytest.raises(RuntimeError, match="cut off again"):
        versions.add_version(files, build)
    assert built_in == ["000004"]


@pytest.mark.medium
def test_other_programs_read_the_table_of_a_store_in_a_bucket(bucket):
    files = StoreFiles(f"{bucket}/plain/store")  # Polars 2.1 looks for `a%20folder` where a folder's name has a space
    bind_store(files, INFO)
    publish_rows(files, row("a.jpg"), row("b.jpg", image_embedding=[0.0, 1.0]))
    uri = files.uri("embeddings")
    found = polars.read_delta(uri, storage_options={"allow_http": "true"})
    assert dict(found.select("item_id", "image_embedding").iter_rows()) == {"a.jpg": [1.0, 0.0], "b.jpg": [0.0, 1.0]}
    embeddings = embedder.open_store(files.address).to_arrow()  # noqa: F841 - DuckDB finds it by its name
    assert duckdb.sql("SELECT count(*), max(item_id) FROM embeddings").fetchall() == [(2, "b.jpg")]


def test_a_file_is_created_once_and_replaced_only_as_it_was_read(files):
    assert files.create("x/new.json", b"1")
    assert not files.create("x/new.json", b"2")
    data, tag = files.read_tagged("x/new.json")
    assert data == b"1"
    newer = files.replace("x/new.json", b"3", tag)
    with pytest.raises(WriteConflictError):
        files.replace("x/new.json", b"4", tag)
    files.replace("x/new.json", b"5", newer)
    with pytest.raises(WriteConflictError):
        files.replace("x/gone.json", b"6", newer)
    with pytest.raises(WriteConflictError):
        files.replace("x/new.json", b"7", None)
    assert objects_of(files) == {"x/new.json": b"5"}


def test_a_replacement_that_was_sent_twice_because_its_answer_was_lost_is_no_conflict(files):
    files.create("current", b"old")
    _, tag = files.read_tagged("current")
    newest = files.replace("current", b"new", tag)
    assert files.replace("current", b"new", tag) == newest  # as the client sends it again


def test_files_are_listed_found_and_deleted_as_on_a_disk(files, tmp_path):
    for each in (files, StoreFiles(tmp_path / "store")):
        assert list(each.list("runs")) == []
        for path in ("runs/b/run.json", "runs/a/journal/1.json", "runs-old/x"):
            each.write(path, path.encode())
        assert sorted(each.list("runs")) == [("runs/a/journal/1.json", 21), ("runs/b/run.json", 15)]
        assert [info.path for info in each.list("runs", "runs/a/journal/1.json")] == ["runs/b/run.json"]
        assert (each.folders("runs"), each.folders("nothing")) == (["a", "b"], [])
        assert each.exists("runs/b/run.json")
        each.delete("runs/b/run.json")
        each.delete("runs/b/run.json")
        assert not each.exists("runs/b/run.json")
        with pytest.raises(FileNotFoundError, match="run.json"):
            each.read("runs/b/run.json")
        with pytest.raises(FileNotFoundError):
            each.open("runs/b/run.json")
        each.delete_each([])
        each.delete_each(["runs/a/journal/1.json", "runs-old/x"])
        assert list(each.list("runs")) == []
        assert list(each.stream(len, ["a", "bb", "ccc", "d"], num_ahead=3)) == [1, 2, 3, 1]


@pytest.mark.medium
def test_files_larger_than_a_piece_come_back_as_they_went(files, tmp_path, monkeypatch):
    monkeypatch.setattr(model_download, "PIECE_BYTES", 1 << 20)
    (tmp_path / "model.safetensors").write_bytes(secrets.token_bytes(PIECE_BYTES + 12345))
    files.upload(tmp_path / "model.safetensors", "model/model.safetensors")
    files.download("model/model.safetensors", tmp_path / "again")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fetched = model_download.resolve_model(files.uri("model")) / "model.safetensors"
    expected = (tmp_path / "model.safetensors").read_bytes()
    assert (tmp_path / "again").read_bytes() == expected
    assert fetched.read_bytes() == expected


def test_a_part_file_that_is_replaced_while_it_is_read_is_an_error_not_a_mixture(files):
    ids = [secrets.token_hex(16) for _ in range(40_000)]
    store_part(files, "items", "p.parquet", pa.table({"item_id": ids}), "s")
    opened = files.open("items/p.parquet")
    store_part(files, "items", "p.parquet", pa.table({"item_id": ids[::-1]}), "s")
    with pytest.raises(OSError, match="replaced while it was read"):
        opened.read(100)


def test_a_missing_part_file_of_a_bucket_is_named(files):
    publish_rows(files, row("a.jpg"))
    (path,) = RecordTable(files, "embeddings").paths()
    files.delete(f"embeddings/{path}")
    with pytest.raises(StoreError, match=r"s3://.*part file of version 1 can't be read"):
        RecordTable(files, "embeddings").read()


def test_a_store_travels_to_other_processes_by_its_address_alone(files):
    publish_rows(files, row("a.jpg"))
    files.lease = object()  # what this process holds does not travel
    data = pickle.dumps(files)
    assert SECRET.encode() not in data
    assert KEY.encode() not in data
    there = pickle.loads(data)
    assert (there.lease, read_current(there)) == (None, read_current(files))


def test_a_stop_is_asked_for_by_one_session_and_ends_no_other(files):
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("a.jpg")))
    run.request_stop()
    assert run.stop_requested()
    again, _ = begin(files)
    assert again.run_id == run.run_id
    assert not again.stop_requested()


@pytest.mark.parametrize("uri", ["s3://bucket/store?x=1", "s3://bucket/a#b", "ftp://host/store", "s3://"])
def test_what_is_no_store_address_is_refused(uri):
    with pytest.raises(StoreError, match=r"query|no store can be kept|bucket is missing"):
        StoreFiles(uri)
