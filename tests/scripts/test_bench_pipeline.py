"""The benchmark of the pipeline: what it counts, what it refuses, and what it prints; no clock is judged."""

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from script_runs import SCRIPTS, found_by


@pytest.fixture
def make_vectors():
    from bench_pipeline import Vectors

    def make(num_items=5, seed=0, **changes):
        generator = np.random.default_rng(seed)
        sides = {
            name: (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
            for name, rows in (("images", generator.normal(size=(num_items, 8))), ("texts", np.eye(num_items, 8) + 1))
        }
        return Vectors(**{"ids": tuple(f"{number:06d}.png" for number in range(num_items))} | sides | changes)

    return make


def call(step, started_s, wall_s, num_rows=1, cpu_s=0.0):
    return {"step": step, "started_s": started_s, "wall_s": wall_s, "num_rows": num_rows, "cpu_s": cpu_s}


def test_steady_window_counts_what_was_finished_between_the_quarters():
    from bench_pipeline import steady_window

    window = steady_window([(time_s, 10) for time_s in (40.0, 30.0, 20.0, 14.0, 13.0, 12.0, 11.0, 1.0)])
    assert (window.start_s, window.stop_s, window.num_items) == (11.0, 20.0, 40)
    assert window.items_per_s == pytest.approx(40 / 9)


@pytest.mark.parametrize("finished", [[], [(1.0, 10)], [(1.0, 1), (2.0, 8), (3.0, 1)], [(1.0, 5), (1.0, 5)]])
def test_there_is_no_steady_rate_of_one_batch(finished):
    from bench_pipeline import steady_window

    assert steady_window(finished) is None


def test_items_are_finished_when_the_last_stage_hands_them_on():
    from bench_pipeline import last_stage_events

    calls = [
        call("stage 10", 5.0, 1.0, 32),
        call("stage 2", 9.0, 1.0, 64),
        call("decode", 9.5, 1.0),
        call("write", 9, 9),
    ]
    assert last_stage_events(calls) == [(6.0, 32)]


def test_equal_vectors_pass_with_their_least_cosine(make_vectors):
    from bench_pipeline import check_equal

    first = make_vectors()
    rounded = make_vectors(images=first.images.astype(np.float16).astype(np.float32))
    least = check_equal({"first": first, "rounded": rounded})
    assert least["first"] == pytest.approx(1, abs=1e-6) and 0.999 <= least["rounded"] <= 1


def test_unequal_vectors_are_refused(make_vectors):
    from bench_pipeline import UnequalVectorsError, check_equal

    first = make_vectors()
    close = np.ones((5, 8), np.float32) + first.texts * 1e-3  # all within a cosine of 0.999, and yet in the wrong order
    wrong = {
        "another image": (first, make_vectors(images=first.images[::-1]), "cosine"),
        "another caption": (first, make_vectors(texts=-first.texts), "cosine"),
        "nothing": (first, make_vectors(images=first.images * np.nan), "cosine"),
        "a row less": (first, make_vectors(num_items=4), "1 of the 5"),
        "other names": (first, make_vectors(ids=tuple("abcde")), "5 of the 5"),
        "another width": (first, make_vectors(images=first.images[:, :4]), "shapes"),
        "order": (make_vectors(texts=close), make_vectors(texts=np.roll(close, 1, axis=0)), "nearer to another"),
    }
    for name, (reference, other, message) in wrong.items():
        with pytest.raises(UnequalVectorsError, match=message):
            check_equal({"reference": reference, name: other})


def test_vectors_are_read_from_two_columns_or_from_one_in_the_order_of_ids(tmp_path, make_vectors):
    from bench_pipeline import read_files

    from pipeline_bench.plain import write_vectors

    expected = make_vectors()
    shuffled = [3, 1, 4, 0, 2]
    ids = [expected.ids[row] for row in shuffled]
    images, texts = expected.images[shuffled], expected.texts[shuffled]
    both = pa.table({"item_id": ids, "vectors": np.concatenate([images, texts], axis=1).tolist()})
    (tmp_path / "one" / "vectors").mkdir(parents=True)
    (tmp_path / "two").mkdir()
    for part in (slice(0, 3), slice(3, 5)):
        pq.write_table(both.slice(part.start, 3), tmp_path / "one" / "vectors" / f"{part.start}.parquet")
        write_vectors(tmp_path / "two", str(part.start), ids[part], images[part], texts[part])
    for name in ("two", "one"):
        found = read_files(tmp_path / name)
        assert found.ids == expected.ids
        np.testing.assert_array_equal(found.images, expected.images)
        np.testing.assert_array_equal(found.texts, expected.texts)


def test_pairs_are_repeated_and_no_two_files_are_equal(tmp_path):
    from corpus import write_pairs

    write_pairs(tmp_path / "in", 5, [(b"a", ".jpg", "first"), (b"b", ".jpg", "second")])
    images = sorted((tmp_path / "in").glob("*.jpg"))
    assert [path.name for path in images] == [f"{number:06d}.jpg" for number in range(5)]
    assert [path.read_bytes() for path in images] == [b"a", b"b", b"a2", b"b3", b"a4"]
    assert (tmp_path / "in" / "000003.txt").read_text() == "second"


def test_captions_of_photographs_are_in_their_names(tmp_path):
    from bench_pipeline import read_photographs

    for name in ("n01440764_tench.JPEG", "n01_great_white_shark.jpg", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    assert {caption for _, _, caption in read_photographs(tmp_path, 9)} == {
        "a photograph of a tench",
        "a photograph of a great white shark",
    }
    with pytest.raises(SystemExit, match="no JPEG"):
        read_photographs(SCRIPTS, 9)


CONTESTANT = """
import sys, time
from pathlib import Path
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
out = Path(sys.argv[1])
for _ in range(8):
    with (out / "finished.txt").open("a") as file:
        file.write(f"{time.time():.6f} 1\\n")
(out / "vectors").mkdir()
rows = np.eye(8, dtype=np.float32)
columns = [[str(n) for n in range(8)], rows.tolist(), np.roll(rows, int(sys.argv[2]), axis=0).tolist()]
pq.write_table(pa.table(columns, ["item_id", "image_embedding", "text_embedding"]), out / "vectors" / "all.parquet")
"""
"""What a contestant leaves, written without torch, which takes seconds to import."""


def make_contestant(name, program=CONTESTANT, roll=0):
    from bench_pipeline import Contestant

    return Contestant(name, lambda out: [sys.executable, "-c", program, str(out), str(roll)])


@pytest.mark.medium
def test_each_round_begins_with_another_contestant_and_keeps_no_files(tmp_path, capsys):
    from bench_pipeline import hold

    standings = hold([make_contestant("a"), make_contestant("b")], tmp_path, 2, 60.0)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in said] == ["a", "b", "b", "a"]
    assert list(standings) == ["a", "b"] and list(tmp_path.iterdir()) == []
    found = standings["b"].to_json()
    assert len(found["rounds"]) == 2 and found["least_cosine"] == 1 and found["whole_s"] >= found["first_s"] > 0


@pytest.mark.medium
def test_a_contest_ends_loudly_when_one_computes_something_else_or_fails(tmp_path):
    from bench_pipeline import UnequalVectorsError, hold

    from harness import CommandFailedError

    with pytest.raises(UnequalVectorsError, match="wrong against right"):
        hold([make_contestant("right"), make_contestant("wrong", roll=1)], tmp_path / "1", 1, 60.0)
    with pytest.raises(CommandFailedError, match=r"(?s)exit code 1.*no such luck"):
        hold([make_contestant("broken", "raise ValueError('no such luck')")], tmp_path / "2", 1, 60.0)
    with pytest.raises(CommandFailedError, match="took longer than 1 s"):
        hold([make_contestant("slow", "import time; time.sleep(60)")], tmp_path / "3", 1, 1.0)


def test_table_and_bounds_show_rates_and_what_is_missing(capsys):
    from bench_pipeline import Standing, Turn, show_standings

    def standing(rate, cores):
        cpu_ms = None if rate is None else 1e3 * cores / rate
        return Standing((Turn(rate, cpu_ms, cores, 3.0, 9.0, 2**30),), 0.99995)

    standings = {
        "limit": standing(40.0, 2.0),
        "loop": standing(20.0, 1.0),
        "ray, 3 stages": standing(30.0, 1.9),
        "local": standing(None, None),
    }
    show_standings("a title", standings, 2, 10**9)
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.startswith("ray, 3 stages"))
    assert row.split()[3:] == ["30.0", "0.75", "1.50", "63.3", "1.90", "3.0", "9.0", "1,024", "0.99995"]
    assert "limit: the cores, 2.00 of 2 busy, 50.0 ms of CPU an item; 40 GFLOP/s at 1.00 GFLOP an item" in printed
    assert "loop: waiting: 1.00 of 2 cores busy" in printed and "local: too short to tell" in printed
    assert "+13.3 ms against the limit's 50.0" in printed


