"""Re-ranking of the first hits by a second model: a `Stage` that scores pairs of a query and a hit."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from embedder.errors import ConfigError
from embedder.media.decoder_process import Pixels
from embedder.media.resize import ResizeSpec
from embedder.retrieval.hit import IMAGE_PX, THUMBNAIL, Hit
from embedder.retrieval.queries import SearchOptions

if TYPE_CHECKING:
    from embedder.steps.stage_contract import Stage

SCORE = "score"
BATCH_ROWS = 8  # of a stage that declares no `batch_size`: what may be scored beyond the time
LATE, REFUSED = "the re-ranker had scored", "the hits come in their first order"  # how `Hits.warnings` begin
RERANK_RULE = "rerank and reranker go together: search(query, k=10, rerank=50, reranker=your_stage)"
_IMAGE = pa.struct({"pixels": pa.binary(), "height": pa.int32(), "width": pa.int32()})
_COLUMNS: Mapping[str, tuple[pa.DataType, Callable[["str | None", Hit], Any]]] = {
    "query": (pa.string(), lambda query, hit: query),
    "caption": (pa.string(), lambda query, hit: hit.caption),
    "item_id": (pa.string(), lambda query, hit: hit.item_id),
    "segment": (pa.int32(), lambda query, hit: hit.segment),
    "cosine": (pa.float32(), lambda query, hit: hit.score),
}


def check_reranker(stage: "Stage | None", num_reranked: int | None) -> None:
    """Raise a ConfigError unless a stage comes with a number of hits, and scores what there is."""
    if stage is None or not num_reranked:
        raise ConfigError(RERANK_RULE)
    known = {*_COLUMNS, "image"}
    if unknown := sorted({*stage.columns_in, *stage.columns_optional} - known):
        raise ConfigError(f"{type(stage).__name__}: a re-ranker gets {', '.join(sorted(known))}, and no {unknown[0]!r}")
    if SCORE not in stage.columns_out:
        raise ConfigError(f'{type(stage).__name__}: it gives no score; declare columns_out = {{"score": "float32"}}')


def image_size_of(stage: "Stage") -> ResizeSpec | None:
    """Return how a stage gets images: whole, on a white square, or in their proportions; None if it scores none."""
    if "image" not in (*stage.columns_in, *stage.columns_optional):
        return None
    longest = stage.resources.get("max_side_px")
    if longest is None:
        return replace(THUMBNAIL, image_size=IMAGE_PX)
    return replace(THUMBNAIL, image_size=int(longest), mode="fit")


def rerank_hits(
    hits: list[Hit],
    query: str | None,
    stage: "Stage",
    options: SearchOptions,
    pixels: Iterator[Pixels | None] | None,
    began_s: float,
    now: Callable[[], float] = time.monotonic,
) -> str | None:
    """Order the first hits of a query by the stage's scores, best first, as far as `options` give hits and time to it.

    `pixels` yields the images of the first ones, uint8 (H, W, 3), where the stage scores images; None: that one is
    gone. Hits that the stage can't score, as their image is gone or they have no caption, or scores null, follow in
    their order, then those beyond. The time is counted from `began_s` of the clock `now`. A stage that fails raises,
    and so does (ConfigError) another number of scores, or one that is not finite.

    Returns:
        Why the hits are in their first order, where the time was too short (`LATE`), or the stage refuses the query by
        a ConfigError (`REFUSED`); else None.
    """
    first, ends_s = hits[: options.rerank], began_s + options.rerank_timeout_s
    scores: list[float | None] = []
    batch_rows = max(1, int(stage.resources.get("batch_size", BATCH_ROWS)))
    for start in range(0, len(first), batch_rows):
        some = first[start : start + batch_rows]
        images = None if pixels is None else [next(pixels) for _ in some if now() < ends_s]
        if now() >= ends_s:
            return (
                f"{LATE} {len(scores):,} of {len(first):,} first hits after {options.rerank_timeout_s:g} s, so they "
                "come in their first order; give it more time with rerank_timeout_s, or fewer hits with rerank"
            )
        found = _score_batch(stage, _rows_of(query, some, images, [*stage.columns_in, *stage.columns_optional]))
        if isinstance(found, ConfigError):
            return f"{REFUSED}: {found}"
        scores += found
    scored = [(score, hit) for score, hit in zip(scores, first, strict=True) if score is not None]
    best_first = sorted(scored, key=lambda each: -each[0])
    left = [hit for score, hit in zip(scores, first, strict=True) if score is None]
    hits[: len(first)] = [*(_with_score(hit, score) for score, hit in best_first), *left]
    return None


def _score_batch(stage: "Stage", rows: pa.Table) -> list[float | None] | ConfigError:
    """Score the rows that have all that the stage needs; None for others. Return the error by which it refuses them."""
    is_whole = np.ones(rows.num_rows, bool)
    for name in stage.columns_in:
        is_whole &= rows[name].is_valid().to_numpy(zero_copy_only=False)
    places = np.flatnonzero(is_whole)
    scores: list[float | None] = [None] * rows.num_rows
    if len(places):
        (batch,) = rows.take(pa.array(places)).combine_chunks().to_batches()
        try:
            found = stage.process(batch)[SCORE]
        except ConfigError as error:
            return error
        for place, score in zip(places, _read_scores(stage, found, len(places)), strict=True):
            scores[place] = score
    return scores


def _with_score(hit: Hit, score: float) -> Hit:
    """Copy a hit, with what it knows besides its fields: the snapshot's files, or the service that it comes from."""
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


def _read_scores(stage: "Stage", found: Any, num_rows: int) -> list[float | None]:
    values = found.to_pylist() if isinstance(found, pa.Array | pa.ChunkedArray) else found
    if np.shape(values) == (num_rows,):
        scores = [None if each is None else float(each) for each in values]
        if all(each is None or math.isfinite(each) for each in scores):
            return scores
    raise ConfigError(
        f"{type(stage).__name__}: found scores of shape {np.shape(values)} for {num_rows} hits; return one finite "
        "number for each row, or null where there is nothing to score"
    )
