"""Count of deaths: which attempts of a task count."""

import os
import signal
import time
from pathlib import Path

import pytest

from embedder.compat import ray_attempts
from embedder.pipeline import translate_ray_error
from embedder.steps.attempts import MAX_DEATHS, Attempt, DeadlyWorkError, deaths, limit_deaths
from embedder.steps.table_cuts import CutNotes


def test_a_death_counts_where_its_node_lives():
    here, lost, own = Attempt("n1", "w1"), Attempt("n2", "w2"), Attempt("n1", "w3")
    assert deaths([here, lost, own], {"n1", "n3"}, own_worker="w3") == [here]
    assert Attempt.parse(str(lost)) == lost


def test_outside_of_ray_nothing_is_counted():
    with limit_deaths(lambda: "work", "cure"):
        pass
    with pytest.raises(KeyError), limit_deaths(lambda: "work", "cure"):
        raise KeyError


@pytest.mark.medium
def test_work_that_always_kills_its_process_is_refused(ray_cluster, tmp_path):
    from ray.exceptions import RayError

    @ray_cluster.remote(num_cpus=0.1, max_retries=-1)
    def dies():
        Path(tmp_path, f"begun-{time.monotonic_ns()}").touch()
        with limit_deaths(lambda: "stage 7: a block of 3 rows", "take a smaller one"):
            Path(tmp_path, f"work-{time.monotonic_ns()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RayError) as caught:
        ray_cluster.get(dies.remote())
    error = translate_ray_error(caught.value)
    assert type(error) is DeadlyWorkError and error.is_resumable and "\n" not in str(error)
    assert str(error).startswith("stage 7: a block of 3 rows killed its process each time that it was tried again, 3 ")
    assert str(error).endswith("); take a smaller one")
    assert f"3 times, last on node {os.uname().nodename} (" in str(error), "where it died last, and how Ray puts it"
    assert len(list(tmp_path.glob("work-*"))) == 1 + MAX_DEATHS
    assert len(list(tmp_path.glob("begun-*"))) == 2 + MAX_DEATHS
    assert ray_attempts.read_notes(f"{ray_attempts.job_id()}/deaths/") == {}


@pytest.mark.medium
def test_work_that_ends_in_the_end_leaves_no_notes(ray_cluster, tmp_path):
    @ray_cluster.remote(num_cpus=0.1, max_retries=-1)
    def ends():
        attempt = ray_attempts.attempt_number()
        with limit_deaths(lambda: "work", "cure"):
            if attempt < MAX_DEATHS:
                os.kill(os.getpid(), signal.SIGKILL)
            return attempt

    assert ray_cluster.get(ends.remote()) == MAX_DEATHS
    noted = ray_attempts.read_notes(f"{ray_attempts.job_id()}/deaths/")
    assert len(noted) == MAX_DEATHS - 1, "of the deaths; a run's end deletes them"
    ray_attempts.delete_notes()
    assert ray_attempts.read_notes(f"{ray_attempts.job_id()}/") == {}


@pytest.mark.medium
def test_another_attempt_knows_the_cuts_of_the_one_before(ray_cluster):
    @ray_cluster.remote(num_cpus=0.1, max_retries=-1)
    def cuts():
        notes = CutNotes()
        if ray_attempts.attempt_number() == 0:
            assert not notes.cuts and not notes.is_complete
            notes.add((3, 64))
            notes.add((12, 128))
            notes.complete()
            os.kill(os.getpid(), signal.SIGKILL)
        return sorted(notes.cuts), notes.is_complete

    assert ray_cluster.get(cuts.remote()) == ([(3, 64), (12, 128)], True)
    ray_attempts.delete_notes()
    outside = CutNotes()
    outside.add((1, 1))
    assert outside.cuts == [(1, 1)], "without Ray, only for this process"
