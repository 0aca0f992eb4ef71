"""Files that appear whole or not at all."""

import threading

import pytest

from embedder.storage.atomic_write import atomic_write


def test_a_file_is_replaced_when_all_of_it_is_written(tmp_path):
    path = tmp_path / "report.json"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_may_have_the_longest_name_there_is(tmp_path):
    path = tmp_path / ("日" * 83 + ".csv")
    with atomic_write(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "report.json"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write(b"ne")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_one_file_never_mix(tmp_path):
    path = tmp_path / "curves.png"
    started = threading.Barrier(4)

    def write(content: bytes) -> None:
        with atomic_write(path) as file:
            started.wait()
            for _ in range(100):
                file.write(content)

    threads = [threading.Thread(target=write, args=(bytes([n]) * 1000,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data = path.read_bytes()
    assert (len(data), len(set(data))) == (100_000, 1)
    assert list(tmp_path.iterdir()) == [path]


def test_files_go_by_the_umask_like_any_other(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    with atomic_write(tmp_path / "a") as file:
        file.write(b"1")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode
