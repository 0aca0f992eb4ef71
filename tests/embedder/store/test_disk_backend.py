"""A store on a disk: what a power cut may find, and file systems without hard links."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_samples import row
from store_states import new_store, publish_refresh, vectors_now

from embedder.errors import StoreError
from embedder.plugins.maintain.vacuum import vacuum
from embedder.store.backends import Disk, DiskBackend
from embedder.store.files import StoreFiles

CALLS = ("create", "sync_file", "rename", "link", "unlink", "make_folder", "sync_folder")


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


class RecordedDisk(Disk):
    """Disk that notes each change that was made: its name, and the path without the random end of unfinished names."""

    def __init__(self, root) -> None:
        self.calls: list[tuple[str, str]] = []
        for name in CALLS:
            setattr(self, name, self._noted(name, getattr(super(), name), str(root)))

    def _noted(self, name, call, root):
        def noted(*arguments):
            call(*arguments)
            path = arguments[1] if name in ("rename", "link") else arguments[0]
            self.calls.append((name, path.partition("#")[0].removeprefix(root).lstrip("/")))

        return noted


def recorded_store(folder) -> tuple[StoreFiles, RecordedDisk]:
    files, disk = StoreFiles(folder), RecordedDisk(folder)
    files.backend = DiskBackend(files.folder, disk)
    return files, disk


def test_content_is_on_the_disk_before_its_name_and_its_name_before_the_next_file(tmp_path):
    disk = RecordedDisk(tmp_path)
    backend = DiskBackend(tmp_path / "store", disk)
    backend.put("runs/a/run.json", b"1", "absent")
    backend.put("CURRENT.json", b"2", None)
    backend.put("CURRENT.json", b"3", backend.read("CURRENT.json")[1])
    folders = ["store", "store/runs", "store/runs/a"]
    run, current = "store/runs/a/run.json", "store/CURRENT.json"
    replaced = [("create", current), ("sync_file", current), ("rename", current), ("sync_folder", "store")]
    assert disk.calls == [
        *(call for folder in folders for call in (("make_folder", folder), ("sync_folder", folder_of(folder)))),
        *[("create", run), ("sync_file", run), ("link", run), ("sync_folder", "store/runs/a")],
        *replaced,
        *replaced,
    ]


def test_to_sync_is_what_the_system_calls_so(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        name = str(path.relative_to(tmp_path)).partition("#")[0]
        synced.append((name, path.is_dir() or path.stat().st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    source = tmp_path / "source"
    source.write_bytes(b"x" * 100_000)
    files = StoreFiles(tmp_path / "store")
    files.write("small.json", b"12345")
    files.upload(source, "large.bin")
    assert synced[-4:] == [("store/small.json", 5), ("store", True), ("store/large.bin", 100_000), ("store", True)]


def test_every_file_of_a_store_is_on_the_disk_before_the_next_one_is_begun(tmp_path):
    new_store(tmp_path / "store")
    files, disk = recorded_store(tmp_path / "store")
    publish_refresh(files, row("a.jpg"), row("b.jpg"))
    publish_refresh(files, row("b.jpg", modified="t1"))
    vacuum(files, keep_days=0, keep_versions=1)
    in_work: dict[str, str] = {}
    named = 0
    for name, path in disk.calls:
        if name == "create":
            assert not in_work, f"{path} is begun before {in_work} is on the disk"
            in_work[path] = name
        elif name in ("sync_file", "rename", "link"):
            assert in_work[path] == {"sync_file": "create"}.get(name, "sync_file")
            in_work[path] = name
        elif name == "sync_folder":
            done = [each for each, last in in_work.items() if folder_of(each) == path]
            named += len(done)
            assert all(in_work.pop(each) in ("rename", "link") for each in done)
    assert not in_work
    assert named > 20


def test_what_is_deleted_is_gone_from_the_disk_before_the_list_of_it_is(tmp_path):
    new_store(tmp_path / "store")
    files, disk = recorded_store(tmp_path / "store")
    for number in range(3):
        publish_refresh(files, row("a.jpg", modified=f"t{number}"))
    disk.calls.clear()
    deleted = {info.path for info in vacuum(files, keep_days=0, keep_versions=1).deleted}
    gone = [path for name, path in disk.calls if name == "unlink"]
    assert set(gone[:-1]) == deleted
    assert gone[-1].startswith("deletions/")
    last = disk.calls.index(("unlink", gone[-1]))
    final = max(number for number, call in enumerate(disk.calls[:last]) if call[0] == "unlink")
    assert {path for name, path in disk.calls[final:last] if name == "sync_folder"} == {
        folder_of(path) for path in deleted
    }
    listed = disk.calls.index(("rename", "CURRENT.json"))
    assert all(disk.calls.index(("unlink", path)) > listed for path in deleted), "CURRENT.json names them first"
    assert disk.calls.index(("link", gone[-1])) < listed


@pytest.fixture(params=[None, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def _links(request, monkeypatch):
    """File systems with hard links, and those without."""

    def refused(*_):
        raise OSError(request.param, os.strerror(request.param))

    if request.param is not None:
        monkeypatch.setattr(os, "link", refused)


@pytest.mark.usefixtures("_links")
def test_of_many_that_create_a_file_one_does_with_hard_links_and_without(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        stores = [StoreFiles(tmp_path / "store") for _ in range(8)]
        made = list(pool.map(lambda number: stores[number].create("a/b.json", str(number).encode()), range(8)))
    assert sum(made) == 1
    assert stores[0].read("a/b.json") == str(made.index(True)).encode()
    assert [path.name for path in (tmp_path / "store" / "a").iterdir()] == ["b.json"]


@pytest.mark.usefixtures("_links")
def test_a_store_lives_on_a_file_system_with_hard_links_and_without(tmp_path):
    files = new_store(tmp_path / "store")
    publish_refresh(files, row("a.jpg"))
    publish_refresh(files, row("b.jpg"))
    vacuum(files, keep_days=0, keep_versions=1)
    assert set(vectors_now(files)) == {"a.jpg", "b.jpg"}
    assert not [info.path for info in files.list("") if "#" in info.path]


def test_a_disk_that_fails_while_a_file_is_named_leaves_nothing_of_it(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "link", broken)
    files = StoreFiles(tmp_path / "store")
    with pytest.raises(OSError, match="broken"):
        files.create("a.json", b"1")
    assert list(files.list("")) == []


def test_a_place_that_can_not_be_looked_at_is_told_with_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(StoreError, match="^store [^\n]*: file name too long; give a shorter name"):
        StoreFiles(tmp_path / ("a" * 300))
    monkeypatch.setattr(Path, "is_file", _refuse)  # as in a folder that may not be entered, but for root
    with pytest.raises(StoreError, match="^store [^\n]*: permission denied; check its rights"):
        StoreFiles(tmp_path)


def _refuse(*_):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
