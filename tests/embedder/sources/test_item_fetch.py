import hashlib
import io
import os
import pickle
import tarfile
import tempfile
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from web_server import web_server

from embedder.config_toml.run_sections import WebConfig
from embedder.sources import byte_ranges, parquet_cells
from embedder.sources.captions import read_caption
from embedder.sources.fetch import Fetched, Fetcher, FetchError

LIMIT = 1 << 20


@pytest.fixture
def fetcher():
    with Fetcher() as fetcher:
        yield fetcher


def failure(fetcher, uri, max_bytes=LIMIT):
    with pytest.raises(FetchError) as caught:
        fetcher.fetch(uri, max_bytes=max_bytes)
    return caught.value


def test_a_local_file_is_given_by_path_whatever_its_size(fetcher, make_files):
    root = make_files({"a b#1.jpg": b"x" * 1000})
    with fetcher.fetch(f"{root}/a b#1.jpg", max_bytes=10) as fetched:
        assert fetched == Fetched(None, root / "a b#1.jpg", 1000)
        assert fetcher.content_hash(fetched) == hashlib.blake2b(b"x" * 1000, digest_size=16).hexdigest()
    assert (root / "a b#1.jpg").exists()


def test_the_hash_of_a_path_is_that_of_its_bytes(fetcher, tmp_path):
    data = os.urandom((4 << 20) + 17)
    (tmp_path / "big").write_bytes(data)
    by_path = fetcher.content_hash(Fetched(None, tmp_path / "big", len(data)))
    assert by_path == fetcher.content_hash(Fetched(data, None, len(data)))
    assert len(by_path) == 32
    assert fetcher.content_hash(Fetched(None, None, 0)) == fetcher.content_hash(Fetched(b"", None, 0))


def test_a_file_removed_after_the_listing_is_a_permanent_failure_that_names_it(fetcher, make_files, list_items):
    root = make_files({"a.jpg": b"A"})
    uri = list_items(root)["a.jpg"]["uri"]
    (root / "a.jpg").unlink()
    error = failure(fetcher, uri)
    assert (error.error_type, error.transient) == ("FileNotFound", False)
    assert error.message == f"{root}/a.jpg: No such file or directory"


def test_a_file_swapped_for_a_pipe_a_socket_or_a_folder_is_refused_at_once(fetcher, make_files):
    root = make_files({"a.jpg": b"A"})
    (root / "a.jpg").unlink()
    os.mkfifo(root / "a.jpg")
    assert failure(fetcher, f"{root}/a.jpg").error_type == "NotAFile"
    with pytest.raises(FetchError, match="NotAFile"):
        read_caption(f"{root}/a.jpg")
    assert failure(fetcher, f"{root}").error_type == "NotAFile"
    assert failure(fetcher, "/dev/zero").error_type == "NotAFile"


def test_a_pipe_that_comes_between_look_and_open_does_not_block(tmp_path, monkeypatch):
    (tmp_path / "plain").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    plain = (tmp_path / "plain").stat()
    monkeypatch.setattr(byte_ranges.os, "stat", lambda path: plain)
    done = threading.Event()
    caught: list[str] = []

    def attempt():
        try:
            byte_ranges.open_regular(str(tmp_path / "pipe"))
        except FetchError as error:
            caught.append(error.error_type)
        done.set()

    threading.Thread(target=attempt, daemon=True).start()
    assert done.wait(5), "opening a pipe blocked"
    assert caught == ["NotAFile"]


@pytest.mark.parametrize(
    ("number", "error_type", "transient"),
    [
        (13, "PermissionDenied", False),
        (5, "ReadError", True),
        (116, "ReadError", True),
        (24, "ReadError", True),
        (40, "BrokenLink", False),
    ],
)
def test_what_the_system_says_is_named_and_what_may_pass_is_transient(
    fetcher, make_files, monkeypatch, number, error_type, transient
):
    root = make_files({"a.jpg": b"A"})

    def fail(*args, **settings):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(byte_ranges.os, "open", fail)
    error = failure(fetcher, f"{root}/a.jpg")
    assert (error.error_type, error.transient) == (error_type, transient)


@pytest.mark.parametrize("uri", ["/no/such\0file", "/" + "x" * 5000, "relative.jpg"])
def test_impossible_paths_are_typed_failures(fetcher, uri):
    assert failure(fetcher, uri).error_type in ("BadUri", "FileNotFound")


def test_errors_survive_a_process_boundary():
    error = pickle.loads(pickle.dumps(FetchError("TooLarge", "a: too large", True)))
    assert (error.error_type, error.message, error.transient, str(error)) == (
        "TooLarge", "a: too large", True, "TooLarge: a: too large",
    )  # fmt: skip


def test_a_local_file_whose_name_looks_like_a_member_wins(fetcher, make_files):
    root = make_files({"a.tar#member=x&offset=512&size=1": b"whole", "t#row=3": b"row"})
    assert fetcher.fetch(f"{root}/a.tar#member=x&offset=512&size=1", max_bytes=1).path.read_bytes() == b"whole"
    assert fetcher.fetch(f"{root}/t#row=3", max_bytes=1).path.read_bytes() == b"row"


