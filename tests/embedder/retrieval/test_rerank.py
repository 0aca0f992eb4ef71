"""A second model scores the first hits, and orders them."""

import time
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
import samples

import embedder
from embedder import Stage, embed, load_config
from embedder.errors import ConfigError
from embedder.retrieval.hit import Hit
from embedder.retrieval.queries import SearchOptions
from embedder.retrieval.rerank import rerank_hits


class Brightness(Stage):
    columns_in = ("query", "image")
    columns_out: ClassVar = {"score": "float32"}

    def process(self, rows: Any) -> Any:
        self.queries = rows["query"].to_pylist()
        sizes = {(image["height"], image["width"]) for image in rows["image"].to_pylist()}
        assert sizes == {(512, 512)}
        return {"score": [np.frombuffer(image["pixels"], np.uint8).mean() for image in rows["image"].to_pylist()]}


class Backwards(Stage):
    columns_in = ("cosine", "item_id")
    columns_out: ClassVar = {"score": "float32"}

    def process(self, rows: Any) -> Any:
        return {"score": -rows["cosine"].to_numpy()}


class Captions(Backwards):
    columns_in = ("caption",)

    def process(self, rows: Any) -> Any:
        return {"score": [len(text) for text in rows["caption"].to_pylist()]}


class NotANumber(Backwards):
    def process(self, rows: Any) -> Any:
        return {"score": [float("nan")] * rows.num_rows}


class TooFew(Backwards):
    def process(self, rows: Any) -> Any:
        return {"score": [1.0]}


class ShortQueries(Backwards):
    """Refuses a query as `YesNoReranker` refuses one that fills it; has no score for the item `unscored`."""

    columns_in = ("query", "cosine", "item_id")

    def __init__(self, unscored: str = "", kind: Any = list) -> None:
        self.unscored, self.kind = unscored, kind

    def process(self, rows: Any) -> Any:
        if max(map(len, rows["query"].to_pylist())) > 20:
            raise ConfigError("the query fills what it reads; shorten it")
        pairs = zip(rows["item_id"].to_pylist(), rows["cosine"].to_pylist(), strict=True)
        return {"score": self.kind([None if item_id == self.unscored else -cosine for item_id, cosine in pairs])}


class Slow(Backwards):
    """Takes longer than it was given, in batches of two."""

    columns_in = ("cosine", "image")
    resources: ClassVar = {"batch_size": 2, "max_side_px": 40}

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.batches: list[int] = []

    def process(self, rows: Any) -> Any:
        time.sleep(0.1)
        self.batches.append(rows.num_rows)
        self.sizes += [(image["height"], image["width"]) for image in rows["image"].to_pylist()]
        return super().process(rows)


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rerank")
    source = samples.folder(folder / "in", num_images=6)
    embed(load_config(overrides={
        "model": str(tiny_model), "store": str(folder / "s"), "source": [{"path": str(source)}], "engine": "local",
    }))  # fmt: skip
    return folder


@pytest.fixture
def store(folder):
    return embedder.open_store(folder / "s")


def test_the_first_hits_are_ordered_by_the_scores_of_a_second_model(store) -> None:
    plain = store.search("a dog", k=6)
    hits = store.search("a dog", k=2, rerank=4, reranker=Backwards())
    assert [hit.item_id for hit in hits] == [hit.item_id for hit in plain[:4]][::-1][:2]
    assert [hit.rerank_score for hit in hits] == pytest.approx([-hit.score for hit in hits])
    assert plain[0].rerank_score is None
    assert hits.to_arrow()["rerank_score"].to_pylist() == [hit.rerank_score for hit in hits]


def test_hits_beyond_those_that_are_scored_follow_in_their_order(store) -> None:
    plain = [hit.item_id for hit in store.search("a dog", k=6)]
    hits = store.search("a dog", k=6, rerank=3, reranker=Backwards())
    assert [hit.item_id for hit in hits] == [*plain[:3][::-1], *plain[3:]]
    assert [hit.rerank_score is None for hit in hits] == [False] * 3 + [True] * 3


@pytest.mark.medium
def test_it_gets_the_query_and_the_image(store) -> None:
    stage = Brightness().load()
    answers = store.search(["a dog", "rain"], k=3, rerank=6, reranker=stage)
    assert stage.queries == ["rain"] * 6
    for hits in answers:
        scores = [hit.rerank_score for hit in hits]
        assert scores == sorted(scores, reverse=True)
        assert scores[0] == pytest.approx(np.asarray(hits[0].image()).mean())


def test_what_it_cannot_score_follows(folder) -> None:
    """An image that is gone, and an item without a caption."""
    store = embedder.open_store(folder / "s")
    gone = store.search("a dog", k=1)[0]
    path = folder / "in" / gone.item_id.removeprefix("in/")
    assert path.exists()
    away = path.rename(path.with_suffix(".away"))
    try:
        hits = store.search("a dog", k=6, rerank=6, reranker=Brightness())
    finally:
        away.rename(path)
    assert (hits[-1].item_id, hits[-1].rerank_score) == (gone.item_id, None)
    assert all(hit.rerank_score is not None for hit in hits[:-1])
    captions = [hit.caption for hit in store.search("a dog", k=6, rerank=6, reranker=Captions())]
    with_caption = [caption for caption in captions if caption is not None]
    assert captions[: len(with_caption)] == with_caption


