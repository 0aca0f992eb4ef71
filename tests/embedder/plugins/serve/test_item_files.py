"""Files of items are those that were embedded: no link out of their source, no other file in their place; else 409."""

import os
import pickle
import shutil
import tarfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from running_server import running
from served import Served

import embedder
from embedder.config import load_config
from embedder.ingest.embed import embed
from embedder.sources.fetch import FetchError

CLIP, PICTURE = "files:clips/0.mp4", "files:pictures/0000.png"
SECRET = b"TOP SECRET of the server\n"


@pytest.fixture(scope="module")
def live(tiny_model, tmp_path_factory):
    """A server over items of every kind of local source, one of which is a link itself and has a link inside."""
    folder = tmp_path_factory.mktemp("item_files")
    files = samples.folder(folder / "real", num_images=2, num_clips=2)
    (files / "pictures" / "same.png").symlink_to("0001.png")
    (folder / "files").symlink_to(files)
    for name in ("tars", "named", "cells"):
        (folder / name).mkdir()
        shutil.copy(files / "pictures" / "0001.png", folder / name / "1.png")
    with tarfile.open(folder / "tars" / "a.tar", "w") as tar:
        tar.add(folder / "tars" / "1.png", "1.png")
    (folder / "tars" / "1.png").unlink()
    pq.write_table(pa.table({"id": ["1"], "image": ["1.png"]}), folder / "named" / "a.parquet")
    cells = [{"bytes": samples.image_bytes(0), "path": None}, {"bytes": None, "path": "1.png"}]
    pq.write_table(pa.table({"id": ["bytes", "path"], "image": cells}), folder / "cells" / "a.parquet")
    sources = [
        {"name": "files", "path": str(folder / "files")},
        {"name": "tars", "path": str(folder / "tars")},
        *(
            {"name": name, "path": str(folder / name / "a.parquet"), "columns": {"id": "id", "image": "image"}}
            for name in ("named", "cells")
        ),
    ]
    chosen = {"model": str(tiny_model), "store": str(folder / "store"), "source": sources, "engine": "local"}
    config = load_config(overrides=chosen)
    embed(config)
    with running(config.store, cache_bytes=0, cache_dir=folder / "cache") as url:
        yield Served(url, config, folder)


def hit_of(live, item_id):
    (hit,) = live.store.search("a car", k=1, where=f"item_id = '{item_id}'")
    return hit


@contextmanager
def replaced(path: Path):
    """Put something in the place of a file or folder, which comes back afterwards."""
    away = path.rename(path.with_name("away"))
    try:
        yield away
    finally:
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
        away.rename(path)


def like(path: Path, content: bytes, original: Path, *, size=True, time=True):
    """Write a file with the size and the time of another one."""
    status = original.stat()
    path.write_bytes(content.ljust(status.st_size, b"x")[: status.st_size] if size else content)
    if time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def out_of_its_source(path: Path):
    with replaced(path) as original:
        secret = path.parents[2] / "secret"
        like(secret, SECRET, original)
        path.symlink_to(secret)
        yield


def by_a_folder_out_of_its_source(path: Path):
    outside = path.parents[2] / "outside"
    shutil.copytree(path.parent, outside, copy_function=shutil.copy2)
    with replaced(path.parent):
        path.parent.symlink_to(outside)
        yield
    shutil.rmtree(outside)


def to_another_item(path: Path):
    with replaced(path):
        path.symlink_to("1.mp4")
        yield


def in_a_circle(path: Path):
    with replaced(path):
        path.symlink_to(path.name)
        yield


def other_content_of_its_size(path: Path):
    with replaced(path) as original:
        like(path, original.read_bytes()[::-1], original, time=False)
        yield


def other_content_of_its_time(path: Path):
    with replaced(path) as original:
        like(path, original.read_bytes() + b"more", original, size=False)
        yield


def other_kind_of_its_size_and_time(path: Path):
    with replaced(path) as original:
        like(path, SECRET, original)
        yield


def a_pipe(path: Path):
    with replaced(path):
        os.mkfifo(path)
        yield


REPLACED = [
    out_of_its_source,
    by_a_folder_out_of_its_source,
    to_another_item,
    in_a_circle,
    other_content_of_its_size,
    other_content_of_its_time,
    other_kind_of_its_size_and_time,
    a_pipe,
]


