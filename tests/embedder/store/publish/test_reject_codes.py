"""Every reason of a reject has a stable code with a cure, and docs and code agree on them."""

import re
from pathlib import Path

import pytest
import samples
from refresh_runs import refreshed

from embedder.store.publish.reject_codes import KINDS, OTHER, group_rejects, reject_code

ROOT = Path(__file__).parents[4]
RAISED = (
    r'(?:FetchError|DecodeError|ObjectStoreError|WebError)\(\s*"([A-Z]\w+)"',
    r'(?:ItemProblem|MemberProblem|Entry|reject)\([^")]*?"([A-Z][a-zA-Z]+)"',
    r'error_type\s*=\s*"([A-Z]\w+)"',
    r'found = \("([A-Z]\w+)"',
    r'_problem\(\s*"([A-Z]\w+)"',
)


def test_every_type_of_error_that_the_code_names_has_a_code():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "embedder").rglob("*.py")]
    named = {name for text in sources for pattern in RAISED for name in re.findall(pattern, text)}
    assert len(named) > 45
    assert {name for name in named if reject_code({"error_type": name, "step": "read"}) == OTHER} == set()


def test_no_type_has_two_codes_and_no_code_two_kinds():
    types = [name for kind in KINDS for name in kind.error_types]
    assert len(types) == len(set(types))
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    assert all(re.fullmatch("[a-z_]+", kind.code) and kind.cure and kind.meaning for kind in KINDS)


def test_the_docs_list_the_codes():
    page = (ROOT / "docs" / "own-images.md").read_text(encoding="utf-8")
    rows = [f"| `{k.code}` | {k.meaning} | {'yes' if k.transient else ''} | {k.cure} |" for k in KINDS]
    assert "\n".join(["|---|---|---|---|", *rows, ""]) in page


@pytest.mark.parametrize(
    ("step", "error_type", "code"),
    [
        ("decode", "LibRawIOError", "damaged"),
        ("decode", "SyntaxError", "damaged"),
        ("decode", "OSError", "damaged"),
        ("read", "OSError", "disk"),
        ("read", "ReadError", "disk"),
        ("embed", "NonFinite", "not_finite"),
        ("crop", "ZeroDivisionError", "step_failed"),
        ("crop", "StepTimeout", "timeout"),
        ("labels", "ModelTimeout", "timeout"),
        ("decode", "MissingExtra", "missing_package"),
        ("read", "OfALaterVersion", OTHER),
        ("read", None, OTHER),
        (None, None, OTHER),
    ],
)
def test_rejects_of_any_store_are_classified(step, error_type, code):
    assert reject_code({"step": step, "error_type": error_type}) == code


def test_groups_come_with_the_cure_the_largest_first():
    rows = [{"item_id": f"{n}", "step": "read", "error_type": "NotFound" if n % 3 else "TooLarge"} for n in range(20)]
    largest, other = (group.to_dict() for group in group_rejects(rows))
    assert (largest["code"], largest["num_items"], largest["item_ids"]) == ("missing", 13, ["1", "2", "4", "5", "7"])
    assert (other["code"], other["error_types"], other["transient"]) == ("too_large", {"TooLarge": 7}, False)


@pytest.mark.medium
def test_the_command_groups_rejects_by_kind(make_run, run_embedder, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=3)
    broken = {"a.jpg": b"", "b.jpg": b"\xff\xd8\xff\xe0 no picture", "c.png": b"plain words"}
    for name, content in broken.items():
        (source / name).write_bytes(content)
    config = make_run(source)
    refreshed(config)
    code, found, _ = run_embedder("rejects", "--store", config.store, "--json")
    assert code == 0
    assert {row["item_id"]: row["code"] for row in found["rejects"]} == {
        "a.jpg": "empty", "b.jpg": "damaged", "c.png": "no_media"
    }  # fmt: skip
    assert {kind["code"]: kind["num_items"] for kind in found["kinds"]} == {"empty": 1, "damaged": 1, "no_media": 1}
    assert all(kind["cure"] for kind in found["kinds"])
