"""The option --model of commands: a further model of the store by its name."""

import numpy as np
import pyarrow as pa
import pytest
from model_stores import add_model, label_row, rejected_row, vector_row
from search_stores import picture, searchable, towards

from embedder.store.layout import read_current

NAMES = ["a.png", "b.png", "c.png"]


@pytest.fixture
def files(tmp_path):
    """Three pictures; `clip` orders them the other way round, with a reject; `labels` has no vectors."""
    store = searchable(tmp_path / "s", *(picture(name, 10 * n) for n, name in enumerate(NAMES)), index=False)
    add_model(store.files, "clip", *(vector_row(name, towards(20 - 10 * n)) for n, name in enumerate(NAMES)))
    add_model(store.files, "clip", rejected_row("bad.png"))
    rows = [label_row(name) for name in NAMES[:2]]
    add_model(store.files, "labels", *rows, has_vectors=False, top=pa.array(["cat", "dog"]))
    return store.files


@pytest.fixture
def query(tmp_path):
    """A vector in a file."""
    np.save(tmp_path / "query.npy", towards(0))
    return tmp_path / "query.npy"


def test_search_by_a_further_model_and_with_a_condition_over_another_ones_columns(files, query, run_embedder):
    arguments = ("search", "--vector", query, "--store", files.address, "--json")
    for model, expected in (("main", NAMES), ("clip", NAMES[::-1])):
        _, found, _ = run_embedder(*arguments, "--model", model)
        assert [hit["item_id"] for hit in found["hits"]] == expected
    _, found, _ = run_embedder(*arguments, "--model", "clip", "--where", "labels.top = 'cat'")
    assert [(hit["item_id"], hit["carryover"]["labels.top"]) for hit in found["hits"]] == [("a.png", "cat")]


@pytest.mark.parametrize("command", ["search", "evaluate", "index build", "index status", "rejects"])
def test_an_unknown_model_is_one_line_that_names_those_there_are(files, query, run_embedder, command):
    more = ("--vector", query) if command == "search" else ()
    code, _, message = run_embedder(*command.split(), "--store", files.address, "--model", "clp", *more)
    assert (code, message.count("\n")) == (2, 1)
    assert "no model 'clp' is published in it; it has main, clip, labels" in message


@pytest.mark.parametrize("command", ["search", "evaluate", "index build"])
def test_a_model_without_vectors_is_refused_in_one_line_that_says_what_it_gives(files, query, run_embedder, command):
    more = ("--vector", query) if command == "search" else ()
    code, _, message = run_embedder(*command.split(), "--store", files.address, "--model", "labels", *more)
    assert (code, message.count("\n")) == (2, 1)
    assert "model labels has no vectors to compare, it gives labels.top (string)" in message


def test_an_index_of_a_further_model_is_built_listed_updated_and_gone_back_from(files, query, run_embedder):
    of_clip = ("--store", files.address, "--model", "clip")
    code, built, message = run_embedder("index", "build", *of_clip, "--json")
    assert (code, built["index"], built["num_vectors"]) == (0, 1, 3), message
    assert read_current(files).index is None, "the main model's"
    assert run_embedder("index", "build", *of_clip)[0] == 0
    _, listed, _ = run_embedder("index", "status", *of_clip, "--json")
    assert (listed["published"], [each["index"] for each in listed["versions"]]) == (2, [1, 2])
    assert run_embedder("index", "status", "--store", files.address, "--json")[1]["versions"] == []
    assert run_embedder("index", "update", *of_clip, "--json")[1]["updated"] is False
    assert run_embedder("index", "rollback", *of_clip, "--json")[1]["index"] == 1
    assert read_current(files).models["clip"].index == 1


def test_history_shows_the_models_with_their_rows_and_indexes(files, capsys, run_embedder):
    assert run_embedder("index", "build", "--store", files.address, "--model", "clip")[0] == 0
    _, found, _ = run_embedder("history", "--store", files.address, "--json")
    last = found["publications"][-1]
    assert (set(last["models"]), last["models"]["clip"]["index"]) == ({"clip", "labels"}, 1)
    counts = {"num_items": 4, "num_vectors": 3, "num_pictures": 3, "num_rejected": 1}
    assert last["model_counts"]["clip"] == counts
    from command_runs import run_here

    text = run_here("history", "--store", files.address).stdout
    assert "clip (3 vectors, index 1), labels (2 rows)" in text
