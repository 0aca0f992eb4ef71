"""Numbered versions appear whole; leftovers of a killed build are recognised, removed, and never mistaken for one."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from index_samples import Build, make_ids, make_vectors

from index.atomic_folder import sweep_leftovers, whole_folder
from index.index_errors import RetrievalError
from index.search import open_index
from index.versions import list_versions, next_version, version_path

SLOW_BUILD = """
import sys
import numpy as np, pyarrow as pa
from pathlib import Path
from index.build import build_index

def blocks():
    yield np.eye(4, dtype=np.float32)
    print("half-built", flush=True)
    sys.stdin.read()

ids = pa.table({"item_id": list("abcd"), "segment": pa.array([0] * 4, pa.int32())})
build_index(blocks(), ids, Path(sys.argv[1]), model_fingerprint="m", embeddings_version=1)
"""


@pytest.fixture
def half_built(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A store's index folder, and another process that is in the middle of building version 1."""
    root = tmp_path / "index"
    command = [sys.executable, "-c", textwrap.dedent(SLOW_BUILD), str(root / "000001")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half-built\n"
        yield root, process
        process.kill()


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def test_names_are_six_digits_and_sort_as_numbers(tmp_path: Path) -> None:
    assert version_path(tmp_path, 1) == tmp_path / "000001"
    assert version_path(str(tmp_path), 123_456) == tmp_path / "123456"
    assert version_path(tmp_path, 1_234_567) == tmp_path / "1234567"


@pytest.mark.parametrize("version", [0, -1])
def test_versions_count_from_one(tmp_path: Path, version: int) -> None:
    with pytest.raises(RetrievalError, match="versions count from 1"):
        version_path(tmp_path, version)


def test_a_store_without_an_index_has_no_version_and_starts_at_one(tmp_path: Path) -> None:
    assert list_versions(tmp_path / "index") == ()
    assert next_version(tmp_path / "index") == 1


def test_only_whole_versions_are_listed_and_no_number_is_used_twice(build: Build, tmp_path: Path) -> None:
    root = tmp_path / "index"
    for version in (2, 10):
        build(out=version_path(root, version))
    for name in ("000011", "12", "000000", "notes", ".building-000012-aa", "000013.bak"):
        (root / name).mkdir()
    assert list_versions(root) == (2, 10)
    assert next_version(root) == 12


def test_a_build_in_progress_is_not_seen_and_not_swept(
    half_built: tuple[Path, subprocess.Popen[str]], build: Build
) -> None:
    root, process = half_built
    assert list_versions(root) == ()
    assert next_version(root) == 1
    assert sweep_leftovers(root) == []
    build(out=root / "000002")
    assert len(leftovers(root)) == 1
    process.communicate("go on", timeout=60)
    assert process.returncode == 0
    assert list_versions(root) == (1, 2)
    assert leftovers(root) == []
    assert len(open_index(root / "000001")) == 4


def test_a_killed_build_leaves_no_version_and_the_next_build_sweeps_it(
    half_built: tuple[Path, subprocess.Popen[str]], build: Build
) -> None:
    root, process = half_built
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert len(leftovers(root)) == 1
    assert list_versions(root) == ()
    build(out=version_path(root, next_version(root)))
    assert leftovers(root) == []
    assert list_versions(root) == (1,)


def test_the_slower_of_two_builds_of_one_version_is_refused_and_cleans_up(
    half_built: tuple[Path, subprocess.Popen[str]], build: Build
) -> None:
    root, process = half_built
    build(make_vectors(300), ids=make_ids(300), out=root / "000001")
    process.communicate("go on", timeout=60)
    assert process.returncode == 1
    assert leftovers(root) == []
    assert len(open_index(root / "000001")) == 300


def test_a_failed_build_removes_what_it_made(build: Build, tmp_path: Path) -> None:
    def broken() -> Iterator[object]:
        yield make_vectors(10)
        raise ConnectionError("the store went away")

    with pytest.raises(ConnectionError, match="went away"):
        build(broken(), ids=make_ids(10))
    assert list((tmp_path / "index").iterdir()) == []


def test_builders_and_sweepers_at_once_never_remove_each_others_folders(tmp_path: Path) -> None:
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            sweep_leftovers(tmp_path)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for version in range(1, 200):
            with whole_folder(version_path(tmp_path, version)) as folder:
                (folder / "manifest.json").write_text("{}")
    finally:
        stop.set()
        sweeper.join()
    assert list_versions(tmp_path) == tuple(range(1, 200))


def test_a_folder_swept_just_before_its_lock_is_taken_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that opens, locks and removes the new folder between the builder's open and its flock."""
    flock, swept = fcntl.flock, []

    def sweep_first_then_lock(descriptor: int, operation: int) -> None:
        if not swept:
            swept.extend(tmp_path.glob(".building-*"))
            swept[0].rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first_then_lock)
    with whole_folder(tmp_path / "000001") as folder:
        (folder / "manifest.json").write_text("{}")
    assert len(swept) == 1
    assert list_versions(tmp_path) == (1,)


def test_sweeping_a_folder_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert sweep_leftovers(tmp_path / "nothing") == []