def test_tar_members_and_their_limits(fetcher, make_tar, list_items):
    path = make_tar([("a.jpg", b"AAAA"), ("b.jpg", b"BB")])
    rows = list_items(path)
    assert fetcher.fetch(rows["a/b"]["uri"], max_bytes=2) == Fetched(b"BB", None, 2)
    error = failure(fetcher, rows["a/a"]["uri"], max_bytes=3)
    assert (error.error_type, error.transient) == ("TooLarge", False)
    assert "member 'a.jpg' has 4 bytes; decode.max_file_bytes allows 3" in error.message
    path.unlink()
    assert failure(fetcher, rows["a/b"]["uri"]).error_type == "FileNotFound"


def test_a_tar_rewritten_after_the_listing_never_gives_another_members_bytes(fetcher, make_tar, list_items):
    before = list_items(make_tar([("a.jpg", b"AAAA"), ("b.jpg", b"BBBB")]))
    fetcher.fetch(before["a/a"]["uri"], max_bytes=9)
    after = list_items(make_tar([("b.jpg", b"bbbb"), ("a.jpg", b"aaaa")]))
    assert failure(fetcher, before["a/a"]["uri"]).error_type == "Changed"
    assert fetcher.fetch(after["a/a"]["uri"], max_bytes=9).data == b"aaaa"


def test_a_tar_cut_short_after_the_listing_is_a_failure(fetcher, make_tar, list_items):
    path = make_tar([("a.jpg", b"A" * 5000)])
    uri = list_items(path)["a/a"]["uri"]
    path.write_bytes(path.read_bytes()[:3000])
    assert failure(fetcher, uri).error_type == "Truncated"
    path.write_bytes(b"")
    assert failure(fetcher, uri).error_type == "Changed"
    assert failure(fetcher, f"{path}#member=a.jpg&offset=0&size=5").error_type == "Changed"


def test_a_tar_larger_than_memory_allows_is_read_by_range(fetcher, tmp_path, list_items):
    path = tmp_path / "sparse.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("big.mp4")
        info.size = 20 << 30
        path_offset = tar.offset
        tar.fileobj.write(info.tobuf(tarfile.PAX_FORMAT))
        tar.fileobj.seek(path_offset + 20 * (1 << 30), io.SEEK_CUR)
        tar.offset = tar.fileobj.tell()
        last = tarfile.TarInfo("z.jpg")
        last.size = 3
        tar.addfile(last, io.BytesIO(b"end"))
    rows = list_items(path)
    assert rows["sparse/big"]["size_bytes"] == 20 << 30
    assert fetcher.fetch(rows["sparse/z"]["uri"], max_bytes=10).data == b"end"
    assert failure(fetcher, rows["sparse/big"]["uri"], 512 << 20).error_type == "TooLarge"


@pytest.mark.parametrize("max_kept_bytes", [1 << 30, 0])
def test_cells_come_right_in_any_order_kept_or_streamed(fetcher, tmp_path, monkeypatch, max_kept_bytes):
    monkeypatch.setattr(parquet_cells, "MAX_KEPT_BYTES", max_kept_bytes)
    path = tmp_path / "t.parquet"
    cells = [os.urandom(50) for _ in range(700)]
    pq.write_table(pa.table({"a column": cells}), path, row_group_size=300)
    for row in [0, 1, 150, 149, 299, 300, 699, 2, 599]:
        uri = f"{path}#column=a%20column&row_group={row // 300}&row={row % 300}"
        assert fetcher.fetch(uri, max_bytes=50).data == cells[row]
    assert failure(fetcher, uri, max_bytes=49).error_type == "TooLarge"


def test_a_row_group_is_read_once_for_all_its_cells(fetcher, tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"image": [b"%d" % row for row in range(100)]}), path, row_group_size=50)
    opened = []
    original = parquet_cells.open_ranges
    monkeypatch.setattr(parquet_cells, "open_ranges", lambda name: opened.append(name) or original(name))
    for row in range(50):
        fetcher.fetch(f"{path}#column=image&row_group=0&row={49 - row}", max_bytes=10)
    assert len(opened) == 1


def test_a_rewritten_table_is_never_read_through_its_old_footer(fetcher, tmp_path):
    path = tmp_path / "t.parquet"
    uri = f"{path}#column=image&row_group=0&row=0"
    for content in (b"old", b"new and longer"):
        pq.write_table(pa.table({"image": [content]}), path)
        assert fetcher.fetch(uri, max_bytes=100).data == content
    for gone in ("column=image&row_group=9&row=0", "column=image&row_group=0&row=9", "column=other&row_group=0&row=0"):
        assert failure(fetcher, f"{path}#{gone}").error_type == "TableChanged", gone
    path.write_bytes(b"no longer a table")
    assert failure(fetcher, uri).error_type == "TableBroken"
    path.unlink()
    assert failure(fetcher, uri).error_type == "FileNotFound"


