import json
from pathlib import Path

import pytest
from script_runs import last_json, run_script

pytestmark = pytest.mark.medium


def simulate(*arguments: str, timeout_s: float = 280) -> tuple[int, dict, str]:
    """Exit status, last line and whole output of a simulation, in a process of its own."""
    done = run_script("simulate_store.py", *arguments, timeout_s=timeout_s)
    return done.returncode, last_json(done), done.stdout


def test_interrupted_writers_break_no_invariant():
    code, result, output = simulate("--schedules", "1500", "--seed", "7000000")
    assert (code, result["schedules"], result["violations"]) == (0, 1500, 0), output


def test_interrupted_writers_break_no_invariant_where_rows_are_marked():
    code, result, output = simulate("--deletion-vectors", "--schedules", "500", "--seed", "9000000")
    assert (code, result["schedules"], result["violations"]) == (0, 500, 0), output


def test_every_planted_fault_has_a_name_and_a_description():
    code, result, output = simulate("--list-faults")
    assert code == 0 and len(result["faults"]) >= 20 and len(set(result["faults"])) == len(result["faults"])
    assert all(f"{name}: " in output for name in result["faults"])


def test_a_planted_fault_is_found_and_its_schedule_shrinks_to_one_that_fails_again():
    code, result, output = simulate("--plant", "current-before-commit", "--schedules", "500")
    assert code == 1 and result["violations"] > 0
    shrunk = output.split("shrunk to ")[1].splitlines()[0]
    schedule, end = json.JSONDecoder().raw_decode(shrunk)
    assert schedule["operations"] and shrunk[end:].startswith(": ")
    code, result, _ = simulate("--plant", "current-before-commit", "--replay", json.dumps(schedule))
    assert code == 1 and result["violations"] > 0
    assert simulate("--replay", json.dumps(schedule))[:1] == (0,)


# Schedules that once failed, as `simulate_store.py` has shrunk them, and what they did.
SCHEDULES = json.loads(Path(__file__).with_name("simulated_schedules.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_what_once_failed_fails_no_more(name):
    code, result, output = simulate("--replay", json.dumps(SCHEDULES[name]))
    assert (code, result["violations"]) == (0, 0), output


@pytest.mark.parametrize(
    ("operations", "items"),
    [
        (("embed a b y",), {"x": "base1", "z": "base1", "w": "base0", "v": "base0", "a": "A", "b": "A", "y": "A"}),
        (
            ("embed a b y", "refresh without x"),
            {"z": "base1", "w": "base0", "v": "base0", "a": "B", "b": "A", "y": "A"},
        ),
        (("embed c w", "rollback to the first"), {"x": "base0", "y": "base0", "w": "base0", "v": "base0"}),
        (
            ("embed and publish as it goes", "compact", "purge x"),
            {"z": "base1", "w": "base0", "v": "base0", "a": "A", "c": "A", "y": "A"},
        ),
        (
            ("vacuum", "rollback to the first"),  # which can't be read any more
            {"x": "base1", "z": "base1", "y": "base0", "w": "base0", "v": "base0"},
        ),
    ],
)
def test_simulated_rows_are_what_the_commands_leave_behind(operations, items):
    """The lists that stand for part files end in the rows that the store's own tests find in Parquet files."""
    schedule = {"operations": operations, "faults": [], "clocks": [], "on_disk": False, "lock": "", "luck": 1}
    _, result, output = simulate("--replay", json.dumps(schedule))
    assert {each: own.split()[0] for each, own in result["items"].items()} == items, output


# By fault, schedules that don't find it and come before one that does; where they change, the search takes longer.
FIND_NOTHING = {
    "lost-lease-unnoticed": 100,
    "current-unconditional": 80,
    "commit-over-another": 250,
    "commit-taken-as-done": 300,
    "swap-without-confirm": 500,
    "commit-by-mark": 470,
    "delete-before-mark": 1180,
    "delete-without-mark": 1180,
    "session-by-journal": 3270,
    "rewrite-under-one-name": 2760,
    "resumption-not-written": 1980,
    "tombstones-unconditional": 460,
    "purge-over-another": 1600,
    "unfinished-files-stay": 2950,
    "index-number-twice": 240,
    "damaged-lock-free": 110,
    "deletion-not-synced": 190,
}


@pytest.mark.slow
def test_every_planted_fault_is_found():
    skipped = ("--skip", json.dumps(FIND_NOTHING))
    code, result, output = simulate("--all-faults", "--schedules", "20000", *skipped, timeout_s=590)
    assert (code, result["survivors"]) == (0, []), output
    assert result["faults"] >= 20
