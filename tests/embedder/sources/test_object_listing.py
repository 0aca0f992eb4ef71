"""Sources in an object store, through obstore's real S3 client and a small S3 server on this machine."""

import io
import os
import tarfile
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedder.errors import SourceError
from embedder.sources import folder_items, object_listing, parquet_cells
from embedder.sources.captions import read_caption
from embedder.sources.fetch import Fetcher, FetchError
from embedder.sources.globbing import glob_regex
from embedder.storage.object_stores import explain


def tar_bytes(*members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def parquet_bytes(**columns):
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, row_group_size=2, use_dictionary=False, write_batch_size=1)
    return buffer.getvalue()


@pytest.mark.medium
def test_a_prefix_lists_like_a_folder_with_etags(bucket, list_items):
    bucket.objects.update(
        {
            "pics/a.jpg": b"A", "pics/a.txt": b"a cat", "pics/a-1.jpg": b"A1", "pics/ü x/b#1.png": b"BB",
            "pics/100%.jpg": b"%", "pics/sub/": b"", "pics/sub/c.jpg": b"C", "pics-other/d.jpg": b"D",
        }
    )  # fmt: skip
    rows = list_items("s3://team/pics/")
    assert {item: (row["uri"], row["size_bytes"]) for item, row in rows.items()} == {
        "100%.jpg": ("s3://team/pics/100%.jpg", 1),
        "a-1.jpg": ("s3://team/pics/a-1.jpg", 2),
        "a.jpg": ("s3://team/pics/a.jpg", 1),
        "sub/c.jpg": ("s3://team/pics/sub/c.jpg", 1),
        "ü x/b#1.png": ("s3://team/pics/ü x/b#1.png", 2),
    }
    assert rows["a.jpg"]["caption_uri"] == "s3://team/pics/a.txt"
    etag, caption_etag = rows["a.jpg"]["modified"].split("|")
    bucket.objects["pics/a.txt"] = b"another cat"
    assert list_items("s3://team/pics")["a.jpg"]["modified"].split("|")[0] == etag
    assert list_items("s3://team/pics")["a.jpg"]["modified"].split("|")[1] != caption_etag
    with Fetcher() as fetcher:
        data = {item: fetcher.fetch(row["uri"], max_bytes=9).data for item, row in rows.items()}
        assert data == {"100%.jpg": b"%", "a-1.jpg": b"A1", "a.jpg": b"A", "sub/c.jpg": b"C", "ü x/b#1.png": b"BB"}
        assert read_caption(rows["a.jpg"]["caption_uri"]) == "another cat"


def test_the_whole_bucket_and_a_single_object_are_sources(bucket, list_items):
    bucket.objects.update({"a.jpg": b"A", "a.txt": b"cap", "sub/b.jpg": b"B"})
    assert list(list_items("s3://team")) == ["a.jpg", "sub/b.jpg"]
    rows = list_items("s3://team/a.jpg")
    assert {item: row["caption_uri"] for item, row in rows.items()} == {"a.jpg": "s3://team/a.txt"}


def test_a_missing_prefix_or_bucket_is_a_source_error(bucket, list_items):
    for path in ("s3://team/nothing", "s3://nobody/x", "s3://"):
        with pytest.raises(SourceError, match=r"no object or folder of this name|no such bucket|bucket is missing"):
            list_items(path)


def test_an_object_named_like_a_part_of_another_is_a_reject(bucket, list_items):
    bucket.objects.update({"p/a.jpg": b"A", "p/t.parquet#row=3": b"x"})
    rows = list_items("s3://team/p")
    assert {item: row["error_type"] for item, row in rows.items()} == {
        "a.jpg": None, "t.parquet#row=3": "AmbiguousName",
    }  # fmt: skip


def test_large_objects_go_to_a_file_that_is_deleted(bucket, monkeypatch):
    data = bytes(range(256)) * 50_000  # 12.8 MB: four ranges
    bucket.objects["big.mp4"] = data
    with Fetcher() as fetcher:
        with fetcher.fetch("s3://team/big.mp4", max_bytes=1000) as fetched:
            path = fetched.path
            assert (fetched.data, fetched.size_bytes) == (None, len(data))
            assert path.read_bytes() == data
            by_path = fetcher.content_hash(fetched)
        assert not path.exists()
        with fetcher.fetch("s3://team/big.mp4", max_bytes=len(data)) as fetched:
            assert fetched.data == data
            assert fetcher.content_hash(fetched) == by_path


