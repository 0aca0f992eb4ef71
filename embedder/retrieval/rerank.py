"""Re-ranking of the first hits by a second model: a `Stage` that scores pairs of a query and a hit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from embedder.errors import ConfigError
from embedder.retrieval.hit import IMAGE_PX, THUMBNAIL, Hit, Pixels

if TYPE_CHECKING:
    from embedder.steps.stage_contract import Stage

SCORE = "score"
SQUARE = replace(THUMBNAIL, image_size=IMAGE_PX)
"""How a re-ranker gets an image: whole, on a white square."""
_IMAGE = pa.struct({"pixels": pa.binary(), "height": pa.int32(), "width": pa.int32()})
_COLUMNS: Mapping[str, tuple[pa.DataType, Callable[["str | None", Hit], Any]]] = {
    "query": (pa.string(), lambda query, hit: query),
    "caption": (pa.string(), lambda query, hit: hit.caption),
    "item_id": (pa.string(), lambda query, hit: hit.item_id),
    "segment": (pa.int32(), lambda query, hit: hit.segment),
    "cosine": (pa.float32(), lambda query, hit: hit.score),
}


def check_reranker(stage: "Stage | None", num_reranked: int) -> None:
    """Raise a ConfigError unless a stage and a number of hits are given together, and it scores what there is."""
    if (stage is None) != (num_reranked == 0):
        raise ConfigError("rerank and reranker go together: search(query, k=10, rerank=50, reranker=your_stage)")
    if num_reranked < 0:
        raise ConfigError(f"rerank is {num_reranked}; give the number of first hits to score again, as 50")
    if stage is None:
        return
    known = {*_COLUMNS, "image"}
    if unknown := sorted({*stage.columns_in, *stage.columns_optional} - known):
        raise ConfigError(f"{type(stage).__name__}: a re-ranker gets {', '.join(sorted(known))}, and no {unknown[0]!r}")
    if SCORE not in stage.columns_out:
        raise ConfigError(f'{type(stage).__name__}: it gives no score; declare columns_out = {{"score": "float32"}}')


def needs_images(stage: "Stage") -> bool:
    """Return whether a stage scores images."""
    return "image" in (*stage.columns_in, *stage.columns_optional)


def rerank_hits(
    hits: list[Hit], query: str | None, stage: "Stage", num_reranked: int, pixels: Sequence[Pixels | None] | None
) -> list[Hit]:
    """Return hits of a query, the first ones ordered by the stage's scores, best first.

    `pixels` are the images of the first ones, uint8 (H, W, 3), where the stage scores images; None: that one is gone.
    Hits that the stage can't score, as their image is gone or they have no caption, follow in their order, then those
    beyond `num_reranked`. A stage that fails, or that returns another number of scores, raises; so does a score that is
    not finite (ConfigError).
    """
    first = hits[:num_reranked]
    rows = _rows_of(query, first, pixels, [*stage.columns_in, *stage.columns_optional])
    is_whole = np.ones(len(first), bool)
    for name in stage.columns_in:
        is_whole &= rows[name].is_valid().to_numpy(zero_copy_only=False)
    places = np.flatnonzero(is_whole)
    scored = list[Hit]()
    if len(places):
        (batch,) = rows.take(pa.array(places)).combine_chunks().to_batches()
        scores = _scores_of(stage, batch)
        order = np.argsort(-scores, kind="stable")
        scored = [_with_score(first[places[each]], float(scores[each])) for each in order]
    left = [first[each] for each in np.flatnonzero(~is_whole)]
    return [*scored, *left, *hits[num_reranked:]]


def _with_score(hit: Hit, score: float) -> Hit:
    """Copy a hit, with what it knows beside its fields: the snapshot's files, or the service that it comes from."""
    scored = replace(hit, rerank_score=score)
    vars(scored).update({name: value for name, value in vars(hit).items() if name not in vars(scored)})
    return scored


def _rows_of(query: str | None, hits: list[Hit], pixels: Sequence[Pixels | None] | None, names: list[str]) -> pa.Table:
    columns = {
        name: pa.array([value(query, hit) for hit in hits], kind)
        for name, (kind, value) in _COLUMNS.items()
        if name in names
    }
    if pixels is not None:
        values = [
            None if each is None else {"pixels": each.tobytes(), "height": each.shape[0], "width": each.shape[1]}
            for each in pixels
        ]
        columns["image"] = pa.array(values, _IMAGE)
    return pa.table({name: columns[name] for name in names})


def _scores_of(stage: "Stage", rows: pa.RecordBatch) -> np.ndarray[Any, np.dtype[np.float64]]:
    found = stage.process(rows)
    scores = np.asarray(found[SCORE], np.float64)
    if scores.shape != (rows.num_rows,) or not np.isfinite(scores).all():
        raise ConfigError(
            f"{type(stage).__name__}: found scores of shape {scores.shape} for {rows.num_rows} hits; return one finite "
            "number for each row"
        )
    return scores