def test_another_checkout_takes_part_with_its_own_pipeline(tmp_path):
    from bench_pipeline import contestants, settings_of

    from harness import run_watched
    from pipeline_bench.plain import Task

    (tmp_path / "embedder").mkdir()
    (tmp_path / "embedder" / "__init__.py").touch()
    (tmp_path / "embedder" / "__main__.py").write_text("import sys; print(*sys.argv[1:3], 'by another checkout')")
    options = Namespace(only="loop,ray3", daft=None, set=[], beside=[tmp_path])
    found = contestants(Task("model", "items", 8, 8, "float32"), settings_of(8, 1), options, 2)
    assert [each.name for each in found] == ["loop", "ray, 3 stages", f"ray, 3 stages of {tmp_path.name}"]
    assert [each.checkout for each in found] == [None, None, tmp_path]
    watched = run_watched(found[2].command(tmp_path), tmp_path, 60.0, checkout=found[2].checkout)
    assert watched.last_line == "embed items by another checkout"


def test_checkouts_are_compared_round_by_round(capsys):
    from bench_pipeline import Contestant, Standing, Turn, paired_ratios

    def standing(*rates):
        return Standing(tuple(Turn(rate, 1e3 / rate, 2.0, 3.0, 9.0, 2**30) for rate in rates), 1.0)

    old = Contestant("local of old", list, has_store=True, checkout=Path("/old"))
    standings = {"local": standing(10.0, 30.0, 20.0), "local of old": standing(10.0, 20.0, 25.0)}
    found = paired_ratios(standings, [Contestant("local", list), old])
    assert found["local of old"]["items_per_s"] == (1.0, 0.8, 1.5)
    assert found["local of old"]["first_s"] == (1.0, 1.0, 1.0)
    assert "over local of old, 3 rounds: items_per_s 1.00 [0.80, 1.50]" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quick_run_compares_the_pipeline_with_the_loop_and_ends_with_json():
    options = ["--quick", "--num-emoji", "16", "--timeout", "300"]
    found = found_by("bench_pipeline.py", *options)
    assert set(found) == {"num_cores", "dtype", "rounds", "workloads", "versions"}
    small = found["workloads"]["small"]
    assert small["num_items"] == small["num_distinct"] == 16 and set(small["contestants"]) == {"loop", "local"}
    for standing in small["contestants"].values():
        assert standing["least_cosine"] >= 0.999 and standing["peak_bytes"] > 0 and len(standing["rounds"]) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_best_numbers_are_found_by_short_runs(tmp_path, monkeypatch):
    import bench_pipeline

    from corpus import DEMO_MODEL, shipped_pairs, write_pairs
    from pipeline_bench.plain import Task

    monkeypatch.setattr(bench_pipeline, "BATCH_SIZES", (2, 4))
    monkeypatch.setattr(bench_pipeline, "MIN_BATCHES", 2)
    items = write_pairs(tmp_path / "items", 32, shipped_pairs()[:16])
    settings = bench_pipeline.tuned(Task(str(DEMO_MODEL), str(items), 32, 16, "float32"), 1, tmp_path / "tuning", 120.0)
    tried = ("limit, batch_size 2", "limit, batch_size 4", "limit, num_threads 1")
    assert set(settings["trials"]) == {*tried, "loop, num_threads 1", "loop, num_workers 1"}
    assert settings["loop"]["batch_size"] == settings["limit"]["batch_size"] in (2, 4)
    assert min(settings["trials"].values()) > 0
