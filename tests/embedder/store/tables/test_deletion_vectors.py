"""Deletion vectors: bytes as other programs have them, hostile ones bring no row back, and every version is exact."""

import zlib
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random

import numpy as np
import polars
import pytest
from deltalake import DeltaTable, QueryBuilder
from store_samples import row
from store_states import new_store, no_index, publish_refresh, rows_at, rows_now, set_clock, state_now

from embedder.errors import StoreError
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.store_check.check import check_store
from embedder.plugins.maintain.vacuum import vacuum
from embedder.store.files import StoreFiles
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.history import publications, readable
from embedder.store.schema import TABLES
from embedder.store.tables import deletion_vectors
from embedder.store.tables.deletion_vectors import (
    decode_rows,
    decode_z85,
    encode_rows,
    encode_z85,
    marked_rows,
    store_vectors,
    with_feature,
)
from embedder.store.tables.tables import RecordTable

MADE_BY_PYROARING = [
    ("eNq7eNkyhZEBAawMGBggfFYGASDJzMDCwM7AzSDEIMsAAG8xAws=", [3, 4, 7, 11, 18, 29]),
    (
        "eNq7eNkyhYkBAawNmBn4GRniK5kY/v9nBmIWhvuTVYES2kBsCMTmQMzIsKAtvpIRyPr/H0HenwwyyMoAJA8BAkDMygAA4icRuw==",
        [*range(100_000, 300_000), 2**33 + 5],
    ),
    (
        "eNrtx0ENgDAABMGrAxKM9As+6gAv1ddgiCY88FBmHpvsuI+r5HPW5P2+b7MNYFkBAAAAAACA33gA7ZGicQ==",
        list(range(0, 10_000, 2)),
    ),
]
"""Serialised by pyroaring 1.2.0: an array; runs, and a second bucket; a bitmap."""
NAMES = [f"item-{number:03d}" for number in range(40)]


@pytest.fixture(params=[512, 0], ids=["inline", "in files"])
def files(tmp_path, monkeypatch, request):
    """A store of forty items in one part file a table; its deletion vectors stand in the log, or in files."""
    monkeypatch.setattr(deletion_vectors, "INLINE_BYTES", request.param)
    files = new_store(tmp_path / "store")
    publish_refresh(files, *map(row, NAMES))
    return files


@pytest.fixture
def marked(files):
    """Of forty items three changed, one left, and later one changed again and one more."""
    publish_refresh(files, *changed("v1", 3, 20, 39), retired=[NAMES[7]], marks=True)
    publish_refresh(files, *changed("v2", 3, 8), marks=True)
    return files


def changed(version: str, *numbers: int) -> list[dict]:
    return [row(NAMES[each], content_version=version, image_embedding=[0.0, float(each)]) for each in numbers]


def bitmaps(files: StoreFiles) -> list[str]:
    return [info.path for info in files.list("") if info.path.endswith(".bin")]


@pytest.mark.parametrize(("packed", "rows"), MADE_BY_PYROARING)
def test_bitmaps_of_another_library_are_read(packed, rows):
    data = zlib.decompress(b64decode(packed))
    assert decode_rows(data, len(rows)).tolist() == rows
    with pytest.raises(ValueError, match="rows"):
        decode_rows(data, len(rows) - 1)


@pytest.mark.parametrize("number", [0, 2], ids=["array", "bitmap"])
def test_bitmaps_are_written_as_the_other_library_does(number):
    packed, rows = MADE_BY_PYROARING[number]
    assert encode_rows(np.array(rows)) == zlib.decompress(b64decode(packed))


@pytest.mark.parametrize("number", [0, 1, 4096, 4097, 65_536, 150_000])
def test_rows_come_back_from_a_bitmap_and_from_text(number):
    rows = np.sort(np.random.default_rng(number).choice(200_000, number, replace=False))
    data = encode_rows(rows)
    assert decode_z85(encode_z85(data))[: len(data)] == data
    assert np.array_equal(decode_rows(data, number), rows)


