"""Speed of a GPU: measured once, by one process at a time, and a process that never lets go delays no run for long."""

import fcntl
import os
import time
from types import SimpleNamespace

import pytest
import torch

from embedder.steps import device_speed
from embedder.storage.user_cache import cache_folder


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The trials that were made, on a GPU of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpu = {"get_device_name": lambda device: "a GPU", "mem_get_info": lambda device: (10, 10)}
    gpu |= {"empty_cache": lambda: None, "reset_peak_memory_stats": lambda device: None}
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**gpu))
    found = []

    def measure_speed(device, dtype):
        found.append(dtype)
        return device_speed.DeviceSpeed(1e12, 1e3, 1e11, 1e10)

    monkeypatch.setattr(device_speed, "measure_speed", measure_speed)
    return found


def test_a_speed_is_measured_once_and_not_where_another_process_never_lets_go(measured, monkeypatch):
    first = device_speed.kept_speed("cuda", "bfloat16")
    monkeypatch.setattr(device_speed, "WAIT_S", 0.2)
    holder = os.open(cache_folder("trials"), os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        began_s = time.monotonic()
        assert device_speed.kept_speed("cuda", "bfloat16") == first, "what is known is known"
        assert device_speed.kept_speed("cuda", "float16") is None
        assert time.monotonic() - began_s < 20
    finally:
        os.close(holder)
    assert device_speed.kept_speed("cuda", "float16") == first
    assert measured == ["bfloat16", "float16"]
