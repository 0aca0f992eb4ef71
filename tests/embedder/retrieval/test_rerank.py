"""A second model scores the first hits, and orders them."""

from typing import Any, ClassVar

import numpy as np
import pytest
import samples

import embedder
from embedder import Stage, embed, load_config
from embedder.errors import ConfigError


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
    content = path.read_bytes()
    path.unlink()
    try:
        hits = store.search("a dog", k=6, rerank=6, reranker=Brightness())
    finally:
        path.write_bytes(content)
    assert (hits[-1].item_id, hits[-1].rerank_score) == (gone.item_id, None)
    assert all(hit.rerank_score is not None for hit in hits[:-1])
    captions = [hit.caption for hit in store.search("a dog", k=6, rerank=6, reranker=Captions())]
    with_caption = [caption for caption in captions if caption is not None]
    assert captions[: len(with_caption)] == with_caption


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rerank": 5}, "rerank and reranker go together"),
        ({"reranker": Backwards()}, "rerank and reranker go together"),
        ({"rerank": -1, "reranker": Backwards()}, "rerank is -1; give the number of first hits"),
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
