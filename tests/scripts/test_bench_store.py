"""The benchmark of the store on tiny input: what it measures, and beside what; no clock is judged."""

from pathlib import Path

import numpy as np
import pytest
from bench_store import change_rows, drop_from_cache, make_store, rows_of, search_flat, time_vectors
from script_runs import found_by

from embedder.retrieval.store_api import open_store

ROOT = Path(__file__).parents[2]
NUM_ROWS, DIM = "1000", "16"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("bench") / "store")
    make_store(folder, NUM_ROWS, DIM)
    return folder


def test_vectors_are_read_beside_a_plain_file_of_the_same_bytes(store):
    found = time_vectors(store)
    assert found["over_fromfile"] == pytest.approx(found["fromfile_gb_s"] / found["vectors_gb_s"])
    assert search_flat(store, DIM)["flat_search_s"] > 0


def test_a_change_publishes_one_row_in_a_hundred_and_weighs_what_it_wrote(store):
    before = open_store(store).to_arrow()
    found = change_rows(store, NUM_ROWS, DIM, "scattered")
    after = open_store(store).to_arrow()
    assert found["num_changed"] == 10 == sum(run != before["run_id"][0] for run in after["run_id"])
    assert after.num_rows == before.num_rows == 1000
    assert found["rewritten_over_changed"] == pytest.approx(found["written_bytes"] / found["changed_bytes"])
    assert found["written_bytes"] > found["changed_bytes"] == pytest.approx(found["tables_bytes"] / 100)


def test_rows_are_the_same_each_time_and_of_a_later_version_others():
    numbers = np.arange(5, 60)
    first, again, later = rows_of(numbers, 16), rows_of(numbers, 16), rows_of(numbers, 16, 2)
    assert first.equals(again)
    assert not first["image_embedding"].equals(later["image_embedding"])
    assert first["text_embedding"].null_count == len(numbers) - 2  # one in twenty: 20 and 40
    assert first["item_id"].to_pylist()[0] == "000000005.jpg"


def test_files_leave_the_page_cache(tmp_path):
    path = tmp_path / "part.parquet"
    path.write_bytes(b"x" * 100_000)
    path.read_bytes()
    num_files, num_cached = drop_from_cache(tmp_path)
    assert num_files == 1
    assert num_cached in (0, 1)  # a file system in memory keeps it


@pytest.mark.slow
def test_another_checkout_is_measured_beside_this_one_and_from_a_bucket(tmp_path):
    only = ["--only", "s3", "changes"]
    found = found_by("bench_store.py", "--rows", 500, "--dim", 8, *only, "--beside", ROOT, "--folder", tmp_path)
    (other,) = found["beside"].values()
    for each in (found, other):
        assert each["bucket_over_bare"] > 0
        assert each["num_changed_scattered"] == each["num_changed_clustered"] == 5
        assert each["rewritten_over_changed"] > 0


@pytest.mark.slow
def test_marks_write_twice_what_changed_at_most_and_the_rows_are_right_after_each_step():
    found = found_by("bench_store.py", "--rows", 20000, "--dim", 64, "--only", "marks")
    for where in ("scattered", "clustered"):
        written = found[f"marked_rewritten_over_changed_{where}"]
        limit = 2 + 0.02 * found[f"marked_tables_bytes_{where}"] / found[f"marked_changed_bytes_{where}"]
        assert written <= limit
        assert found[f"anew_rewritten_over_changed_{where}"] > 3 * written
    assert found["marked_compact_s"] > 0 and found["marked_purge_s"] > 0 and found["marked_rollback_s"] > 0
