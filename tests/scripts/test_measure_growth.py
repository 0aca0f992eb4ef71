"""The measurement of growth: what it adds up, and that its commands run; no clock is judged."""

import json
import os
import subprocess
import sys

import psutil
import pytest
from script_runs import found_by

import embedder


def test_processes_are_told_apart_by_what_ran_in_them():
    from growth.processes import COMMAND, DAEMONS, OTHERS, TASKS, WORKERS, Seen, kinds

    seen = {
        (1, 0.0): Seen(0, "python -m embedder embed"),
        (2, 0.0): Seen(1, "/ray/core/src/ray/raylet/raylet --store"),
        (3, 0.0): Seen(2, "ray::MapWorker(MapBatches(Stage))"),
        (4, 0.0): Seen(2, "ray::IDLE"),
        (5, 0.0): Seen(4, "python embedder/media/sandbox_server.py"),
        (6, 0.0): Seen(2, "ray::IDLE"),
        (7, 0.0): Seen(2, "ray::DashboardAgent"),
        (8, 0.0): Seen(1, "sleep"),
        (9, 0.0): Seen(2, "ray::IDLE"),
    }
    calls = [{"step": step, "pid": pid} for step, pid in (("load 0", 3), ("stage 0", 3), ("decode", 4), ("write", 9))]
    of_kind = {pid: kind for (pid, _), kind in kinds(seen, calls, 1).items()}
    assert of_kind == {
        1: COMMAND,
        2: DAEMONS,
        3: "stage 0",
        4: TASKS,
        5: TASKS,
        6: WORKERS,
        7: DAEMONS,
        8: OTHERS,
        9: TASKS,
    }


def test_a_leak_shows_between_the_second_and_the_last_quarter():
    from growth.processes import growth_by_kind

    def growth(*values):
        return dict(zip(("num_processes", "early", "late", "peak"), values, strict=True))

    a, b, late = (1, 0.0), (2, 0.0), (3, 9.0)
    looks = [(at_s, {a: 100 + 10 * at_s, b: 7}) for at_s in range(9)] + [(9, {a: 190, b: 7, late: 5})]
    found = growth_by_kind(looks, {a: "stage 0", b: "tasks", late: "tasks"}, 0.0, 8.0)
    assert found == {"stage 0": growth(1, 130, 170, 190), "tasks": growth(2, 7, 7, 12)}
    assert growth_by_kind(looks, {a: "x", b: "x", late: "x"}, 100.0, 108.0)["x"] == growth(3, None, None, 202)


def test_memory_of_each_process_is_kept_and_one_that_has_ended_is_left_out():
    from growth.processes import MemoryLooks

    child = psutil.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    memory, here = MemoryLooks(), psutil.Process()
    memory.look([here, child], now=True)
    child.communicate(b"\n")
    memory.look([here, child], now=True)
    (_, both), (_, one) = memory.looks
    assert {pid for pid, _ in both} == {os.getpid(), child.pid} and {pid for pid, _ in one} == {os.getpid()}
    assert memory.num_bytes == max(sum(both.values()), sum(one.values())) > 0


WHAT = ["all new, --dry-run", "make the store", "unchanged", "1 % changed, --dry-run"]


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_objects_of_a_bucket_are_listed_and_compared(tmp_path):
    from growth.bucket import measure_bucket

    taken = measure_bucket(tmp_path / "bucket", 25_678)  # three folders, which are listed at once
    assert [each["what"] for each in taken] == [f"bucket: {what}" for what in WHAT]
    assert all(each["cpu_s"] > 0 and each["num_names"] == 25_678 for each in taken)


