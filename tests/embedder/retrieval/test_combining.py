"""Texts and images together, and examples to stay away from: the vector, the ranking, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from search_stores import QUERY, ids, picture, searchable, towards, video

from embedder.errors import ArgumentTypeError, ConfigError
from embedder.retrieval.queries import SearchOptions, read_search
from embedder.retrieval.snapshot_search import EXAMPLE_COSINE, combine, cosine_deviation, is_apart
from index.index_errors import RetrievalError


def unit(values):
    values = np.asarray(values, np.float32)
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def apart():
    """A space with a gap: images (S, 24) far from texts, whose cosines with texts differ less than half as much.

    Coordinate 0 is the gap, the next twenty are what images look like, the last three what texts can say of them.
    """
    looks = np.random.default_rng(5).normal(size=(400, 20))
    said = np.random.default_rng(6).normal(size=(400, 3))
    images = unit(np.concatenate([np.full((400, 1), 3.0), looks, 0.5 * said], axis=1))
    text = unit([-5.0, *[0.0] * 20, 1.0, 0.0, 0.0])
    return images, text


def test_both_parts_move_the_ranking_across_a_modality_gap(apart):
    images, text = apart
    image = images[7]
    plain = unit(text + image)
    (query,) = combine([(0.5, text[None]), (0.5, image[None])], None, 0.5, images)
    assert np.linalg.norm(query) == pytest.approx(1, abs=1e-6)
    assert cosine_deviation(image[None], images)[0] > 2 * cosine_deviation(text[None], images)[0]

    def followed(vector):
        return [np.corrcoef(images @ vector, images @ each)[0, 1] for each in (text, image)]

    assert followed(plain) == [pytest.approx(0.16, abs=0.02), pytest.approx(0.93, abs=0.02)], "a plain sum: the image"
    assert followed(query)[0] == pytest.approx(followed(query)[1], abs=1e-3), "equal weights, equal parts"
    assert followed(query)[0] > 0.6


def test_the_weight_of_the_text_leads_from_the_image_to_the_text(apart):
    images, text = apart
    parts = [text[None], images[7][None]]
    ranks = {}
    for weight in (0.0, 0.25, 0.5, 0.75, 1.0):
        (query,) = combine([(weight, parts[0]), (1 - weight, parts[1])], None, 0.5, images)
        ranks[weight] = np.corrcoef(images @ query, images @ text)[0, 1]
    assert list(ranks.values()) == sorted(ranks.values())
    (only_image,) = combine([(0.0, parts[0]), (1.0, parts[1])], None, 0.5, images)
    (only_text,) = combine([(1.0, parts[0]), (0.0, parts[1])], None, 0.5, images)
    np.testing.assert_allclose(only_image, images[7], atol=1e-6)
    np.testing.assert_allclose(only_text, text, atol=1e-6)


def test_examples_count_together_whatever_their_number(apart):
    images, text = apart
    one = combine([(1.0, text[None])], images[[3]], 0.5, images)
    twice = combine([(1.0, text[None])], images[[3, 3]], 0.5, images)
    np.testing.assert_allclose(one, twice, atol=1e-6)
    by_hand = (
        text / cosine_deviation(text[None], images)[0] - 0.5 * images[3] / cosine_deviation(images[[3]], images)[0]
    )
    np.testing.assert_allclose(one[0], unit(by_hand), atol=1e-6)
    np.testing.assert_allclose(combine([(1.0, text[None])], images[[3]], 0.0, images)[0], text, atol=1e-6)


def test_queries_of_a_batch_are_combined_as_each_alone(apart):
    images, text = apart
    texts = unit(np.stack([text, text + 0.1 * images[1], text - 0.1 * images[2]]))
    together = combine([(0.3, texts), (0.7, images[:3])], images[4:6], 0.5, images)
    for number in range(3):
        parts = [(0.3, texts[[number]]), (0.7, images[[number]])]
        assert np.array_equal(combine(parts, images[4:6], 0.5, images)[0], together[number]), "to the last bit"


@pytest.mark.parametrize("sample", [np.empty((0, 0)), np.ones((1, 2)), np.ones((5, 2))])
def test_a_store_of_nothing_of_one_and_of_equal_vectors_gives_a_plain_sum(sample):
    found = combine([(0.5, QUERY[None]), (0.5, towards(90)[None])], None, 0.5, sample.astype(np.float32))
    np.testing.assert_allclose(found[0], towards(45), atol=1e-6)


def test_parts_that_cancel_each_other_out_are_refused():
    sample = np.stack([towards(angle) for angle in range(0, 90, 10)])
    with pytest.raises(ConfigError, match="cancel each other out; .*smaller not_weight"):
        combine([(1.0, QUERY[None])], QUERY[None], 1.0, sample)


def test_only_vectors_that_are_an_example_are_not_apart():
    near = np.degrees(np.arccos(EXAMPLE_COSINE))
    vectors = np.stack([towards(0), 1.01 * towards(near - 1), towards(near + 1), towards(90), towards(91)])
    assert is_apart(vectors, np.stack([towards(0), towards(90)])).tolist() == [False, False, True, False, False]


@pytest.fixture(scope="module", params=[True, False], ids=["an index", "no index"])
def store(request, tmp_path_factory):
    """Pictures every 15 degrees and a video, with captions in which every second one is a dog."""
    rows = [picture(f"{n}.png", 15 * n, caption="a dog" if n % 2 else "a cat") for n in range(6)]
    return searchable(
        tmp_path_factory.mktemp("s") / "s", *rows, *video("v.mp4", 20, 60, 70), index=request.param,
        price=[float(n) for n in range(9)],
    )  # fmt: skip


def search(store, angle, *away, k=20, texts=None, **options):
    """Search in a direction, away from others."""
    options = SearchOptions(k=k, **options)
    examples = np.stack([towards(each) for each in away]) if away else None
    query = store.searcher.combine([(1.0, towards(angle)[None])], examples, options)
    return store.searcher.search_batch(query, options, texts=texts, away=[examples])[0]


def test_an_example_is_no_hit_and_what_is_like_it_comes_later(store):
    assert ids(search(store, 0))[:4] == ["0.png", "1.png", "v.mp4", "2.png"]
    hits = search(store, 30, 0)
    assert "0.png" not in ids(hits)
    before, after = ids(search(store, 29)), ids(search(store, 29, 0))
    assert before.index("1.png") < before.index("3.png")
    assert after.index("1.png") > after.index("3.png")
    assert {hit.item_id for hit in hits} == {"1.png", "2.png", "3.png", "4.png", "5.png", "v.mp4"}, "k are found"


def test_a_video_keeps_its_other_segments_where_one_is_the_example(store):
    hits = {hit.item_id: hit for hit in search(store, 0, 20)}
    assert hits["v.mp4"].segment == 1
    assert [segment.start_s for segment in hits["v.mp4"].segments] == [10.0]
    segments = [(hit.item_id, hit.segment) for hit in search(store, 0, 20, group=False)]
    assert ("v.mp4", 0) not in segments
    assert {("v.mp4", 1), ("v.mp4", 2)} < set(segments)


def test_k_hits_are_found_beside_the_examples(store):
    for k in (1, 2, 3, 5):
        assert len(search(store, 0, 0, 15, k=k)) == k


def test_conditions_folding_least_scores_and_words_go_together_with_examples(store):
    assert ids(search(store, 0, 15, where="price BETWEEN 1 AND 3"))[0] == "2.png"
    folded = search(store, 0, 90, fold=0.96, k=2)
    assert (folded[0].item_id, [each.item_id for each in folded[0].duplicates]) == ("0.png", ["1.png"])
    assert all(hit.score >= 0.5 for hit in search(store, 0, 15, min_score=0.5))
    hits = search(store, 0, 15, hybrid=True, texts=["dog"])
    assert "1.png" not in ids(hits), "its caption says dog, but it is the example"
    assert {hit.item_id for hit in hits if hit.words_rank} == {"3.png", "5.png"}


def test_the_reason_is_told_where_nothing_but_examples_was_found(store):
    hits = search(store, 0, 15, where="item_id = '1.png'")
    assert (list(hits), hits.note) == ([], "there is nothing but the examples to stay away from")
    hits = search(store, 0, 15, where="item_id = '1.png'", min_score=0.1)
    assert "with a score of 0.1 or more" in hits.note


def test_queries_with_examples_and_without_are_answered_in_one_batch(store):
    queries = np.stack([QUERY, QUERY, towards(75)])
    away = [None, QUERY[None], None]
    found = store.searcher.search_batch(queries, SearchOptions(k=3), away=away)
    assert [ids(hits)[0] for hits in found] == ["0.png", "1.png", "5.png"]


def test_a_vector_of_another_model_is_refused_before_it_is_combined(store):
    options = SearchOptions()
    with pytest.raises(RetrievalError, match="dimensions"):
        store.searcher.combine([(1.0, unit(np.ones((1, 5))))], QUERY[None], options)
    with pytest.raises(RetrievalError, match="norm"):
        store.searcher.combine([(1.0, QUERY[None])], 3 * QUERY[None], options)


def read(query=None, image=None, **given):
    return read_search(query, image, given.pop("options", SearchOptions()), {}, **given)[0]


def test_texts_and_images_are_paired():
    one = read("red", "a.png")
    assert (one.values, one.images, one.is_single, one.is_combined) == (["red"], [Path("a.png")], True, True)
    texts = read(["red", "blue"], "a.png")
    assert (texts.values, texts.images, texts.is_single) == (["red", "blue"], [Path("a.png")] * 2, False)
    images = read("red", ["a.png", "b.png"])
    assert (images.values, images.images) == (["red"] * 2, [Path("a.png"), Path("b.png")])
    both = read(["red", "blue"], ["a.png", "b.png"])
    assert (both.values, both.images) == (["red", "blue"], [Path("a.png"), Path("b.png")])
    assert not read("red").is_combined


def test_names_of_queries_say_what_they_consist_of():
    assert [parts.name for parts in read(["red", "blue"], b"x").parts] == ["red + image 0", "blue + image 1"]
    assert read("red", "a.png").parts[0].name == "red + a.png"
    assert read("red", not_text=["dog", "cat"], not_image="b.png").parts[0].name == "red but not dog or cat or b.png"
    assert read(QUERY, not_text="dog").parts[0].name == "a vector but not dog"
    assert read(QUERY).parts[0].name == ""


MISTAKES = {
    "no query": ({}, ConfigError, "there is no query"),
    "only examples": ({"not_text": "dog"}, ConfigError, "there is no query"),
    "a vector and an image": ({"query": QUERY, "image": "a.png"}, ConfigError, "a given vector"),
    "2 texts, 3 images": ({"query": ["a", "b"], "image": ["c", "d", "e"]}, ConfigError, "2 texts and 3 images"),
    "an empty example": ({"query": "a", "not_text": [" "]}, ConfigError, "not_text: it is empty"),
    "an example that is a number": ({"query": "a", "not_text": [3]}, ArgumentTypeError, "found int"),
    "examples that are none": ({"query": "a", "not_text": 3}, ArgumentTypeError, "not_text: found int"),
    "an image that is none": ({"query": "a", "not_image": [3]}, ArgumentTypeError, "not_image"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_line(name):
    given, kind, message = MISTAKES[name]
    with pytest.raises(kind, match="^[^\n]*$") as caught:
        read(**given)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["text_weight", "not_weight"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_weight_out_of_range_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} is .*from 0 to 1"):
        SearchOptions(**{name: value})
