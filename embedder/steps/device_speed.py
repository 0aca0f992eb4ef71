"""Speed of the GPU that a stage computes on, measured once for each node, device and dtype."""

import fcntl
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from embedder.storage.cost_cache import keep, read_kept
from embedder.storage.user_cache import cache_folder
from shards.device_trial import measure_speed
from shards.planning.planning_costs import DeviceSpeed

LOG = logging.getLogger(__name__)


FREE_SHARE = 0.8  # of its memory; with less, something else may compute there
WAIT_S = 20.0  # for other processes, each of which measures for half a second


def kept_speed(device: str, dtype: str) -> DeviceSpeed | None:
    """Return the speed of a GPU, by a trial of half a second if it was never measured; None if others keep it busy."""
    name = torch.cuda.get_device_name(device)
    key = {"format": 1, "node": platform.node(), "device": name, "torch": torch.__version__, "dtype": dtype}
    try:
        with _one_at_a_time() as is_alone:
            found, (free_bytes, total_bytes) = read_kept(DeviceSpeed, key), torch.cuda.mem_get_info(device)
            if found is None and is_alone and free_bytes >= FREE_SHARE * total_bytes:
                keep(found := measure_speed(device, dtype), key)
            return found
    except RuntimeError as error:  # it lacks memory
        LOG.info(f"the speed of {name} could not be measured: {error}")
        return None
    finally:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def _one_at_a_time() -> Iterator[bool]:
    """Block in which no other stage of this machine measures, as several may share a GPU; False after WAIT_S of it."""
    folder = cache_folder("trials")
    handle, is_alone = None, True
    with suppress(OSError):  # without a cache folder, or where it can't be locked, they may measure too little
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        is_alone = _lock(handle)
    try:
        yield is_alone
    finally:
        if handle is not None:
            os.close(handle)


def _lock(handle: int) -> bool:
    """Lock a folder; return False if another process, perhaps one that was stopped, keeps it for WAIT_S."""
    stop_s = time.monotonic() + WAIT_S
    while time.monotonic() < stop_s:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        else:
            return True
    return False
