"""One Ray for the whole session, and how the tests are shared out to two processes."""

import gc
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from rotation import ONE_RAY, left_out, left_to_leg
from xdist.scheduler import LoadFileScheduling

from embedder.observability.log import messages_to
from embedder.placement import hardware

MAX_WORKERS = 2
NUM_CPUS = 2
RELEASED_WITHIN_S = 30.0
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 8 << 30


def memory_for_folders() -> str | None:
    """Where the tests' folders may be in memory: stores sync each of their files, which takes a fifth of the time."""
    has_room = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free >= SHARED_MEMORY_BYTES
    return str(SHARED_MEMORY) if has_room and hardware.memory_bytes() >= 2 * SHARED_MEMORY_BYTES else None


if folder := memory_for_folders():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", folder)


@pytest.fixture(autouse=True)
def _scheduled_as_before():
    """Fails a test that leaves its process under another scheduling policy: what starts later would inherit it."""
    before = os.sched_getscheduler(0)
    yield
    after = os.sched_getscheduler(0)
    os.sched_setscheduler(0, before, os.sched_param(0))
    assert after == before, f"the test began under scheduling policy {before} and left the process under {after}"


@pytest.fixture(autouse=True)
def _servers_stopped():
    """Fails a test that leaves a server's thread: over a closed socket it takes a core until the process ends."""
    before = serving_threads()
    yield
    left = serving_threads() - before
    assert not left, f"the test left servers running: {left}; call shutdown() before server_close()"


def serving_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "serve_forever" in thread.name}


class MessageList(logging.Handler):
    """Handler that keeps the messages."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture
def said():
    """Messages of the product from here on: the last argument of a test, after the fixtures that log, too."""
    handler = MessageList()
    with messages_to(handler):
        yield handler.messages


@pytest.fixture(scope="session", params=[ONE_RAY])
def starts_ray():
    """Stands in the name of every test that starts a Ray or uses the session's: all of them go to one process."""


@pytest.fixture(scope="session")
def shared_ray(starts_ray):
    """Starts the session's Ray: two CPUs and no GPU, wherever the tests run."""
    import ray

    from embedder.executors.ray_session import start_ray

    start_ray(num_cpus=NUM_CPUS, num_gpus=0)
    yield ray
    ray.shutdown()


@pytest.fixture
def ray_cluster(shared_ray):
    """The session's Ray; fails a test after which CPUs stay reserved, for which a later one would wait for ever.

    Old versions of Ray keep the actors of a dataset that has ended until its objects, a circle, are collected.
    """
    yield shared_ray
    gc.collect()
    deadline_s = time.monotonic() + RELEASED_WITHIN_S
    while shared_ray.available_resources().get("CPU") != NUM_CPUS:
        if time.monotonic() > deadline_s:
            pytest.fail(f"the test left CPUs reserved; free: {shared_ray.available_resources()}")
        time.sleep(0.1)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect tests, and no garbage: a million objects stay, which each collection would look at for 0.6 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_xdist_auto_num_workers(config):
    """One process is enough, and begins sooner, where the command line names single files."""
    several_files = any(Path(argument).is_dir() for argument in config.args)
    return min(hardware.num_cpus(), MAX_WORKERS) if several_files else 0


def pytest_collection_modifyitems(config, items):
    """What takes one process longest begins first; of it, the tests with a Ray of their own, while no other is up.

    CI sets TEST_ROTATION, which chooses among the slow tests, and TEST_LEFT_TO_LEG, the paths of tests that
    it runs with other versions.
    """
    left = set(left_to_leg(items, os.environ.get("TEST_LEFT_TO_LEG", "").split()))
    if rotation := os.environ.get("TEST_ROTATION"):
        left.update(left_out(items, int(rotation)))
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: (ONE_RAY not in item.nodeid, "ray_cluster" in item.fixturenames))


def pytest_xdist_make_scheduler(config, log):
    return RayAndFiles(config, log)


class RayAndFiles(LoadFileScheduling):
    """The tests of a file stay together, and so do those with Ray: no two Rays are up at the same time."""

    def _split_scope(self, nodeid):
        return ONE_RAY if ONE_RAY in nodeid else super()._split_scope(nodeid)
