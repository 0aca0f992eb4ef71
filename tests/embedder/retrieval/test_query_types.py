"""Kinds of queries distinguished by their types, and options of wrong types refused with what is expected."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from search_stores import QUERY, ids, picture, searchable

from embedder.errors import ArgumentTypeError, ConfigError
from embedder.retrieval.queries import SearchOptions, read_options, read_queries
from index.index_errors import RetrievalError

PIXELS = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)
VECTOR = np.ones(3, np.float32)

KINDS = {
    "a text": ("a car", "text", 1, True),
    "texts": (["a", "b"], "text", 2, False),
    "a tuple of texts": (("a", "b"), "text", 2, False),
    "an array of texts": (np.array(["a", "b"]), "text", 2, False),
    "a column of texts": (pa.array(["a", "b"]), "text", 2, False),
    "no texts": ([], "text", 0, False),
    "a vector": (VECTOR, "vector", 1, True),
    "numbers": ([0.5, 1], "vector", 1, True),
    "numbers of NumPy": ([np.float32(1), np.float32(0)], "vector", 1, True),
    "vectors": (np.ones((4, 3)), "vector", 4, False),
    "vectors in a list": ([VECTOR, VECTOR], "vector", 2, False),
    "whole numbers": (np.array([1, 0]), "vector", 1, True),
    "no vectors": (np.empty((0, 3), np.float32), "vector", 0, False),
    "a path": (Path("a.png"), "image", 1, True),
    "the bytes of a file": (b"\x89PNG", "image", 1, True),
    "an image of Pillow": (Image.fromarray(PIXELS), "image", 1, True),
    "an array of pixels": (PIXELS, "image", 1, True),
    "grey pixels": (PIXELS[:, :, 0], "image", 1, True),
    "a stack of pixels": (np.stack([PIXELS, PIXELS]), "image", 2, False),
    "images of all forms": ([PIXELS, Path("a.png"), b"x", Image.fromarray(PIXELS)], "image", 4, False),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_a_query_follows_from_its_type(name):
    query, kind, number, is_single = KINDS[name]
    found = read_queries(query, None)
    assert (found.kind, len(found.values), found.is_single) == (kind, number, is_single)


def test_a_name_beside_image_is_a_path_and_as_a_query_a_text():
    assert read_queries(None, "a.png").values == [Path("a.png")]
    assert read_queries("a.png", None).kind == "text"


def test_images_are_known_by_their_places_where_they_are_several():
    names = [parts.name for parts in read_queries(None, [PIXELS, "b.png", b"x"]).parts]
    assert len(set(names)) == 3
    assert names[1] == "b.png"


MISTAKES = {
    "a number": (5, ArgumentTypeError, "found int; give a text, an image (a path"),
    "a dictionary": ({"a": 1}, ArgumentTypeError, "found dict"),
    "a set": ({"a"}, ArgumentTypeError, "found set"),
    "truths": ([True], ArgumentTypeError, "a list of bool"),
    "a text and an image": (["a", b"x"], ArgumentTypeError, "a list of bytes and str"),
    "a text and a vector": ([VECTOR, "a"], ArgumentTypeError, "a list of ndarray and str"),
    "a text and nothing": (["a", None], ArgumentTypeError, "a list of NoneType and str"),
    "an image and a vector": ([PIXELS, VECTOR], ArgumentTypeError, "a list of ndarray"),
    "pixels as floats": (PIXELS / 255, RetrievalError, "an array of pixels is uint8 [0, 255]"),
    "bytes as a vector": (np.uint8([1, 2]), RetrievalError, "a vector is an array of floats"),
    "one number": (np.float32(1), RetrievalError, "of shape ()"),
    "too many dimensions": (np.ones((1, 1, 1, 1)), RetrievalError, "several (Q, E)"),
    "uneven vectors": ([VECTOR, VECTOR[:1]], RetrievalError, "several (Q, E)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_query_is_told_in_a_line_with_what_is(name):
    query, kind, message = MISTAKES[name]
    with pytest.raises(kind, match="^query: [^\n]*$") as caught:
        read_queries(query, None)
    assert message in str(caught.value)


OPTIONS = [
    ({"k": 2.5}, "k: found 2.5 (float); give a whole number"),
    ({"k": "5"}, "k: found '5' (str)"),
    ({"k": True}, "k: found True (bool)"),
    ({"k": None}, "k: found None"),
    ({"where": 5}, "where: found 5 (int); give a condition as a text"),
    ({"group": "yes"}, "group: found 'yes' (str); give True or False"),
    ({"hybrid": 1}, "hybrid: found 1 (int)"),
    ({"fold": "0.9"}, "fold: found '0.9' (str); give a cosine"),
    ({"min_score": [0.1]}, "min_score: found [0.1] (list)"),
]


@pytest.mark.parametrize(("keywords", "message"), OPTIONS)
def test_an_option_of_another_type_is_told_with_what_is_expected(keywords, message):
    with pytest.raises(ArgumentTypeError) as caught:
        read_options(SearchOptions(), keywords)
    assert message in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_options_are_given_whole_or_as_a_number():
    assert read_options(np.int64(7), {}) == SearchOptions(k=7)
    assert read_options(3, {"k": 5}) == SearchOptions(k=5), "a keyword stands over the number"
    for options in ("5", None, 2.0, {"k": 3}):
        with pytest.raises(ArgumentTypeError, match="^options: found .*; give SearchOptions, or a number of hits"):
            read_options(options, {})


def test_numbers_of_numpy_become_those_of_python():
    options = SearchOptions(k=np.int32(4), fold=np.float32(0.5), group=np.bool_(False), min_score=0)
    values = options.k, options.fold, options.group, options.min_score
    assert [type(each) for each in values] == [int, float, bool, float]


def test_a_store_answers_vectors_of_every_form(tmp_path):
    store = searchable(tmp_path / "s", *(picture(f"{number}.png", 30 * number) for number in range(3)))
    expected = ids(store.search(QUERY, 2))
    for query in (QUERY.tolist(), QUERY.astype(np.float64), [1, 0]):
        assert ids(store.search(query, 2)) == expected
    assert [ids(hits) for hits in store.search([QUERY, QUERY], 2)] == [expected] * 2
    for search in (store.search, store.searcher.snapshot.vectors.search):  # a warning would be an error
        with np.errstate(over="raise"), pytest.raises(RetrievalError, match="every value must be finite"):
            search(np.array([[1e300, 0.0]]), 2)
    with pytest.raises(ConfigError, match="uint8"):
        store.search(image=np.ones((4, 4, 3)))