def test_a_picture_beyond_its_limit_is_not_downloaded(bucket, tmp_path):
    bucket.objects |= {"big.png": b"\x89PNG\r\n\x1a\n" + bytes(12 << 20), "big.mp4": b"1" * 3000}
    images = [{"bytes": None, "path": f"s3://team/{name}"} for name in ("big.png", "big.mp4")]
    pq.write_table(pa.table({"image": images}), tmp_path / "t.parquet")
    cell = f"{tmp_path}/t.parquet#column=image&row_group=0&row="
    with Fetcher() as fetcher:
        for uri, limit in (("s3://team/big.png", 16 << 20), (f"{cell}0", 16 << 20), (f"{cell}1", 2000)):
            with pytest.raises(FetchError, match="TooLarge"):
                fetcher.fetch(uri, max_bytes=1000, max_file_bytes=limit)
        assert sum(entry.startswith("GET big") for entry in bucket.log) == 2, "only the beginning of the pictures"
        for uri, limit in ((f"{cell}1", 4000), (f"{cell}0", None)):
            with fetcher.fetch(uri, max_bytes=1000, max_file_bytes=limit) as fetched:
                assert fetched.size_bytes in (3000, (12 << 20) + 8)


def test_an_object_replaced_during_a_download_is_no_mixture(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bucket.objects["big.mp4"] = b"1" * (9 << 20)
    read_at = object_listing.ObjectRanges.read_at

    def replacing(self, offset, length):
        data = read_at(self, offset, length)
        bucket.objects["big.mp4"] = b"2" * (9 << 20)
        return data

    monkeypatch.setattr(object_listing.ObjectRanges, "read_at", replacing)
    with Fetcher() as fetcher, pytest.raises(FetchError) as caught:
        fetcher.fetch("s3://team/big.mp4", max_bytes=1000)
    assert (caught.value.error_type, caught.value.transient) == ("Changed", True)
    assert not list(tmp_path.glob("embedder-*.part"))


def test_missing_and_forbidden_objects_are_permanent_failures_without_secrets(bucket):
    bucket.objects["closed.jpg"] = b"x"
    bucket.forbidden.add("closed.jpg")
    with Fetcher() as fetcher:
        for name, error_type in (("gone.jpg", "FileNotFound"), ("closed.jpg", "PermissionDenied")):
            with pytest.raises(FetchError) as caught:
                fetcher.fetch(f"s3://team/{name}", max_bytes=10)
            assert (caught.value.error_type, caught.value.transient) == (error_type, False)
            assert "test-secret" not in str(caught.value)
            assert "test-key" not in str(caught.value)


@pytest.mark.medium
def test_a_tar_is_scanned_by_ranges_and_members_come_by_one_request_each(bucket, list_items):
    large = b"L" * (20 << 20)
    bucket.objects["set/0.tar"] = tar_bytes(("a.jpg", b"A"), ("a.txt", b"cap"), ("v.mp4", large), ("z.jpg", b"ZZ"))
    rows = list_items("s3://team/set")
    assert {item: (row["caption"], row["size_bytes"]) for item, row in rows.items()} == {
        "0/a": ("cap", 1), "0/v": (None, 20 << 20), "0/z": (None, 2),
    }  # fmt: skip
    assert sum(entry.startswith("GET set/0.tar") for entry in bucket.log) == 2  # the large member is skipped
    bucket.log.clear()
    with Fetcher() as fetcher:
        assert fetcher.fetch(rows["0/z"]["uri"], max_bytes=10).data == b"ZZ"
        assert fetcher.fetch(rows["0/v"]["uri"], max_bytes=1 << 30).data == large
        # Listed again after the tar was replaced: the open one is dropped, and read again.
        bucket.objects["set/0.tar"] = tar_bytes(("new.jpg", b"N"), ("z.jpg", b"zz"))
        rows = list_items("s3://team/set")
        assert fetcher.fetch(rows["0/z"]["uri"], max_bytes=10).data == b"zz"


def test_captions_beside_the_objects_of_a_pattern_cost_no_request_each(bucket, list_items, monkeypatch):
    monkeypatch.setattr(folder_items, "MAX_LOOKED_UP", 10)
    for number in range(9):
        bucket.objects |= {f"p/{number}.jpg": b"J", f"p/{number}.txt": b"T", f"p/{number}.md": b"M"}
    rows = list_items("s3://team/p/*.jpg", kind="files")
    assert [row["caption_uri"] for row in rows.values()] == [f"s3://team/p/{number}.txt" for number in range(9)]
    assert sum(entry.startswith("HEAD") for entry in bucket.log) < 5


def test_tars_by_wildcard_and_braces(bucket, list_items):
    for number in (8, 9, 10):
        bucket.objects[f"set/part-{number:03d}.tar"] = tar_bytes(("k.jpg", b"K"))
    assert list(list_items("s3://team/set/part-{009..010}.tar")) == ["part-009/k", "part-010/k"]
    assert list(list_items("s3://team/*/part-00?.tar")) == ["set/part-008/k", "set/part-009/k"]
    with pytest.raises(SourceError, match=r"part-011\.tar: no file of this name"):
        list_items("s3://team/set/part-{010..011}.tar")


def test_tables_in_a_bucket(bucket, list_items):
    bucket.objects["t.parquet"] = parquet_bytes(id=["a", "b", "c"], image=[b"1", b"2", b"3"], cap=["x", "y", "z"])
    bucket.objects["lists/u.csv"] = b"id,photo\na,../pics/a.jpg\nb,s3://other/b.jpg\nc,../../../c.jpg\n"
    rows = list_items("s3://team/t.parquet", columns={"id": "id", "image": "image", "caption": "cap"})
    with Fetcher() as fetcher:
        assert [fetcher.fetch(row["uri"], max_bytes=9).data for row in rows.values()] == [b"1", b"2", b"3"]
    rows = list_items("s3://team/lists/u.csv", columns={"id": "id", "image": "photo"})
    assert {item: (row["uri"], row["error_type"]) for item, row in rows.items()} == {
        "a": ("s3://team/pics/a.jpg", None),
        "b": ("s3://other/b.jpg", None),
        "c": ("../../../c.jpg", "UnsupportedUri"),
    }


def test_a_table_replaced_while_it_is_read_fails_once_and_is_then_opened_anew(bucket, monkeypatch):
    monkeypatch.setattr(parquet_cells, "MAX_KEPT_BYTES", 0)
    monkeypatch.setattr(parquet_cells, "ROWS_PER_BATCH", 1)
    cells = [os.urandom(6 << 20) for _ in range(3)]
    bucket.objects["t.parquet"] = parquet_bytes(image=cells[:2])
    uri = "s3://team/t.parquet#column=image&row_group=0&row="
    with Fetcher() as fetcher:
        assert fetcher.fetch(f"{uri}0", max_bytes=1 << 30).data == cells[0]
        bucket.objects["t.parquet"] = parquet_bytes(image=[b"", cells[2]])
        with pytest.raises(FetchError) as caught:
            fetcher.fetch(f"{uri}1", max_bytes=1 << 30)
        assert fetcher.fetch(f"{uri}1", max_bytes=1 << 30).data == cells[2]
    assert (caught.value.error_type, caught.value.transient) == ("Changed", True)


def test_answers_of_the_server_are_distinguished(bucket):
    for status, error_type, transient in (
        (404, "FileNotFound", False), (403, "PermissionDenied", False), (400, "RequestRefused", False),
        (429, "NetworkError", True), (503, "NetworkError", True),
    ):  # fmt: skip
        answer = OSError(f"Generic S3 error: Server returned non-2xx status code: {status} x")
        error = explain(answer, "s3://team/a")
        assert (error.kind, error.transient) == (error_type, transient)


def test_a_delta_table_in_a_bucket(bucket, list_items, tmp_path):
    import deltalake

    deltalake.write_deltalake(
        tmp_path / "t", pa.table({"id": ["a"], "image": [b"A"], "p": ["ü x"]}), partition_by=["p"]
    )
    for path in (tmp_path / "t").rglob("*"):
        if path.is_file():
            bucket.objects[f"tables/t/{path.relative_to(tmp_path / 't')}"] = path.read_bytes()
    rows = list_items("s3://team/tables/t", columns={"id": "id", "image": "image"}, carryover=("p",))
    assert rows["a"]["p"] == "ü x"
    with Fetcher() as fetcher:
        assert fetcher.fetch(rows["a"]["uri"], max_bytes=9).data == b"A"


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("a/*.tar", ["a/x.tar", "a/.tar"], ["a/b/x.tar", "a/x.tar.gz", "b/x.tar"]),
        ("a/**/*.tar", ["a/x.tar", "a/b/c/x.tar"], ["ab/x.tar"]),
        ("a/?.tar", ["a/x.tar"], ["a/xy.tar", "a//.tar"]),
        ("a/[xy]z.tar", ["a/xz.tar"], ["a/zz.tar"]),
        ("a/[!xy]z.tar", ["a/zz.tar"], ["a/xz.tar"]),
        ("a+(b).tar", ["a+(b).tar"], ["aab.tar"]),
    ],
)  # fmt: skip
def test_wildcards_of_object_names_read_like_those_of_files(pattern, matching, other):
    matcher = glob_regex(pattern)
    assert [name for name in matching + other if matcher.match(name)] == matching