@pytest.mark.parametrize(
    ("name", "content", "caption"),
    [
        ("a.txt", b"\xef\xbb\xbf a cat \r\n", "a cat"),
        ("a.txt", "zwei\nZeilen ü".encode(), "zwei\nZeilen ü"),
        ("a.TXT", b"", ""),
        ("a.json", b'{"caption": "c", "text": "t"}', "c"),
        ("a.json", b'{"caption": null, "text": " t "}', "t"),
        ("a.json", b'{"title": "DSC_0001.JPG"}', ""),
        ("a.JSON", b'\xef\xbb\xbf{"caption": "lone \\ud800"}', "lone \\ud800"),
        ("README", b"plain", "plain"),
        ("a.txt", "a café\n".encode("utf-16"), "a café"),
        ("a.txt", b"\xfe\xff" + "a café".encode("utf-16-be"), "a café"),
        ("a.json", '{"caption": "a café"}'.encode("utf-32"), "a café"),
        ("a.txt", b"\xff\xfe", ""),
    ],
)  # fmt: skip
def test_captions(make_files, name, content, caption):
    assert read_caption(f"{make_files({name: content})}/{name}") == caption


@pytest.mark.parametrize(
    ("name", "content", "error_type"),
    [
        ("a.txt", b"caf\xe9", "CaptionNotUtf8"), ("a.txt", b"\xff\xfex", "CaptionNotUtf8"),
        ("a.txt", b"x" * ((1 << 20) + 1), "TooLarge"), ("a.json", b"{", "CaptionBroken"),
        ("a.json", b"", "CaptionBroken"),
        ("a.json", b"[]", "CaptionBroken"), ("a.json", b'{"caption": ["a"]}', "CaptionBroken"),
        ("a.json", b"[" * 100_000, "CaptionBroken"), ("a.json", b"\xff", "CaptionNotUtf8"),
        ("a.json", b'{"n": ' + b"1" * 5000 + b"}", "CaptionBroken"), ("gone.txt", None, "FileNotFound"),
    ],
)  # fmt: skip
def test_captions_that_cannot_be_read(make_files, name, content, error_type):
    with pytest.raises(FetchError) as caught:
        read_caption(f"{make_files({} if content is None else {name: content})}/{name}")
    assert (caught.value.error_type, caught.value.transient) == (error_type, False)


def open_files():
    """Links of open descriptors; that of the folder being read is gone by then."""
    return {entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


def test_no_file_stays_open(make_tar, make_files, list_items, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pq.write_table(pa.table({"id": ["a"], "image": [b"1"]}), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("id,cap\n" + "a,b\n" * 2000)
    before = open_files()
    with Fetcher() as fetcher:
        for rows in (
            list_items(make_tar([("a.jpg", b"A")])),
            list_items(make_files({"a.jpg": b"A"})),
            list_items(tmp_path / "t.parquet", columns={"id": "id", "image": "image"}),
        ):
            for row in rows.values():
                fetcher.fetch(row["uri"], max_bytes=10)
    list_items(tmp_path / "t.csv", columns={"id": "id", "caption": "cap"})
    assert open_files() == before
    assert not list(tmp_path.glob("embedder-*.part"))


def test_a_struct_may_name_an_address_of_the_web(tmp_path, list_items):
    with web_server() as server:
        (address,) = server.add_images(1)
        images = [{"bytes": None, "path": address}, {"bytes": b"other", "path": "b.png"}]
        pq.write_table(pa.table({"id": ["a", "b"], "image": images}), tmp_path / "t.parquet")
        rows = list_items(tmp_path / "t.parquet", columns={"id": "id", "image": "image"})
        with Fetcher(WebConfig(allow_private=True)) as fetcher:
            assert fetcher.fetch(rows["a"]["uri"], max_bytes=1 << 20).data == samples.image_bytes(0)
        with Fetcher(WebConfig()) as fetcher, pytest.raises(FetchError, match="PrivateAddress"):
            fetcher.fetch(rows["a"]["uri"], max_bytes=1 << 20)


@pytest.mark.parametrize("path", [pa.array([7, 8]), pa.array([b"a.png", b"b.png"])], ids=["numbers", "bytes"])
def test_a_struct_whose_path_is_no_text_is_a_reject_where_it_has_no_bytes(tmp_path, list_items, fetcher, path):
    images = pa.StructArray.from_arrays([pa.array([None, b"own"]), path], ["bytes", "path"])
    pq.write_table(pa.table({"id": ["a", "b"], "image": images}), tmp_path / "t.parquet")
    rows = list_items(tmp_path / "t.parquet", columns={"id": "id", "image": "image"})
    error = failure(fetcher, rows["a"]["uri"])
    assert (error.error_type, error.transient) == ("UnsupportedUri", False)
    assert f"row 0 of 'image' has no bytes, and its path is {path.type}" in error.message
    assert fetcher.fetch(rows["b"]["uri"], max_bytes=9).data == b"own"
    by_content = list_items(tmp_path / "t.parquet", columns={"id": "content", "image": "image"})
    assert [row["error_type"] for row in by_content.values()] == ["UnsupportedUri", None]
