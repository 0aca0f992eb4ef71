"""The promise to services: no search fails, and none mixes two versions, while a store publishes."""

import importlib.util
import sys

import pytest
from script_runs import SCRIPTS, found_by

SCRIPT = SCRIPTS / "follow_publications.py"


def run(num_searches: int) -> dict:
    found = found_by(SCRIPT.name, num_searches, timeout_s=230)
    assert found["searches"] >= num_searches
    assert (found["publications"], found["failed"], found["mixed"]) == (5, 0, 0)
    assert all(found["searches_by_version"]), "each of the six versions answered"
    return found


@pytest.mark.slow
def test_searches_go_on_whole_while_five_versions_are_published():
    run(1500)


@pytest.mark.slow
def test_ten_thousand_searches_while_five_versions_are_published():
    run(10_000)


def test_an_answer_of_two_versions_would_be_found_out():
    spec = importlib.util.spec_from_file_location("follow_publications", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.modules["follow_publications"] = script  # its dataclasses look there
    spec.loader.exec_module(script)
    old, new = ("a.jpg", "night 1", 0.5), ("a.jpg", "night 2", 0.5)
    expected = {"1": [(old, old)], "2": [(new, new)]}
    searches = script.Searches([("1", 0, (old, old)), ("1", 0, (old, new)), ("2", 0, (old, old)), ("3", 0, (old,))])
    assert script.tally(searches, expected)["mixed"] == 3