@pytest.mark.medium
def test_mutated_vectors_are_errors_or_so_many_rows_of_the_file(tmp_path):
    """A log and a bitmap file are anybody's: no other exception, no row beyond the file, no memory beyond the rows."""
    files, random, num_errors = StoreFiles(tmp_path), Random(0), 0
    packed = [zlib.decompress(b64decode(each)) for each, _ in MADE_BY_PYROARING]
    counts = [len(rows) for _, rows in MADE_BY_PYROARING]
    for _ in range(4000):
        (number,) = random.choices(range(3), (8, 1, 8))
        data = bytearray(packed[number])
        for _ in range(random.choice((1, 1, 2, 8))):
            data[random.randrange(len(data))] = random.choice((0, 1, 255, random.randrange(256)))
        data = data[: random.choice((len(data), random.randrange(len(data))))]
        vector = deletion_vectors.DeletionVector("i", encode_z85(bytes(data)), len(data), counts[number])
        try:
            rows = marked_rows(files, "items", vector, 400_000)
        except StoreError:
            num_errors += 1
        else:
            assert len(rows) == counts[number]
            assert rows[-1] < 400_000
    assert num_errors > 2000


def test_versions_with_marks_are_those_of_files_that_were_written_anew(marked, tmp_path):
    anew = new_store(tmp_path / "anew")
    publish_refresh(anew, *map(row, NAMES))
    publish_refresh(anew, *changed("v1", 3, 20, 39), retired=[NAMES[7]], marks=False)
    publish_refresh(anew, *changed("v2", 3, 8), marks=False)
    for one, other in zip(publications(marked), publications(anew), strict=True):
        assert (one.num_items, one.num_vectors, one.num_pictures) == (
            other.num_items,
            other.num_vectors,
            other.num_pictures,
        )
        for name in TABLES:
            assert without_runs(rows_at(marked, one, name)) == without_runs(rows_at(anew, other, name))
    first = RecordTable(marked, "embeddings").paths()[0]
    assert first == RecordTable(marked, "embeddings", publications(marked)[0].embeddings).paths()[0], "the file stays"
    assert RecordTable(marked, "embeddings").num_rows() == 39


def without_runs(rows: dict) -> dict:
    times = ("run_id", "embedded_at", "updated_at")
    return {key: {name: value for name, value in own.items() if name not in times} for key, own in rows.items()}


@pytest.mark.parametrize("name", TABLES)
def test_other_programs_read_the_same_rows_or_refuse(marked, name):
    place, expected = marked.uri(name), sorted(key[0] for key in rows_now(marked, name))
    assert sorted(polars.read_delta(place)["item_id"].to_list()) == expected
    query = QueryBuilder().register("rows", DeltaTable(place)).execute("select item_id, content_version from rows")
    found = {each["item_id"]: each["content_version"] for batch in query for each in batch_rows(batch)}
    assert found == {key[0]: own["content_version"] for key, own in rows_now(marked, name).items()}
    with pytest.raises(Exception, match="deletionVectors|DeletionVectors"):
        DeltaTable(place).to_pyarrow_table()


def batch_rows(batch) -> list[dict]:
    import pyarrow

    return pyarrow.record_batch(batch).to_pylist()


def test_a_checkpoint_keeps_marks_and_what_readers_have_to_know(marked):
    before = state_now(marked)
    for name in TABLES:
        table = RecordTable(marked, name)
        table.write_checkpoint()
        entries = [info.path for info in marked.list(f"{name}/_delta_log") if info.path.endswith(".json")]
        marked.delete_each(entries[:-1])
        assert RecordTable(marked, name).has_deletion_vectors
        DeltaTable(marked.uri(name)).alter.set_table_properties({"delta.appendOnly": "false"})
    assert state_now(marked) == before
    publish_refresh(marked, *changed("v3", 30), marks="auto")
    assert RecordTable(marked, "items").marked_rows(RecordTable(marked, "items").paths()[0]).tolist() == [
        3,
        7,
        8,
        20,
        30,
        39,
    ]


@pytest.mark.medium
@pytest.mark.parametrize("step", [100, 1], ids=["scattered", "side by side"])
def test_marks_write_twice_what_changed_at_most(tmp_path, step):
    values = np.random.default_rng(0).standard_normal((10_000, 64)).tolist()
    written = {}
    for marks in (False, True):
        files = new_store(tmp_path / str(marks))
        publish_refresh(files, *(row(f"{each:05d}", image_embedding=values[each]) for each in range(10_000)))
        before = table_bytes(files)
        numbers = range(0, 100 * step, step)
        changed = (row(f"{each:05d}", content_version="v1", image_embedding=values[-each]) for each in numbers)
        publish_refresh(files, *changed, marks=marks)
        after = table_bytes(files)
        written[marks] = sum(size for path, size in after.items() if path not in before)
    assert written[True] <= (2 * 0.01 + 0.02) * sum(before.values())
    assert written[False] > 3 * written[True]


def table_bytes(files: StoreFiles) -> dict[str, int]:
    """Files of both tables, their logs among them -> bytes."""
    return {info.path: info.size_bytes for name in TABLES for info in files.list(name)}


