"""What goes wrong inside Ray's processes is told as if it had gone wrong here."""

import os
import signal

import pytest

from embedder.errors import RunFailed, StoreError
from embedder.pipeline import as_ours


def failure_of(run):
    from ray.exceptions import RayError

    with pytest.raises(RayError) as caught:
        run()
    return as_ours(caught.value)


def test_a_mistake_that_a_write_task_finds_is_that_mistake(ray_cluster):
    from ray.data import Datasink

    class FullDisk(Datasink):
        def write(self, blocks, ctx):
            raise StoreError("store /data: no space left on device; free some space")

    dataset = ray_cluster.data.range(4)
    error = failure_of(lambda: dataset.write_datasink(FullDisk(), ray_remote_args={"num_cpus": 0.1}))
    assert type(error) is StoreError
    assert str(error).startswith("store /data: no space left on device; free some space")


def test_a_worker_that_dies_again_and_again_ends_the_run_in_one_line(ray_cluster):
    @ray_cluster.remote(num_cpus=0.1, max_retries=1)
    def dies():
        os.kill(os.getpid(), signal.SIGKILL)

    error = failure_of(lambda: ray_cluster.get(dies.remote()))
    assert type(error) is RunFailed
    assert "WorkerCrashedError" in str(error) and "the same command goes on" in str(error)
    assert "\n" not in str(error)


def test_a_bug_keeps_its_traceback(ray_cluster):
    from ray.exceptions import RayTaskError

    @ray_cluster.remote(num_cpus=0.1)
    def has_a_bug():
        return {}["missing"]

    error = failure_of(lambda: ray_cluster.get(has_a_bug.remote()))
    assert isinstance(error, RayTaskError) and "has_a_bug" in str(error)
