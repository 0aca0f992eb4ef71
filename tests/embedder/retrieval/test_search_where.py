"""A SQL condition: k hits wherever k rows fulfil it, and nothing but those rows within its reach."""

from pathlib import Path

import numpy as np
import pytest
from search_stores import QUERY, ids, picture, searchable, towards, video
from where_attacks import FILES, NETWORK

from embedder.errors import ConfigError
from embedder.retrieval import filters
from embedder.retrieval.filters import RowFilter
from embedder.storage import spill_file

CAPTIONS = ["A red car", None, "red", "", "grün", None]


@pytest.fixture(scope="module", params=["index", "exact", "mapped"])
def store(request, tmp_path_factory):
    """Six pictures, ever farther from the query, and a clip; with prices, of which one is missing."""
    pictures = [picture(f"{number}.png", 10 * number, caption=CAPTIONS[number]) for number in range(6)]
    with pytest.MonkeyPatch.context() as changed:
        if request.param == "mapped":
            changed.setattr(spill_file, "MEMORY_BYTES", 0)
        yield stored(request.param, tmp_path_factory, pictures)


def stored(kind, tmp_path_factory, pictures):
    return searchable(
        tmp_path_factory.mktemp("where") / "s",
        *pictures,
        *video("clip.mp4", 70, 80),
        index=kind != "exact",
        price=[1.0, 2.0, 3.0, None, 5.0, 6.0, 7.0, float("nan")],
        category=["toys", "food"] * 4,
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two pictures."""
    return searchable(tmp_path_factory.mktemp("two") / "s", picture("a", 0), picture("b", 10))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("price >= 3", ["2.png", "4.png", "5.png", "clip.mp4"]),
        ("price < 3 AND category = 'food'", ["1.png"]),
        ("NOT price < 5", ["4.png", "5.png", "clip.mp4"]),  # NULL is not false, and still no hit
        ("price IS NULL", ["3.png"]),
        ("caption ILIKE '%RED%'", ["0.png", "2.png"]),
        ("caption = 'grün'", ["4.png"]),
        ("modality = 'video' AND end_s > 5", ["clip.mp4"]),
        ("uri LIKE '/pictures/_.png' AND item_id > '3'", ["3.png", "4.png", "5.png"]),
        ("price > (SELECT avg(price) FROM embeddings WHERE price < 100)", ["4.png", "5.png", "clip.mp4"]),
        ("price < 2 -- and nothing else", ["0.png"]),
        ("NULL", []),
        ("false", []),
    ],
)
def test_only_rows_that_fulfil_the_condition_answer(store, where, expected):
    hits = store.search(QUERY, k=10, where=where)
    assert ids(hits) == expected
    assert bool(hits.note) == (not expected)


def test_k_hits_come_back_though_they_are_the_farthest(store):
    assert ids(store.search(QUERY, k=2, where="price > 4 AND modality = 'image'")) == ["4.png", "5.png"]


def test_each_query_of_a_batch_is_filtered(store):
    answers = store.search(np.stack([QUERY, towards(60)]), k=2, where="category = 'toys' AND segment = 0")
    assert [ids(hits) for hits in answers] == [["0.png", "2.png"], ["clip.mp4", "4.png"]]


def test_nothing_found_tells_why(store):
    assert store.search(QUERY, where="price > 99 AND price < 100").note.startswith("none of 8 ")


MISTAKES = {
    "prise < 3": ("no column 'prise'", "did you mean price?"),
    "colour = 'x'": ("no column 'colour'", "item_id VARCHAR, segment INTEGER, modality VARCHAR"),
    'category = "toys"': ("no column 'toys'", "single quotes"),
    "image_embedding IS NULL": ("no column 'image_embedding'", "vectors are no part"),
    "price <": ("syntax error",),
    " ": ("it is empty",),
    "price": ("it gives DOUBLE", "must give BOOLEAN"),
    "segment": ("it gives INTEGER",),
    "category": ("it gives VARCHAR",),
    "COLUMNS(*) IS NULL": ("BOOLEAN, BOOLEAN",),
    "category < 3": ("Cannot compare values of type VARCHAR",),
    "price = 'dear'": ("Could not convert string 'dear'",),
    "cast(category AS INT) = 1": ("Could not convert",),
    "sum(price) > 1": ("aggregates",),
    "price < ?": ("",),
}


@pytest.mark.parametrize("where", MISTAKES)
def test_a_mistake_tells_what_was_found_and_the_cure(store, where):
    with pytest.raises(ConfigError) as caught:
        store.search(QUERY, where=where)
    message = str(caught.value)
    assert message.startswith(f"where {where!r}: ")
    assert all(part in message for part in MISTAKES[where])
    assert len(message.splitlines()) == 1
    assert ids(store.search(QUERY, k=1, where="price = 2")) == ["1.png"], "the next condition is answered"


ATTACKS = [
    *(each for each in (FILES + NETWORK).split("\n") if each and "arrow_scan" not in each and "write_log" not in each),
    *("true; DROP TABLE embeddings", "true -- \n ; COPY embeddings TO '{tmp}/out.csv'", "true FROM range(3)"),
    *("true) UNION SELECT 0 FROM range(3) WHERE (true", "true) --", "true /*", "true, false"),
    *("true ORDER BY price LIMIT 1", "getenv('HOME') IS NOT NULL", "EXISTS (SELECT 1 FROM secret_rows)"),
    "EXISTS (SELECT 1 FROM query('SELECT * FROM read_text(''{tmp}/secret.csv'')'))",
    *("EXISTS (SET enable_external_access = true)", "EXISTS (PRAGMA enable_profiling)"),
    "EXISTS (DELETE FROM embeddings RETURNING 1)",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_condition_reaches_nothing_but_the_rows(attack, two, tmp_path):
    (tmp_path / "secret.csv").write_text("word\nhidden\n")
    secret_rows = two.to_arrow()  # DuckDB looks for names in the caller's variables, unless it must not
    before = [sorted(folder.iterdir()) for folder in (tmp_path, Path())]
    with pytest.raises(ConfigError) as caught:
        two.search(QUERY, where=attack.format(tmp=tmp_path, port=9))
    assert "hidden" not in str(caught.value).replace(attack.format(tmp=tmp_path, port=9), "")
    assert [sorted(folder.iterdir()) for folder in (tmp_path, Path())] == before
    assert len(two.search(QUERY, where="true")) == secret_rows.num_rows


def test_the_connection_can_not_be_opened_from_within(two, tmp_path):
    import duckdb

    connection = RowFilter(two.to_arrow(["item_id"]))._connection
    for statement in (
        "SET enable_external_access = true",
        "RESET enable_external_access",
        "SET threads = 8",
        f"ATTACH '{tmp_path}/out.db'",
        f"COPY (SELECT 1) TO '{tmp_path}/out.csv'",
        "INSTALL httpfs",
        "LOAD httpfs",
    ):
        with pytest.raises(duckdb.Error):
            connection.execute(statement)


def test_a_condition_without_end_is_stopped(two, monkeypatch):
    monkeypatch.setattr(filters, "DEADLINE_S", 0.2)
    pairs = "range(10000000) AS x, range(10000000) AS y"
    with pytest.raises(ConfigError, match="not evaluated within"):
        two.search(QUERY, where=f"(SELECT count(*) FROM {pairs} WHERE (x.range * y.range) % 7 = segment) > 0")
    assert len(two.search(QUERY, where="true")) == 2