@pytest.mark.medium
@pytest.mark.parametrize("replace", REPLACED)
def test_what_takes_the_place_of_a_clip_is_not_given_out(live, replace, tmp_path):
    content = (live.source / "files/clips/0.mp4").read_bytes()
    hit = hit_of(live, CLIP)
    with contextmanager(replace)(live.source / "files/clips/0.mp4"):
        clip = live.item(CLIP, "/clip")
        assert (clip.status, clip.error["where"]) == (409, f"item {CLIP}"), clip.body
        assert "changed since it was embedded" in clip.error["what"]
        assert "embedder refresh" in clip.error["cure"]
        assert str(live.source) not in clip.body.decode()
        original = live.item(CLIP, "/file")
        assert (original.status, original.error) == (409, clip.error)
        image = live.item(CLIP, "/image")
        assert image.status == (422 if replace is other_kind_of_its_size_and_time else 409), image.body
        for found in (hit, pickle.loads(pickle.dumps(hit))):
            with pytest.raises(FetchError):
                found.read()
        hits = live.store.search("a car", k=1, where=f"item_id = '{CLIP}'")
        assert hits.thumbnails() == [None]
        copied = hits.copy_files(tmp_path / "copies")
        assert (copied.num_files, len(copied.problems)) == (0, 1)
    again = live.item(CLIP, "/clip")
    assert (again.status, again.body) == (200, content), "what comes back as it was is shown again"
    assert hit.read() == content


@pytest.mark.parametrize("replace", [out_of_its_source, other_content_of_its_size])
@pytest.mark.parametrize(
    ("item_id", "path"),
    [
        (PICTURE, "files/pictures/0000.png"),
        ("files:pictures/same.png", "files/pictures/same.png"),
        ("tars:a/1", "tars/a.tar"),
        ("named:1", "named/1.png"),
        ("cells:bytes", "cells/a.parquet"),
        ("cells:path", "cells/1.png"),
    ],
)
def test_files_of_every_kind_of_source_are_shown_unless_others_take_their_place(live, item_id, path, replace):
    assert live.item(item_id, "/image").status == 200
    content = hit_of(live, item_id).read()
    assert content.startswith(b"\x89PNG")
    original = live.item(item_id, "/file")
    assert (original.status, original.body, original.headers["Content-Type"]) == (200, content, "image/png")
    with contextmanager(replace)(live.source / path):
        assert live.item(item_id, "/image").status == live.item(item_id, "/file").status == 409
        with pytest.raises(FetchError):
            hit_of(live, item_id).read()
    assert live.item(item_id, "/image?size=160").status == 200


def test_a_clip_is_read_from_the_file_that_was_looked_at(live, monkeypatch):
    """A link that comes between the look and the sandbox's own opening is not followed."""
    from embedder.media.sandbox import SandboxedDecoder

    path = live.source / "files/clips/0.mp4"
    other = samples.clip(live.source / "other.mp4", size=96)
    decode, shapes = SandboxedDecoder.frame_at, []

    def decode_late(self, source, *arguments):
        with replaced(path):
            path.symlink_to(other)
            shapes.append(decode(self, source, *arguments).shape)
            return decode(self, source, *arguments)

    monkeypatch.setattr(SandboxedDecoder, "frame_at", decode_late)
    assert live.item(CLIP, "/image").status == 200
    assert shapes == [(48, 48, 3)]
    for _ in range(5):
        assert live.item(CLIP, "/image").status == 200
    assert clips_open(live.source) == [], "each file is closed"


def clips_open(folder):
    """Clips of a folder that this process holds open; its sockets come and go with other tests."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(descriptor.readlink()))
    return [name for name in found if name.startswith(str(folder)) and ".mp4" in name]


@pytest.mark.medium
def test_what_was_embedded_again_is_shown(live):
    path = live.source / "files/pictures/0000.png"
    path.write_bytes(samples.image_bytes(5))
    opened = hit_of(live, PICTURE)
    with pytest.raises(FetchError, match="changed since it was embedded; `embedder refresh`"):
        opened.read()
    embed(live.config)
    assert hit_of(live, PICTURE).read() == samples.image_bytes(5)
    assert embedder.open_store(live.config.store).items().num_rows == 9


def test_an_original_is_sent_by_ranges_and_kept_under_its_name(live):
    content = hit_of(live, "files:pictures/0001.png").read()
    address = "/items/files%3Apictures%2F0001.png/file"
    part = live.get(address, Range="bytes=5-9")
    assert (part.status, part.body) == (206, content[5:10])
    assert part.headers["Content-Range"] == f"bytes 5-9/{len(content)}"
    beyond = live.get(address, Range=f"bytes={len(content)}-")
    assert beyond.status == 416
    assert live.get(address).headers["Content-Disposition"] == "inline; filename*=UTF-8''0001.png"
    kept = live.get(f"{address}?download=1")
    assert kept.headers["Content-Disposition"] == "attachment; filename*=UTF-8''0001.png"
    assert live.get(address, If_None_Match=kept.headers["ETag"]).status == 304
    head = live.get(address, method="HEAD")
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", str(len(content)))
    assert live.get("/items/nothing/file").status == 404
