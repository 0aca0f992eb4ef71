"""The scripts of the query service on tiny input: what they count and what they refuse; no clock is judged."""

import importlib.util
import sys

import pytest
from script_runs import SCRIPTS, found_by


@pytest.fixture(scope="module")
def publications():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("serve_publications", SCRIPTS / "serve_publications.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules["serve_publications"] = script  # its dataclasses look there
    spec.loader.exec_module(script)
    return script


def test_texts_are_all_different_and_as_long_as_captions():
    from bench_serve import Texts

    texts = Texts()
    several = [texts[number] for number in range(20_000)]
    assert len(set(several)) == 20_000
    assert {len(text.split()) for text in several} <= set(range(2, 30))
    assert texts[7] == several[7]


def test_an_answer_of_two_versions_would_be_found_out(publications):
    old, new = ("a.png", "a (night 1)", 0.5), ("a.png", "a (night 2)", 0.5)
    expected = {"1": [(old, old)], "2": [(new, new)]}
    wrong = [
        publications.Answer("1", ("a (night 1)", "a (night 2)")),
        publications.Answer("2", ("a (night 1)",)),
        publications.Answer("3", ()),
        publications.Answer("1", ("a (night 1)",), 0, (old,)),
        publications.Answer("1", ("a (night 1)",), 0, (old, ("b.png", "a (night 1)", 0.4))),
    ]
    right = [
        publications.Answer("1", ("a (night 1)",) * 2, 0, (old, old)),
        publications.Answer("1", ("a (night 1)",) * 2, 0, (old, ("b.png", "a (night 1)", 0.5))),
        publications.Answer("2", ()),
    ]
    requests = publications.Requests(answers=[*wrong, *right], failures=["one"], traces=["two", "three"])
    found = publications.tally(requests, expected)
    assert (found["mixed"], found["failed"], found["traces"]) == (len(wrong), 1, 2)
    assert found["versions_answering"] == found["versions"] == 2


def test_what_was_purged_is_found_in_a_cache(publications, tmp_path):
    assert publications.traces_in(tmp_path, [b"thumbnail"]), "without a file there is nothing to look into"
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "1.webp").write_bytes(b"another")
    assert publications.traces_in(tmp_path, [b"thumbnail"]) == []
    (tmp_path / "store" / "2.webp").write_bytes(b"head thumbnail tail")
    assert len(publications.traces_in(tmp_path, [b"thumbnail"])) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_are_whole_while_five_versions_are_published():
    found = found_by("serve_publications.py", 300, 3, timeout_s=570)
    assert found["requests"] >= 300 and found["publications"] == 5
    assert (found["failed"], found["mixed"], found["traces"]) == (0, 0, 0)
    assert len(found["by_kind"]) == 9


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_service_is_measured_beside_searches_in_process():
    sizes = {"vectors": 2000, "index": "flat", "clients": 4, "seconds": 1.5, "queries": 64, "model": "shipped"}
    options = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    found = found_by("bench_serve.py", *options, timeout_s=570)
    (each,) = found["stores"]
    assert each["name"] == "shipped" and each["num_vectors"] == 2000 and each["num_errors"] == 0
    assert each["full"]["cpu_ms"] > 0 and each["process"]["cpu_ms"] > 0
    assert each["half"]["num_answered"] > 0 and each["half"]["p99_ms"] >= each["half"]["p50_ms"] > 0
