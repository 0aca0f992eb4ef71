"""Columns named like words of SQL: quoted by themselves wherever that is unambiguous, and nothing else is touched."""

import pyarrow as pa
import pytest

from embedder.errors import ConfigError
from embedder.retrieval.conditions import MAX_NESTING, list_columns, nesting, quoted_columns, unknown_column
from embedder.retrieval.filters import RowFilter

COLUMNS = ["group", "Order", "price", "end", "left", "all", "and", "null", "tags", "grün"]
QUOTED = {
    "group = 'group'": "\"group\" = 'group'",
    "GROUP = 'a' and ORDER > 1": '"GROUP" = \'a\' and "ORDER" > 1',
    "not group = 1 or left > 1": 'not "group" = 1 or "left" > 1',
    "grün = 'ü group' AND group IN ('é')": "grün = 'ü group' AND \"group\" IN ('é')",
    "group = 1 -- group\n AND /* order */ order = 2": '"group" = 1 -- group\n AND /* order */ "order" = 2',
    "group = $$group$$ OR group = e'\\'group'": '"group" = $$group$$ OR "group" = e\'\\\'group\'',
    "group IS NULL AND price < 1": '"group" IS NULL AND price < 1',
    "left(grün, 2) = 'ab' AND left > 1": '"left"(grün, 2) = \'ab\' AND "left" > 1',
    "embeddings.group = 'a' AND group[1] = 'b'": "embeddings.\"group\" = 'a' AND \"group\"[1] = 'b'",
    "group BETWEEN 1 AND 2": '"group" BETWEEN 1 AND 2',
}
UNTOUCHED = [
    '"group" = 1',
    "price < 1 AND grün = 'group'",
    "price IS NULL",
    "price < ",
    "group = null",  # NULL, or the column?
    "CASE WHEN end > 1 THEN true END",  # one of the two ends the CASE
    "group = 'x') GROUP BY (1",
    "group = 1; DROP TABLE embeddings",
    "group = '\ud800'",
    "(" * 500 + "group" + ")" * 500,
]


@pytest.mark.parametrize("where", QUOTED)
def test_a_column_with_the_name_of_a_word_is_quoted(where):
    assert quoted_columns(where, COLUMNS) == QUOTED[where]


@pytest.mark.parametrize("where", UNTOUCHED)
def test_what_has_another_meaning_or_none_stays_as_it_is(where):
    assert quoted_columns(where, COLUMNS) == where


OF_MODELS = ["labels.top", "labels.Order", "labels.x-y", 'labels.a"b', "main.image", "tags", "tags.top", "price"]
QUOTED_OF_MODELS = {
    "labels.top = 'labels.top'": "\"labels.top\" = 'labels.top'",
    "LABELS.TOP = 1 AND labels.order = 2": '"labels.top" = 1 AND "labels.Order" = 2',
    'labels."x-y" = 1 AND labels."a""b" = 2': '"labels.x-y" = 1 AND "labels.a""b" = 2',
    "labels.top[1].label = 'é' -- labels.top": "\"labels.top\"[1].label = 'é' -- labels.top",
    "'ü' = 'ü' AND main.image IS NULL": "'ü' = 'ü' AND \"main.image\" IS NULL",
    "tags.top = 1": "tags.top = 1",  # a field of the table's own column
    '"labels.top" = 1': '"labels.top" = 1',
    "embeddings.labels.top = 1": "embeddings.labels.top = 1",
    "labels.topp = 1": "labels.topp = 1",
    "labels .top = 1": "labels .top = 1",
    "labels.top = '\ud800'": "labels.top = '\ud800'",
}


@pytest.mark.parametrize("where", QUOTED_OF_MODELS)
def test_a_column_of_another_model_is_quoted_whole(where):
    assert quoted_columns(where, OF_MODELS) == QUOTED_OF_MODELS[where]


def test_only_columns_that_are_there_are_quoted():
    assert quoted_columns("group = 1", ["price", "order"]) == "group = 1"


def test_brackets_of_literals_and_comments_are_not_counted():
    assert nesting("((a)) = '((((' AND b[1] = $$(((($$ -- ((((") == 2
    assert nesting("f(g([{'a': (1)}]))") == 5


@pytest.fixture(scope="module")
def rows():
    return RowFilter(
        pa.table(
            {
                "group": ["a", "group", None],
                "order": [1, 2, 3],
                "end": [1, 2, 3],
                "price": [1.0, 2.0, 3.0],
                "tags": [["cat"], ["dog", "cat"], None],
                "sizes": [[1], [2], [3]],
                "Left side": ["x", "y", "z"],
                "uri": ["u"] * 3,
            }
        )
    )


