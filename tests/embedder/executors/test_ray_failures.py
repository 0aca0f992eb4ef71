"""What goes wrong inside Ray's processes is reported as if it had gone wrong here."""

import os
import signal

import pytest

from embedder.errors import RunFailedError, StoreError
from embedder.executors.ray_session import _ray_here
from embedder.pipeline import translate_ray_error
from embedder.placement import hardware


def failure_of(run):
    from ray.exceptions import RayError

    with pytest.raises(RayError) as caught:
        run()
    return translate_ray_error(caught.value)


@pytest.mark.parametrize(
    ("free", "asked"), [(64 << 20, 1 << 30), (12 << 30, int(0.9 * (12 << 30))), (64 << 30, 16 << 30)]
)
def test_ray_gets_no_larger_object_store_than_shared_memory_has_room_for(monkeypatch, free, asked):
    """A container's may be of 64 MiB, and Ray refuses to put more than 10 GB on the disk."""
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 128 << 30)
    monkeypatch.setattr(hardware, "shared_memory_bytes", lambda: free)
    assert _ray_here(None, 1, object_store_bytes=16 << 30)["object_store_memory"] == asked


@pytest.mark.medium
def test_a_mistake_that_a_write_task_finds_is_that_mistake(ray_cluster):
    from ray.data import Datasink

    class FullDisk(Datasink):
        def write(self, blocks, ctx):
            raise StoreError("store /data: no space left on device; free some space")

    dataset = ray_cluster.data.range(4)
    error = failure_of(lambda: dataset.write_datasink(FullDisk(), ray_remote_args={"num_cpus": 0.1}))
    assert type(error) is StoreError
    assert str(error) == "store /data: no space left on device; free some space", "and nothing that Ray appends"


def test_a_process_that_ray_gives_up_ends_the_run_in_one_line(ray_cluster):
    @ray_cluster.remote(num_cpus=0.1, max_retries=0)
    def dies():
        os.kill(os.getpid(), signal.SIGKILL)

    error = failure_of(lambda: ray_cluster.get(dies.remote()))
    assert type(error) is RunFailedError
    assert "WorkerCrashedError" in str(error) and "the same command continues" in str(error)
    assert "\n" not in str(error)


def test_the_death_of_an_actor_is_told_with_its_reason(ray_cluster):
    @ray_cluster.remote(num_cpus=0.1)
    class Dies:
        def work(self):
            os.kill(os.getpid(), signal.SIGKILL)

    error = failure_of(lambda: ray_cluster.get(Dies.remote().work.remote()))
    assert type(error) is RunFailedError and "\n" not in str(error)
    assert "(ActorDiedError: The actor died unexpectedly before finishing this task. The actor is dead because" in str(
        error
    )
    assert "actor_id" not in str(error) and "actor_id" in error.details


@pytest.mark.medium
def test_a_bug_keeps_its_traceback(ray_cluster):
    from ray.exceptions import RayTaskError

    @ray_cluster.remote(num_cpus=0.1)
    def has_a_bug():
        return {}["missing"]

    error = failure_of(lambda: ray_cluster.get(has_a_bug.remote()))
    assert isinstance(error, RayTaskError) and "has_a_bug" in str(error)


def test_what_an_actor_raises_at_its_start_is_one_line_and_a_traceback_for_the_log(ray_cluster):
    @ray_cluster.remote(num_cpus=0.1)
    class HasABug:
        def __init__(self):
            self.value = {}["missing"]

        def ready(self):
            pass

    error = failure_of(lambda: ray_cluster.get(HasABug.remote().ready.remote()))
    assert type(error) is RunFailedError
    assert "could not start (KeyError: 'missing')" in str(error) and "\n" not in str(error)
    assert ", in __init__\n" in error.details
