"""The benchmark's vectors are those of its seed, its exact answers are exact, and all of it runs."""

import json

import bench_large_index
import numpy as np
import pytest
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


@pytest.mark.slow
def test_all_steps_run_and_the_last_line_is_json():
    arguments = ["5000", "--generator", "low-rank", "--kind", "IVF16,PQ64x4fs,Disk(SQ8)", "--width", "64"]
    lines = run_script("bench_large_index.py", *arguments, "--cgroup", "none").stdout.splitlines()
    (found,) = json.loads(lines[-1])
    assert lines[-2].startswith("5,000 low-rank: IVF16,PQ64x4fs,Disk(SQ8)")
    assert found["serve"]["recall_at_10"] >= 0.9
    assert found["serve"]["filter"]["recall_at_10"] >= 0.9
    assert found["update"]["recall_at_10"] >= 0.9