def test_auto_begins_nothing_and_goes_on_with_what_was_begun(files):
    publish_refresh(files, *changed("v1", 3))
    assert not RecordTable(files, "items").has_deletion_vectors
    assert DeltaTable(files.uri("items")).to_pyarrow_table().num_rows == 40
    publish_refresh(files, *changed("v2", 4), marks=True)
    publish_refresh(files, *changed("v3", 5))
    assert sum(part.deletion_vector is not None for part in RecordTable(files, "items").parts()) == 1
    publish_refresh(files, *changed("v4", 6), marks=False)
    assert not any(part.deletion_vector for part in RecordTable(files, "items").parts())


def test_a_file_of_which_half_has_left_is_written_anew(files):
    publish_refresh(files, *changed("v1", *range(21)), marks=True)
    assert [part.deletion_vector for part in RecordTable(files, "embeddings").parts()] == [None, None]


def test_compaction_writes_files_without_what_has_left_and_vacuum_deletes_the_marks(marked, monkeypatch):
    before = state_now(marked)
    compact(marked)
    assert state_now(marked) == before
    assert not any(part.deletion_vector for name in TABLES for part in RecordTable(marked, name).parts())
    num_before = len(bitmaps(marked))
    vacuum(marked, keep_days=7, keep_versions=1)
    assert len(bitmaps(marked)) == num_before, "of publications that are kept"
    set_clock(monkeypatch, lambda: datetime.now(UTC) + timedelta(days=30), marked)
    vacuum(marked, keep_days=7, keep_versions=1)
    assert not bitmaps(marked)
    assert state_now(marked) == before


def test_a_large_file_is_compacted_from_a_share_of_rows_that_have_left(files):
    publish_refresh(files, *changed("v1", *range(7)), marks=True)
    assert compact(files, PartTarget(num_rows=20))[0] is None
    publish_refresh(files, *changed("v1", 8), marks=True)
    before = state_now(files)
    assert compact(files, PartTarget(num_rows=20), min_saved=2)[0] is not None
    assert state_now(files) == before
    assert not any(part.deletion_vector for part in RecordTable(files, "items").parts())


def test_rollback_brings_each_publication_back(marked):
    past = publications(marked)
    expected = {each.run_id: {name: rows_at(marked, each, name) for name in TABLES} for each in past}
    for target in (past[0], past[1], past[2]):
        rollback(marked, target.run_id, no_index)
        assert state_now(marked) == expected[target.run_id]


def test_purged_rows_are_in_no_file_and_all_versions_keep_the_others(marked):
    past = publications(marked)
    expected = [{name: rows_at(marked, each, name) for name in TABLES} for each in past]
    gone = {NAMES[3], NAMES[7], NAMES[15]}
    purge(marked, gone, no_index)
    for info in marked.list(""):
        if info.path.endswith(".parquet") and "_delta_log" not in info.path:
            assert not gone & set(marked.read_table(info.path, ["item_id"]).to_pydict().get("item_id", ())), info.path
    assert {each.run_id for each in past} <= readable(marked, publications(marked))
    for each, rows in zip(past, expected, strict=True):
        for name in TABLES:
            wanted = {key: own for key, own in rows[name].items() if key[0] not in gone}
            assert rows_at(marked, each, name) == wanted
            version = DeltaTable(marked.uri(name), version=getattr(each, name))
            query = QueryBuilder().register("rows", version).execute("select item_id from rows")
            assert sorted(own["item_id"] for batch in query for own in batch_rows(batch)) == sorted(
                key[0] for key in wanted
            )
    assert not [each for each in check_store(marked, deep=True).findings if each.severity == "error"]


def test_a_purge_goes_on_where_a_vacuum_deleted_marks_of_an_older_version(marked, monkeypatch):
    set_clock(monkeypatch, lambda: datetime.now(UTC) + timedelta(days=30), marked)
    vacuum(marked, keep_days=7, keep_versions=1)
    kept = [each for each in publications(marked) if each.run_id in readable(marked, publications(marked))]
    expected = [{name: rows_at(marked, each, name) for name in TABLES} for each in kept]
    gone = {NAMES[8], NAMES[15]}
    for _ in range(2):
        purge(marked, gone, no_index)
        assert {each.run_id for each in kept} <= readable(marked, publications(marked))
        for each, rows in zip(kept, expected, strict=True):
            for name in TABLES:
                assert rows_at(marked, each, name) == {
                    key: own for key, own in rows[name].items() if key[0] not in gone
                }
    for info in marked.list(""):
        if info.path.endswith(".parquet") and "_delta_log" not in info.path:
            assert not gone & set(marked.read_table(info.path, ["item_id"]).to_pydict().get("item_id", ())), info.path
    assert not [each for each in check_store(marked, deep=True).findings if each.severity == "error"]


