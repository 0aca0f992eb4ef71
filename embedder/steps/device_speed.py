"""Speed of the GPU that a stage computes on, measured once for each node, device and dtype."""

import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from embedder.storage.cost_cache import keep, read_kept
from embedder.storage.user_cache import cache_folder
from shards.device_trial import measure_speed
from shards.planning.planning_costs import DeviceSpeed

LOG = logging.getLogger(__name__)


FREE_SHARE = 0.8  # of its memory; with less, something else may compute there


def kept_speed(device: str, dtype: str) -> DeviceSpeed | None:
    """Return the speed of a GPU, by a trial of half a second if it was never measured; None if others are on it."""
    name = torch.cuda.get_device_name(device)
    key = {"format": 1, "node": platform.node(), "device": name, "torch": torch.__version__, "dtype": dtype}
    try:
        with _one_at_a_time():
            found, (free_bytes, total_bytes) = read_kept(DeviceSpeed, key), torch.cuda.mem_get_info(device)
            if found is None and free_bytes >= FREE_SHARE * total_bytes:
                keep(found := measure_speed(device, dtype), key)
            return found
    except RuntimeError as error:  # it lacks memory
        LOG.info(f"the speed of {name} could not be measured: {error}")
        return None
    finally:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Block in which no other stage of this machine measures: several may share a GPU."""
    folder = cache_folder("trials")
    handle = None
    with suppress(OSError):  # without a cache folder, or where it can't be locked, they may measure too little
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
