"""Quotas of control groups, as files of both versions of Linux's groups say them."""

import os

import pytest

from embedder.engine import hardware


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Makes the files of groups, and says in which this process is."""
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(hardware, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def make(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return make


V1_HALF = {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("own", "files", "limit", "num_cpus"),
    [
        ("0::/\n", {}, 8, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8, 8),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5, 2),
        ("0::/job/part\n", {"job/part/cpu.max": "max 100000\n", "job/cpu.max": "50000 100000\n"}, 0.5, 1),
        ("0::/outside/of/the/container\n", {"cpu.max": "150000 100000\n"}, 1.5, 1),
        ("4:memory:/\n1:cpu:/node\n0::/\n", {f"cpu/node/{name}": text for name, text in V1_HALF.items()}, 0.5, 1),
        (
            "3:cpu,cpuacct:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            8,
            8,
        ),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8, 8),
    ],
)
def test_the_smallest_quota_around_a_process_bounds_its_cpus(groups, own, files, limit, num_cpus):
    groups(own, files)
    assert (hardware.cpu_limit(), hardware.num_cpus()) == (limit, num_cpus)
