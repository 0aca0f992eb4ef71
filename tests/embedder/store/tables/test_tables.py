"""A version of a table is read in pieces as it is read whole; files that hold none of the changed items stay."""

import os
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from search_stores import QUERY
from store_samples import INFO, begin, publish_rows, row, rows_of, table

from embedder.errors import StoreError
from embedder.retrieval.store_api import open_store
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import write_part
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import PublishIntent, publish
from embedder.store.store_info import bind_store
from embedder.store.tables.delta_log import LOG_FOLDER, change_log, without_bounds
from embedder.store.tables.tables import RecordTable

NAMES = ("a", "b", "c", "d", "e", "f", "g", "h")


@pytest.fixture
def files(tmp_path):
    """A store of eight items in four part files, in the order of their names."""
    files = StoreFiles(tmp_path / "store")
    bind_store(files, INFO)
    run, metadata = begin(files)
    for task in range(4):
        write_part(files, metadata, task, table(*(row(name) for name in NAMES[2 * task : 2 * task + 2])))
    publish([ModelWork(run, metadata)])
    return files


@pytest.mark.parametrize(("rows_per_piece", "sizes"), [(1, [2, 2, 2, 2]), (3, [4, 4]), (5, [6, 2]), (100, [8])])
def test_pieces_are_all_rows_whatever_their_size(files, monkeypatch, rows_per_piece, sizes):
    monkeypatch.setattr("embedder.store.tables.tables.ROWS_PER_PIECE", rows_per_piece)
    items = RecordTable(files, "items")
    pieces = list(items.pieces(["item_id", "modified"]))
    assert [piece.num_rows for piece in pieces] == sizes
    assert pa.concat_tables(pieces).equals(items.read(["item_id", "modified"]))


def test_a_table_without_files_has_no_pieces(tmp_path):
    assert list(RecordTable(StoreFiles(tmp_path / "none"), "items", -1).pieces(["item_id"])) == []


def test_only_files_with_changed_or_retired_items_are_read_and_rewritten(files, monkeypatch):
    before = {name: set(RecordTable(files, name).paths()) for name in ("items", "embeddings")}
    read = []
    unpatched = RecordTable.read

    def reading(self, columns=None, paths=None):
        read.extend(paths or () if self.name == "embeddings" else ())  # of items the states are counted
        return unpatched(self, columns, paths)

    monkeypatch.setattr(RecordTable, "read", reading)
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("c", content_version="v1"), row("i")))
    publish([ModelWork(run, metadata, PublishIntent(kind="refresh"), pa.chunked_array([["e", "f"]]))])
    for name, held in before.items():
        after = RecordTable(files, name)
        first, second, third, last = sorted(held)
        assert {first, last} <= set(after.paths()), "their names lie outside"
        assert not {second, third} & set(after.paths())
        rows = unpatched(after).sort_by("item_id")
        assert rows["item_id"].to_pylist() == ["a", "b", "c", "d", "g", "h", "i"]
        assert rows["content_version"].to_pylist() == ["v0", "v0", "v1", "v0", "v0", "v0", "v0"]
    embeddings = sorted(before["embeddings"])
    assert not {embeddings[0], embeddings[3]} & set(read), "statistics suffice, nothing is read"


def test_a_file_whose_log_entry_has_no_bounds_is_looked_into(files):
    entries = [info.path for info in files.list(f"embeddings/{LOG_FOLDER}")]
    for entry in entries:
        change_log(files, entry, lambda action: without_bounds(action) if "add" in action else action)
    publish_rows(files, row("b", content_version="v1"))
    rows = RecordTable(files, "embeddings").read().sort_by("item_id")
    assert rows["item_id"].to_pylist() == list(NAMES)
    assert rows["content_version"].to_pylist() == ["v0", "v1", *["v0"] * 6]


def test_files_beside_the_entries_of_a_log_are_none_of_it(files):
    for name in (f".{0:020d}.json.crc", ".nfs000012", "_commit_0190f2c0.json.tmp"):
        files.write(f"items/{LOG_FOLDER}/{name}", b"crc\0\x9f")
    table = RecordTable(files, "items")
    table.add_columns(pa.schema({"colour": pa.string()}))
    table.write_checkpoint()
    assert "colour" in RecordTable(files, "items").schema.names
    assert DeltaTable(files.uri("items")).version() == table.version


def test_ids_with_line_ends_of_unicode_may_be_compacted_by_another_program(files):
    names = ["people\u2028in rows", "a\x85 name"]
    publish_rows(files, *map(row, names))
    for name in ("items", "embeddings"):
        DeltaTable(files.uri(name)).optimize.compact()
    publish_rows(files, row("later"))
    assert {each["item_id"] for each in rows_of(files)} == {*NAMES, *names, "later"}


class Code:
    """Object whose pickle makes a folder as it is read."""

    def __init__(self, place):
        self.place = str(place)

    def __reduce__(self):
        return os.mkdir, (self.place,)


@pytest.mark.parametrize("is_inside", [False, True])
def test_pickled_objects_of_ray_are_never_read_from_a_store(files, tmp_path, is_inside):
    kinds = pytest.importorskip("ray.data._internal.object_extensions.arrow", reason="of newer versions of Ray")

    for path in (files.folder / "embeddings").glob("*.parquet"):
        content = pq.read_table(path)
        stored = pa.array([pickle.dumps(Code(tmp_path / "ran"))] * content.num_rows, pa.large_binary())
        objects = pa.ExtensionArray.from_storage(kinds.ArrowPythonObjectType(), stored)
        objects = pa.StructArray.from_arrays([objects], ["inside"]) if is_inside else objects
        changed = content.set_column(content.schema.get_field_index("caption"), "caption", objects)
        pq.write_table(changed, path)
    store = open_store(files.address)
    for read in (store.to_arrow, lambda: store.to_arrow(["caption"]), lambda: store.search(QUERY)):
        with pytest.raises(StoreError, match="a part file of the store has a column of ray.data.arrow_pickled_object"):
            read()
    assert not (tmp_path / "ran").exists()
