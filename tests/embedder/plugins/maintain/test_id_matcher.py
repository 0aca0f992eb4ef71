"""Names of items are found in texts exactly."""

import pytest

from embedder.plugins.maintain.purge.id_matcher import ItemNames


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        ("a.jpg", True),
        ("/pictures/a.jpg: broken", True),
        ("could not read 'a.jpg'.", True),
        ("the end is a.jpg.", True),
        ("aa.jpg", False),
        ("a.jpg.png", False),
        ("a.jpg/x", False),
        ('{"min": "a.jpg"}', True),
        ({"deep": [{"a.jpg": 1}]}, True),
        (12, False),
    ],
)
def test_a_name_is_found_where_it_is_one(text, is_named):
    names = ItemNames(["a.jpg"])
    assert bool(names.found_in(text)) is is_named
    assert not names.found_in(names.removed_from(text))


def test_short_names_and_numbers_count_only_as_a_whole_or_in_quotes():
    names = ItemNames(["7", "red", "12345"])
    assert not names.found_in(["stage 7", "a red car", "12345 items", 7])
    assert names.found_in("7")
    assert names.found_in(["item 'red': broken"])
    assert names.removed_from(["7", "item 'red': broken", "stage 7"]) == [
        "[purged]",
        "item [purged]: broken",
        "stage 7",
    ]


def test_of_many_names_with_one_beginning_each_is_found_where_it_is_one():
    few = ["ab/cd", "ab/cd.jpg", "ab/ce (1).jpg", "ab/cd.jpg two", "zz+.png"]
    nested = ["x" * length for length in range(4, 400)]
    names = ItemNames([*few, *nested])
    for name in (*few, *nested):
        assert name in names.found_in(f"could not read /pictures/{name}: odd")
        assert names.removed_from(f"read {name}") == "read [purged]"
    assert names.found_in(["ab/c", "ab/cdx", "ab/ce.jpg", "x" * 401, "zzz.png"]) == frozenset()