@pytest.mark.parametrize("by", ["matching", "remember"])
def test_one_condition_means_the_same_to_everybody(rows, by):
    for where, expected in {
        "group = 'group'": [False, True, False],
        "Group = 'a' OR order = 3": [True, False, True],
        "group IS NULL": [False, False, True],
        "list_contains(tags, 'cat') AND order > 1": [False, True, False],
    }.items():
        if by == "remember":
            rows.remember(where, 10.0)
            assert rows.has_mask(where)
        assert rows.matching(where).tolist() == expected


MISTAKES = {
    "CASE WHEN end > 1 THEN true END": ('stands in double quotes: "end"',),
    "group = 1 AND": ('"group"',),
    "grup = 'a'": ("there is no column 'grup'", 'did you mean "group"?', '"group" VARCHAR, "order" BIGINT'),
    "PRIZE < 1": ("did you mean price", "price DOUBLE"),
    "leftside = 'x'": ('did you mean "Left side"?', '"Left side" VARCHAR'),
    "tag = 'cat'": ("tags VARCHAR[]", "list_contains(tags, 'cat')"),
    "size = 1": ("sizes BIGINT[]", "list_contains("),
}


@pytest.mark.parametrize("by", ["matching", "remember"])
@pytest.mark.parametrize("where", MISTAKES)
def test_a_mistake_lists_the_columns_as_they_are_written(rows, where, by):
    with pytest.raises(ConfigError, match="^where [^\n]*$") as caught:
        rows.matching(where) if by == "matching" else rows.remember(where, 10.0)
    assert all(part in str(caught.value) for part in MISTAKES[where]), str(caught.value)


def test_a_list_that_is_compared_is_told_with_its_own_example(rows):
    with pytest.raises(ConfigError, match=r"list_contains\(sizes, 1\)"):
        rows.matching("sizes = 'x'")
    with pytest.raises(ConfigError, match=r"list_contains\(tags, 'cat'\)"):
        rows.matching("tags LIKE '%cat%'")


def test_hidden_columns_are_not_named_to_strangers(rows):
    with pytest.raises(ConfigError) as caught:
        rows.remember("urx = 'u'", 10.0, hidden=("uri",))
    assert "uri VARCHAR" not in str(caught.value)
    assert "did you mean" not in str(caught.value)


def test_many_columns_and_hostile_names_stay_one_readable_line():
    columns = {f"column_{number}": "DOUBLE" for number in range(300)} | {"a\nb\x1b[2J": "VARCHAR"}
    assert list_columns("", columns).endswith("and 261 more")
    message = unknown_column("x\x1b[2J", "", {"a\nb\x1b[2J": "VARCHAR", 'c"d': "STRUCT(" + "x" * 500 + ")"})
    assert "\n" not in message and "\x1b" not in message
    assert '"c""d" STRUCT(' in message
    assert len(message) < 400


def test_nested_brackets_of_strangers_are_refused_before_duckdb_looks_into_them(rows):
    for where in ("(" * 1900 + "group" + ")" * 1900, "(" * (MAX_NESTING + 1) + "price"):
        with pytest.raises(ConfigError, match=f"brackets inside more than {MAX_NESTING} others"):
            rows.remember(where, 10.0)
    rows.remember("(" * MAX_NESTING + "price > 1" + ")" * MAX_NESTING, 10.0)


def test_text_that_is_none_is_told(rows):
    with pytest.raises(ConfigError, match="it is no UTF-8 text"):
        rows.matching("price < '\ud800'")


@pytest.mark.parametrize(
    ("where", "name", "cure"),
    [
        ("price < 10", "price", "a column of a source is there once it is carried over (`carryover`, `--carryover`)."),
        ("NOT weight", "weight", "a column of a source is there once it is carried over (`carryover`, `--carryover`)."),
        ("category = toys", "toys", "a text stands in single quotes: 'toys'."),
        ("category IN ('a', toys)", "toys", "a text stands in single quotes: 'toys'."),
        ('caption LIKE "toys"', "toys", "a text stands in single quotes: 'toys'."),
    ],
)
def test_a_name_that_is_no_column_is_told_as_what_it_was_meant(where, name, cure):
    columns = {"caption": "VARCHAR", "modality": "VARCHAR"}
    assert f"there is no column '{name}'; {cure} Columns are" in unknown_column(name, where, columns)