def test_a_vector_that_a_killed_writer_left_is_told_and_those_of_versions_are_not(files):
    publish_refresh(files, *changed("v1", *range(10)), marks=True)
    assert not [each for each in check_store(files).findings if "nothing needs" in each.found]
    left = "items/part-20250101T000000Z-abcd-marked/deletion_vector_9f4671cb-6222-0181-98c3-dd8584f9df9d.bin"
    files.write(left, b"123")
    (found,) = (each for each in check_store(files).findings if "nothing needs" in each.found)
    assert (found.severity, found.place) == ("note", left)
    assert found.found.startswith("1 file of deletion vectors that nothing needs, 3 bytes")
    assert "embedder vacuum" in found.cure
    vacuum(files)
    assert not files.exists(left)


def test_the_way_back_from_a_damaged_vector_is_a_version_without_it(marked):
    past = publications(marked)
    vector = next(part.deletion_vector for part in RecordTable(marked, "items").parts() if part.deletion_vector)
    if (place := vector.file("items")) is None:
        pytest.skip("it stands in the log")
    marked.write(f"items/{place}", b"\x02")
    (found,) = (each for each in check_store(marked).findings if each.severity == "error" and "damaged" in each.found)
    assert f"embedder rollback {past[1].run_id} " in found.cure, "it has the part file too, with older marks"


def test_no_way_back_leads_to_a_version_with_the_damaged_part_file_and_other_marks(marked):
    path = RecordTable(marked, "items", publications(marked)[0].items).paths()[0]
    marked.write(f"items/{path}", b"no Parquet")
    cures = [each.cure for each in check_store(marked).findings if each.place == f"items/{path}"]
    assert cures and all("embed into a new store" in cure for cure in cures)


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "foreign"])
def test_a_damaged_bitmap_is_an_error_and_brings_no_row_back(marked, damage):
    name = "items"
    path = RecordTable(marked, name).paths()[0]
    vector = next(part.deletion_vector for part in RecordTable(marked, name).parts() if part.path == path)
    place = vector.file(name)
    if place is None:
        pytest.skip("it stands in the log")
    content = marked.read(f"{name}/{place}")
    marked.delete(f"{name}/{place}")
    if damage != "missing":
        bad = {
            "cut": content[:-6],
            "flipped": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
            "foreign": b"\x02",
        }
        marked.write(f"{name}/{place}", bad[damage])
    with pytest.raises(StoreError, match=r"deletion_vector_.*\.bin.*rows that have left would come back; restore"):
        RecordTable(marked, name).read()
    assert "deletion vector" in " ".join(each.text for each in check_store(marked).findings)
    if damage == "missing":
        assert publications(marked)[-1].run_id not in readable(marked, publications(marked))


@pytest.mark.parametrize(
    "fields",
    [{"kind": "p", "value": "/etc/passwd"}, {"value": "../../x" + "0" * 20}, {"cardinality": 9}, {"offset": 10**9}],
)
def test_a_log_that_names_other_bytes_is_refused(tmp_path, fields):
    files = StoreFiles(tmp_path)
    (vector,) = store_vectors(files, "items", "20261128T000000Z-ab", "", {"a": np.arange(0, 3000, 2)}).values()
    assert marked_rows(files, "items", vector, 3000).tolist() == list(range(0, 3000, 2))
    with pytest.raises(StoreError, match="deletion vector"):
        marked_rows(files, "items", vector._replace(**fields), 3000)


def test_a_writer_that_is_repeated_writes_the_same_bitmaps(tmp_path):
    files, rows = StoreFiles(tmp_path), {"a": np.arange(0, 3000, 2), "b": np.arange(5)}
    store = partial(store_vectors, files, "items", "20261128T000000Z-ab")
    assert store("s1", rows) == store("s1", rows)
    assert store("s1", rows)["a"] != store("s2", rows)["a"], "an overtaken session's file may be deleted"
    assert store("s1", rows)["b"] == store("s2", rows)["b"], "inline, which nobody deletes"


def test_an_old_protocol_gets_the_lists_of_features_that_it_implied():
    assert with_feature({"minReaderVersion": 1, "minWriterVersion": 2}) == {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["deletionVectors"],
        "writerFeatures": ["appendOnly", "deletionVectors", "invariants"],
    }
