"""Quotas of control groups, instructions of the CPU, GPUs of the driver: what the machine says of itself."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from embedder.placement import hardware


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
        # Linux names both controllers in another order than their folder does, to which systemd links each.
        ("3:cpuacct,cpu:/job\n", {f"cpu/job/{name}": text for name, text in V1_HALF.items()}, 0.5, 1),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8, 8),
    ],
)
def test_the_smallest_quota_around_a_process_bounds_its_cpus(groups, own, files, limit, num_cpus):
    groups(own, files)
    assert (hardware.cpu_limit(), hardware.num_cpus()) == (limit, num_cpus)


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/\n", {}, 64),
        ("0::/\n", {"memory.max": "max\n"}, 64),
        ("0::/job/part\n", {"job/part/memory.max": "max\n", "job/memory.max": f"{8 << 30}\n"}, 8),
        ("4:memory:/\n1:cpu:/\n", {"memory/memory.limit_in_bytes": f"{16 << 30}\n"}, 16),
        ("4:memory:/\n1:cpu:/\n", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, 64),
    ],
)
def test_a_containers_limit_bounds_the_memory(groups, monkeypatch, own, files, limit):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=64 << 30))
    groups(own, files)
    assert hardware.memory_bytes() == limit << 30


class Counter:
    """NVIDIA's management library, where there are four GPUs."""

    def nvmlInit_v2(self):  # its own names
        return 0

    def nvmlDeviceGetCount_v2(self, number):
        number._obj.value = 4
        return 0


VISIBLE = {None: 4, "": 0, "-1": 0, "NoDevFiles": 0, "1": 1, "0,-1,1": 1, "0,1": 2, "0,2": 2, "0,1,2,3,4": 4}


@pytest.mark.parametrize("visible", VISIBLE)
def test_gpus_are_counted_as_ray_and_cuda_count_them(monkeypatch, visible):
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: Counter())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.num_gpus() == VISIBLE[visible]


@pytest.mark.parametrize(
    ("cpu_info", "has_bf16"),
    [
        ("model name\t: AMD EPYC 9R14\nflags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni\n", True),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile amx_int8\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16 dgh\n", True),
        ("model name\t: AMD EPYC 7R13, not bf16\nflags\t\t: fpu avx avx2 fma\n", False),
        ("flags\t\t: fpu avx512f avx512_vnni\n", False),
        ("", False),
    ],
)
def test_instructions_for_bfloat16_are_read_from_the_flags(cpu_info, has_bf16):
    assert hardware.has_bf16_instructions(cpu_info) == has_bf16


class Driver:
    """NVIDIA's library, with GPUs of these names and capabilities; None: one that doesn't answer."""

    def __init__(self, gpus):
        self.gpus = gpus

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        device._obj.value = index.value + 1
        return 0 if self.gpus[index.value] else 15

    def nvmlDeviceGetName(self, device, name, length):
        name.value = self.gpus[device.value - 1][0].encode()
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device, major, minor):
        major._obj.value, minor._obj.value = self.gpus[device.value - 1][1]
        return 0


def test_gpus_tell_name_and_capability_without_torch(monkeypatch):
    driver = Driver([("Tesla T4", (7, 5)), ("NVIDIA H100 80GB HBM3", (9, 0)), None])
    monkeypatch.setattr(hardware, "_driver", lambda: (driver, 3))
    assert hardware.gpus() == (("Tesla T4", (7, 5)), ("NVIDIA H100 80GB HBM3", (9, 0)), ("GPU", None))


@pytest.mark.parametrize("feature", hardware.FEATURES, ids=lambda feature: feature.name)
def test_a_feature_that_the_system_lacks_is_named_with_what_is_lost(monkeypatch, feature):
    monkeypatch.setattr(hardware, "FEATURES", [replace(feature, is_there=lambda: False)])
    assert hardware.missing_features() == {feature.name: feature.loss}


def test_without_pinning_and_control_groups_all_cpus_of_the_machine_are_counted(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(hardware, "OWN_CGROUPS", tmp_path / "none")
    assert hardware.num_cpus() == os.cpu_count()


def test_where_shared_pages_are_not_told_apart_resident_memory_is_summed():
    class Process:
        def memory_full_info(self):
            return SimpleNamespace(rss=7, uss=5)

    assert hardware.pss_bytes([Process(), Process()]) == 14