def many_objects(bucket):
    """Objects whose stems are apart in the order of keys, in folders of two levels, with a store and a drawn folder."""
    names = [f"d/{year}/{month}/{number:02d}{suffix}" for year in range(3) for month in range(2) for number in range(4)
             for suffix in (".jpg", "-1.jpg", ".txt")]  # fmt: skip
    names += ["d/a.jpg", "d/a.txt", "d/0/1/", "d/0/9/", "d/2/store/store.json", "d/2/store/runs/x.parquet"]
    bucket.objects.update({name: b"" if name.endswith("/") else name.encode() for name in names})


@pytest.mark.medium
def test_folders_of_a_bucket_that_are_listed_at_once_give_the_rows_of_one_listing(bucket, list_items, monkeypatch):
    many_objects(bucket)
    plain = list_items("s3://team/d")
    assert not any(delimiter for _, delimiter in bucket.listed), "few objects are listed in one go"
    assert len(plain) == 3 * 2 * 4 * 2 + 2 and plain["a.jpg"]["caption_uri"] == "s3://team/d/a.txt"
    assert plain["0/1/03.jpg"]["caption_uri"] == "s3://team/d/0/1/03.txt"
    assert [name for name in plain if "store" in name or name.startswith("0/9")] == ["0/9"]
    bucket.listed.clear()
    monkeypatch.setattr(object_listing, "PAGE_NAMES", 3)  # as the server's pages are
    assert list_items("s3://team/d") == plain
    with_parts = {prefix for prefix, delimiter in bucket.listed if delimiter}
    assert with_parts >= {"d/", "d/0/", "d/1/", "d/2/"}
    assert list(list_items("s3://team/d")) == list(plain), "in the same order"