def test_pages_of_the_made_up_bucket_are_cut_as_those_of_a_bucket():
    from growth.bucket import ManyObjects

    server = ManyObjects.__new__(ManyObjects)
    server.num_objects, server.changed_every = 10_500, 0
    assert server.page("pictures/", "/", None).count("<CommonPrefixes>") == 2
    last = server.page("pictures/000001/", None, None)
    assert last.count("<Contents>") == 500 and "pictures/000001/000010000.jpg" in last and "Token" not in last
    first = server.page("pictures/", None, None)
    assert first.count("<Contents>") == 1000 and "<NextContinuationToken>1000<" in first
    server.changed_every = 100
    assert server.page("pictures/", None, "1000").count("f&quot;") == 10


@pytest.mark.slow
def test_names_are_listed_published_and_compared(tmp_path, capsys):
    from growth.names import measure_names, show_names

    taken = measure_names(tmp_path, 1234)  # it checks what each command finds
    assert [each["what"] for each in taken] == WHAT
    assert all(each["peak_bytes"] > 2**24 and each["cpu_s"] > 0 and each["num_names"] == 1234 for each in taken)
    assert sum(path.stat().st_size == 2 for path in (tmp_path / "names").rglob("*.png")) == 13, "1 % changed"
    show_names(taken)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(taken)


def test_a_command_that_fails_ends_the_measurement():
    from growth.names import take
    from harness import CommandFailedError

    with pytest.raises(CommandFailedError, match="succeeds"):
        take([sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.slow
def test_a_word_index_is_built_updated_and_asked(tmp_path, capsys):
    from growth.words import STEPS, measure_words, show_words

    taken = measure_words(tmp_path / "s", 3000)
    assert [row["step"] for row in taken] == list(STEPS)
    assert taken[-1]["p50_ms"] > 0 and taken[-1]["index_mib"] > 0
    capsys.readouterr()
    show_words(taken)
    assert len(capsys.readouterr().out.splitlines()) == len(taken)


@pytest.mark.slow
def test_a_store_is_opened_and_asked_by_vectors_and_words(tmp_path, capsys):
    from growth.hybrid import NUM_QUERIES, QUERIES_NAME, measure_hybrid, show_hybrid

    taken = measure_hybrid(tmp_path / "s", 1500)
    assert [row["step"] for row in taken] == ["make", "towers", "build", "ask"]
    assert 0 < taken[-1]["p50_ms"] <= taken[-1]["p99_ms"] and taken[-1]["rss_bytes"] <= taken[-1]["peak_bytes"]
    store = embedder.open_store(tmp_path / "s" / "store")
    assert store.current.index is not None and store.info.searched == "image"
    queries = json.loads((tmp_path / "s" / QUERIES_NAME).read_text())
    assert len(queries) == 1 + NUM_QUERIES
    for hit in store.search(queries[0], hybrid=True):
        assert hit.words_rank is None or set(hit.caption.split()) & set(queries[0].split())
    (again,) = measure_hybrid(tmp_path / "s", 1500)
    assert again["step"] == "ask", "a store that is there is not made again"
    capsys.readouterr()
    show_hybrid(taken)
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.slow(rotates=True)
@pytest.mark.timeout(480)
def test_items_are_embedded_and_the_last_line_is_json():
    found = found_by(
        "measure_growth.py",
        16,
        "--names",
        20,
        "--compared",
        50,
        "--versions",
        3,
        "--embedded",
        60,
        "--captions",
        40,
        "--timeout",
        180,
        timeout_s=400,
    )
    assert [run["num_items"] for run in found["items"]["runs"]] == [16]
    for run in found["items"]["runs"]:
        assert {"command", "stage 0", "stage 1", "stage 2", "tasks"} <= set(run["by_kind"])
        assert run["peak_bytes"] > max(kind["peak"] for kind in run["by_kind"].values())
    assert [each["num_names"] for each in found["names"]] == ([2] * 4 + [20] * 4) * 2
    steps = {each["what"] for each in found["log"]}
    assert steps >= {
        "commit as many part files at once",
        "history",
        "publish another item",
        "idle night after that",
        "vacuum",
    }
    (driver,) = found["driver"]
    assert driver["num_items"] == 60 and driver["peak_bytes"] >= driver["late_bytes"] > 2**24
