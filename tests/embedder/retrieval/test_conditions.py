"""Conditions of strangers: which are known to be harmless, and how long they may take."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from where_attacks import ATTACKS

from embedder.errors import ConfigError
from embedder.retrieval.conditions import FUNCTIONS, MAX_CHARACTERS, WITHIN, check_condition
from embedder.retrieval.filters import RowFilter

COLUMNS = {
    "item_id": "VARCHAR",
    "segment": "INTEGER",
    "price": "DOUBLE",
    "caption": "VARCHAR",
    "tags": "VARCHAR[]",
    "place": "STRUCT(city VARCHAR)",
    "seen_at": "TIMESTAMP",
    "order": "BIGINT",
}
HARMLESS = [
    "price < 10 AND (caption ILIKE '%red%car%' OR NOT segment = 0)",
    "PRICE between 1 and 2.5 or price is null",
    "caption IN ('a', 'b') AND caption NOT IN ('c')",
    "caption LIKE '_a%' AND caption NOT LIKE '100!%' ESCAPE '!'",
    "list_contains(tags, 'x') OR 'y' IN tags OR tags[1] = 'z'",
    "place.city = 'Berlin' AND embeddings.place.city = 'Berlin'",
    "seen_at >= DATE '2024-01-01' - INTERVAL 3 DAY AND year(seen_at) = 2024",
    "date_trunc('month', seen_at) = DATE '2024-02-01'",
    '"order" = 1',
    "CASE WHEN price > 1 THEN true WHEN price < 0 THEN false END",
    "cast(price AS DECIMAL(10, 2))::VARCHAR = '1.00' AND TRY_CAST(caption AS INT) = 1",
    "coalesce(price, 0) = 0 AND ifnull(price, 1) = 1 AND nullif(price, 2) = 2",
    "price IS DISTINCT FROM 3 AND -price // 2 % 3 > 1e-3",
    "caption IN (" + ",".join(f"'{number}'" for number in range(300)) + ")",
    "true /* a comment */ -- and another",
]


@pytest.mark.parametrize("where", HARMLESS)
def test_comparisons_of_columns_are_taken(where):
    assert check_condition(where, COLUMNS) == where


def test_a_column_with_the_name_of_a_word_is_evaluated_in_quotes():
    assert check_condition("order = 1 AND caption = 'order'", COLUMNS) == "\"order\" = 1 AND caption = 'order'"


@pytest.mark.parametrize("where", [attack for attack in ATTACKS if attack not in ("true /*", "true, false")])
def test_attacks_are_refused_before_they_are_evaluated(where):
    with pytest.raises(ConfigError) as caught:
        check_condition(where, {name: COLUMNS[name] for name in ("item_id", "segment", "caption")})
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "where", ["price < '\ud800'", "x" * (MAX_CHARACTERS + 1), "prise < 1", "place.x.y = 1 AND z.x"]
)
def test_what_can_not_be_a_condition_is_told_in_a_line(where):
    with pytest.raises(ConfigError, match="^where") as caught:
        check_condition(where, COLUMNS)
    str(caught.value).encode()


def test_every_function_that_is_taken_exists_and_is_deterministic():
    import duckdb

    rows = duckdb.sql("SELECT function_name, stability FROM duckdb_functions()").fetchall()
    known = dict(rows)
    for name in FUNCTIONS - {"if", "ifnull", "nullif", "position", WITHIN}:  # of the parser, the binder, and a macro
        assert known[name] == "CONSISTENT", name


def test_the_documentation_lists_the_functions():
    text = (Path(__file__).parents[3] / "docs" / "serve.md").read_text(encoding="utf-8")
    listed = text.partition("a condition may be any SQL expression.")[2].partition("- **")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == FUNCTIONS


@pytest.fixture(scope="module")
def filters():
    """200,000 rows with long captions."""
    rng = np.random.default_rng(0)
    words = np.array(["red", "car", "rain", "aaaa", "dog", "cake"])
    captions = [" ".join(each) for each in words[rng.integers(0, 6, (100, 40))]]
    number = np.arange(200_000)
    return RowFilter(
        pa.table({"segment": number, "caption": [captions[each % 100] + str(each) for each in number.tolist()]})
    )


SLOW = [
    " OR ".join(f"caption ILIKE '%a%a%a%x{number}%'" for number in range(100)),
    "caption ILIKE '%" + "a%" * 1900 + "x'",
    " OR ".join(f"lower(upper(lower(upper(caption)))) = '{number}'" for number in range(60)),
    "CASE " + " ".join(f"WHEN caption ILIKE '%zz{number}%' THEN true" for number in range(80)) + " END",
    " OR ".join(f"contains(upper(caption), '{'A' * 30}{number}')" for number in range(60)),
]


@pytest.mark.parametrize("number", range(len(SLOW)))
def test_a_slow_condition_is_interrupted_and_the_next_is_evaluated(filters, number):
    for _ in range(2):
        with pytest.raises(ConfigError, match="not evaluated within 0.05 s"):
            filters.remember(SLOW[number], 0.05)
    assert filters.matching(f"segment = {number}").sum() == 1


def test_a_remembered_result_is_the_one_that_is_found(filters):
    filters.remember("segment % 7 = 3", 10.0)
    assert filters.has_mask("segment % 7 = 3")
    assert not filters.has_mask("segment % 7 = 4")
    mask = filters.matching("segment % 7 = 3")
    assert np.array_equal(mask, np.arange(200_000) % 7 == 3)
    with pytest.raises(ValueError, match="read-only"):
        mask[0] = True


def test_few_rows_are_given_as_numbers_and_many_as_a_mask(filters):
    few, many = filters.passing("segment % 1000 = 3"), filters.passing("segment % 3 = 0")
    assert few.tolist() == list(range(3, 200_000, 1000))
    assert few.dtype == np.int64
    assert np.array_equal(many, np.arange(200_000) % 3 == 0)
    assert np.array_equal(np.flatnonzero(filters.matching("segment % 1000 = 3")), few)
    filters.remember("segment % 1000 = 3", 10.0)
    assert np.array_equal(filters.passing("segment % 1000 = 3"), few)
    assert filters.passing("segment < 0").tolist() == []


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("embedder.retrieval.filters.MAX_REMEMBERED_BYTES", 0)
    few = RowFilter(pa.table({"segment": [0, 1, 2]}))
    for number in range(20):
        few.remember(f"segment = {number}", 10.0)
    assert not few.has_mask("segment = 0")
    assert few.has_mask("segment = 19")
    assert few.matching("segment = 0").tolist() == [True, False, False]