@pytest.mark.medium
def test_names_of_a_bucket_that_do_not_fit_into_memory_are_sorted_on_disk(bucket, list_items, monkeypatch):
    many_objects(bucket)
    plain = list_items("s3://team")
    monkeypatch.setattr("embedder.sources.sorted_tables.RUN_BYTES", 1)
    monkeypatch.setattr("embedder.sources.sorted_tables.PIECE_ROWS", 2)
    monkeypatch.setattr(object_listing, "PAGE_NAMES", 3)
    monkeypatch.setattr(object_listing, "CHUNK_NAMES", 4)
    rows = list_items("s3://team")
    assert rows == plain and list(rows) == list(plain)


@pytest.mark.parametrize(
    ("names", "is_worth"),
    [
        ([f"k/f/{number}" for number in range(1000)], True),
        ([f"k/f/{number}" for number in range(999)], False),  # that is all there is
        ([f"k/{number}" for number in range(1000)], False),
        ([f"k/{number // 100}/{number}" for number in range(1000)], False),  # folders of a hundred
        ([f"k/{number // 200}/{number}" for number in range(1000)], True),
        ([f"k/{number}" for number in range(500)] + [f"k/x/{number}" for number in range(500)], False),
    ],
)
def test_folders_are_worth_a_request_each_where_they_are_few_and_full(names, is_worth):
    assert object_listing._is_worth_parts(names, "k") == is_worth
    assert object_listing._is_worth_parts([name[2:] for name in names], "") == is_worth