@pytest.mark.parametrize("kind", [list, pa.array, lambda scores: pa.chunked_array([scores[:1], scores[1:]])])
def test_a_hit_whose_score_is_null_follows(store, kind: Any) -> None:
    plain = [hit.item_id for hit in store.search("a dog", k=6)]
    hits = store.search("a dog", k=6, rerank=4, reranker=ShortQueries(plain[2], kind))
    assert [hit.item_id for hit in hits] == [plain[3], plain[1], plain[0], plain[2], *plain[4:]]
    assert [hit.rerank_score is None for hit in hits] == [False] * 3 + [True] * 3


def test_a_query_that_it_refuses_has_the_first_order_and_the_others_their_own(store) -> None:
    texts = ["a dog", "a dog that is far too long", "rain"]
    plain = [[hit.item_id for hit in store.search(text, k=6)] for text in texts]
    answers = store.search(texts, k=3, rerank=6, reranker=ShortQueries())
    found = [[hit.item_id for hit in hits] for hits in answers]
    assert found == [plain[0][::-1][:3], plain[1][:3], plain[2][::-1][:3]]
    line = "the hits come in their first order: the query fills what it reads; shorten it"
    assert [line in hits.warnings for hits in answers] == [False, True, False]


@pytest.mark.medium
def test_after_its_time_the_hits_come_in_their_first_order(store) -> None:
    plain = [hit.item_id for hit in store.search("a dog", k=6)]
    stage = Slow()
    hits = store.search("a dog", k=3, rerank=6, reranker=stage, rerank_timeout_s=0.05)
    assert [hit.item_id for hit in hits] == plain[:3]
    assert all(hit.rerank_score is None for hit in hits)
    (line,) = hits.warnings
    assert "of 6 first hits after 0.05 s, so they come in their first order; give it more time" in line
    assert len(stage.batches) <= 1, "no batch begins after the time"
    answers = store.search(["a dog", "rain"], k=3, rerank=6, reranker=stage, rerank_timeout_s=20)
    assert [hit.item_id for hit in answers[0]] == plain[::-1][:3]
    assert stage.batches[-6:] == [2] * 6
    assert [hits.warnings for hits in answers] == [[], []]


def test_a_stage_may_take_pictures_in_their_proportions(store) -> None:
    stage = Slow()
    store.search("a dog", k=6, rerank=6, reranker=stage)
    assert len(stage.sizes) == 6
    assert all(max(size) == 40 and min(size) < 40 for size in stage.sizes)


@pytest.mark.parametrize("late_after", [0, 1, 3])
def test_a_picture_that_comes_late_ends_it(late_after) -> None:
    """Neither a picture nor a batch is begun after the time; what was scored before is left in its first order."""
    clock = iter([*[0.5] * late_after, *[9.0] * 20])
    hits = [Hit(1 - place / 10, str(place), 0, "image", "", None, None, None, {}) for place in range(4)]
    taken = []

    def pixels():
        for place in range(4):
            taken.append(place)
            yield np.zeros((4, 4, 3), np.uint8)

    stage, options = Slow(), SearchOptions(rerank=4, rerank_timeout_s=5.0)
    found = list(hits)
    late = rerank_hits(found, "x", stage, options, pixels(), 0.0, lambda: next(clock))
    assert found == hits
    assert late is not None
    assert late.startswith(f"the re-ranker had scored {2 * (late_after // 3)} of 4 first hits after 5 s")
    assert len(taken) == min(late_after, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rerank": 5}, "rerank and reranker go together"),
        ({"reranker": Backwards()}, "rerank and reranker go together"),
        ({"rerank": -1, "reranker": Backwards()}, "rerank is -1; give the number of first hits"),
        ({"rerank": 5, "reranker": Backwards(), "rerank_timeout_s": 0}, "rerank_timeout_s is 0.0; give seconds above"),
        ({"rerank": 5, "reranker": NotANumber()}, "NotANumber: found scores of shape"),
        ({"rerank": 5, "reranker": TooFew()}, r"TooFew: found scores of shape \(1,\) for 5 hits"),
    ],
)
def test_a_mistake_is_one_line(store, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        store.search("a dog", k=2, **given)


def test_what_scores_texts_needs_one(store) -> None:
    with pytest.raises(ConfigError, match="Brightness: it scores what fits a text; search with one"):
        store.search(store.encode_text(["a dog"])[0], k=2, rerank=2, reranker=Brightness())


def test_a_stage_of_another_kind_is_refused(store) -> None:
    other = type("Other", (Stage,), {"columns_in": ("image", "price"), "columns_out": {"score": "float32"}})
    with pytest.raises(
        ConfigError, match="a re-ranker gets caption, cosine, image, item_id, query, segment, and no 'p"
    ):
        store.search("a dog", rerank=5, reranker=other())
    silent = type("Silent", (Stage,), {"columns_in": ("image",)})
    with pytest.raises(ConfigError, match="it gives no score; declare columns_out"):
        store.search("a dog", rerank=5, reranker=silent())
