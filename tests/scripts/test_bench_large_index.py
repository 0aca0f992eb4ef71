"""The benchmark's vectors are those of its seed, its exact answers are exact, and all of it runs."""

import json
import sys

import bench_large_index
import numpy as np
import pytest
from large_index_bench import rivalry, rivals
from large_index_bench.cgroups import own_group
from large_index_bench.vectors import KINDS, blocks, exact_rows, write_vectors
from script_runs import run_script

WIDTH = 32


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    write_vectors(tmp_path, request.param, 3000, 200, 7, WIDTH)
    return tmp_path


def test_the_same_seed_gives_the_same_vectors_of_unit_norm(folder, tmp_path_factory):
    images = np.concatenate(list(blocks(folder, WIDTH, 0, 3030)))
    captions = np.load(folder / "captions.npy")
    for vectors in (images, captions):
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    for kind in KINDS:
        again = tmp_path_factory.mktemp("again")
        write_vectors(again, kind, 3000, 200, 7, WIDTH)
        is_same = (again / "images.f32").read_bytes() == (folder / "images.f32").read_bytes()
        assert is_same == np.array_equal(np.load(again / "captions.npy"), captions)


def test_captions_lie_off_the_images_distribution(folder):
    images, captions = np.concatenate(list(blocks(folder, WIDTH, 0, 3000))), np.load(folder / "captions.npy")
    nearest_image = np.sort(captions @ images.T, axis=1)[:, -1].mean()
    nearest_neighbour = np.sort(images[:200] @ images.T, axis=1)[:, -2].mean()
    assert nearest_image < nearest_neighbour - 0.05


def test_exact_answers_are_those_of_brute_force(folder):
    images, captions = np.concatenate(list(blocks(folder, WIDTH, 0, 3000))), np.load(folder / "captions.npy")
    expected = np.argsort(-(captions @ images.T), axis=1, kind="stable")[:, :10]
    assert np.mean(exact_rows(folder, captions, 3000) == expected) > 0.999


@pytest.mark.parametrize(("text", "size"), [("1.5GiB", 3 << 29), ("4GiB", 4 << 30), ("250MiB", 250 << 20), ("77", 77)])
def test_sizes_are_read_as_people_write_them(text, size):
    assert bench_large_index.size_bytes(text) == size


def test_a_group_of_this_process_is_found():
    assert own_group().is_dir()


class Guess:
    """Rival that finds as many of the exact rows as its effort says."""

    def __init__(self, exact):
        self.exact, self.efforts = exact, [[{"n": n, "factor": f} for n in range(1, 11)] for f in (2, 1)]
        self.number = 0

    def find(self, query, effort):
        found = self.exact[int(query[0])].copy()
        found[min(10, effort["n"] * effort["factor"]) :] = -1
        return found


def test_a_rival_is_brought_to_the_recall_with_the_least_effort():
    exact = np.arange(600).reshape(60, 10)
    queries = np.arange(60, dtype=np.float32)[:, None]
    effort, reached = rivals.tune(Guess(exact), queries, exact, 0.79)
    assert effort["n"] * effort["factor"] == 8
    assert reached == pytest.approx(0.8)
    effort, reached = rivals.tune(Guess(exact), queries, exact, 1.01)
    assert (effort["n"] * effort["factor"], reached) == (10, 1.0)


def test_efforts_grow_by_a_third_or_a_half():
    assert rivals.powers(100, 8) == [8, 12, 16, 24, 32, 48, 64, 96]


def test_a_rival_that_fails_says_so_and_the_others_go_on(tmp_path):
    write_vectors(tmp_path, "low-rank", 2000, 700, 7, WIDTH)
    settings = {"num_images": 2000, "width": WIDTH, "num_held_out": 600, "recall": 0.9, "index_bytes": None}
    np.save(tmp_path / "exact.npy", exact_rows(tmp_path, np.load(tmp_path / "captions.npy")[:600], 2000))
    failed = rivalry.run_rival("build", "no such rival", tmp_path, settings, None, 0, sys.executable)
    assert failed == {"failed": "ended with 1"}
    built = rivalry.run_rival("build", "hnsw", tmp_path, settings, None, 0, sys.executable)
    served = rivalry.run_rival("serve", "hnsw", tmp_path, settings, None, 0, sys.executable)
    assert built["design"].startswith("HNSW32 of FAISS")
    assert served["recall_at_10"] >= 0.88
    lines = rivalry.rows({"hnsw": served | {"build": built, "load": 1.0}, "other": {"build": failed, "rounds": []}})
    assert lines[0].startswith("  hnsw (HNSW32 of FAISS")
    assert lines[1] == "  other: ended with 1"


@pytest.mark.slow(rotates=True)
def test_all_steps_run_and_the_last_line_is_json(tmp_path):
    arguments = ["5000", "--generator", "low-rank", "--kind", "IVF16,PQ64x4fs,Disk(SQ8)", "--width", "64"]
    arguments += ["--cgroup", "none", "--rivals", "-", "--kill", "--keep", str(tmp_path)]
    lines = run_script("bench_large_index.py", *arguments).stdout.splitlines()
    (found,) = json.loads(lines[-1])
    assert lines[-5].startswith("5,000 low-rank: IVF16,PQ64x4fs,Disk(SQ8)")
    assert [line.split()[0] for line in lines[-4:-1]] == ["ours:", "ivfpq", "hnsw"]
    assert all(found["rivals"][name]["recall_at_10"] >= 0.9 for name in ("ours", "ivfpq", "hnsw"))
    assert found["kills"]["num_vectors_after"] == 5000
    assert len(found["kills"]["killed_after_s"]) >= 3
    assert found["serve"]["recall_at_10"] >= 0.9
    assert found["serve"]["filter"]["recall_at_10"] >= 0.9
    assert found["update"]["recall_at_10"] >= 0.9
