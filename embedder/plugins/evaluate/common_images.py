"""Images that two sides have in common, and exact search for the best items among them.

Legend: `Q` queries, `N` rows, `I` items, `E` embedding size, `R` right answers.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from embedder.plugins.evaluate.exact import MAX_SCORES, TIE, Ints
from embedder.plugins.evaluate.published_images import ImageTable
from index.vectors import Floats

Values = np.ndarray[Any, np.dtype[np.float64]]


class CommonImages:
    """Rows of one side whose items both sides have; items have the same numbers on both.

    `items` is the item of each row, int64 (N,).
    """

    def __init__(self, images: ImageTable, item_ids: pa.Array) -> None:
        """Choose the rows of the items in `item_ids`; an item's number is its position there."""
        self._images = images
        place = {item_id: number for number, item_id in enumerate(item_ids.to_pylist())}
        numbers = np.array([place.get(item_id, -1) for item_id in images.item_ids.to_pylist()], np.int64)
        found = numbers[images.items] if len(images) else np.empty(0, np.int64)
        self._is_common = found >= 0
        self.items: Ints = found[self._is_common]

    def blocks(self) -> Iterator[Floats]:
        """Vectors of the common rows, in order; float32 (n, E) for each file."""
        start = 0
        for block in self._images.blocks():
            is_common = self._is_common[start : start + len(block)]
            start += len(block)
            if is_common.any():
                yield block[is_common]


def common_ids(one: ImageTable, other: ImageTable) -> pa.Array:
    """Ids of the items of both, sorted."""
    shared = set(one.item_ids.to_pylist()) & set(other.item_ids.to_pylist())
    return pa.array(sorted(shared), pa.string())


def best_items(
    queries: Floats, images: CommonImages, right: tuple[Ints, Ints], num_items: int, k: int
) -> tuple[Ints, Floats]:
    """Find the best items of each query, each once, by its best row.

    If items score alike, right ones come last, then lower numbers first, on both sides. `queries` are unit rows,
    float32 (Q, E); `right` are queries and items of the right answers, int64 (R,) each. Returns items, int64 (Q, min(k,
    I)), best first, and their scores, float32.
    """
    num_queries, start = len(queries), 0
    items, scores = np.empty((num_queries, 0), np.int64), np.empty((num_queries, 0), np.float32)
    is_right = np.sort(right[0] * num_items + right[1])
    max_rows = max(1, MAX_SCORES // max(1, num_queries))
    for block in images.blocks():
        for first in range(0, len(block), max_rows):
            part = block[first : first + max_rows]
            own = images.items[start : start + len(part)]
            start += len(part)
            found, scored = _by_item(queries @ part.T, own)
            keys = np.arange(num_queries)[:, None] * num_items + found[None]
            scored = scored - TIE * _is_in(keys, is_right)
            items, scores = _merge(items, scores, np.broadcast_to(found, scored.shape), scored, k)
    return items, scores


def gains_of(items: Ints, right: tuple[Ints, Ints], gains: Values, num_items: int) -> Values:
    """Gain of each found item, int64 (Q, k); 0 for one that is not right.

    `right` are queries and items of the right answers, int64 (R,) each, each pair once; `gains` are theirs.
    """
    keys = right[0] * num_items + right[1]
    order = np.argsort(keys)
    wanted = np.arange(len(items))[:, None] * num_items + items
    place = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    return np.where(keys[order][place] == wanted, gains[order][place], 0.0)


def ndcg(items: Ints, right: tuple[Ints, Ints], gains: Values, num_items: int, k: int = 10) -> Values:
    """Compute nDCG@k of each query, float64 (Q,), from found items, best first; a gain is 2 to the relevance, less 1.

    Arguments are as in `gains_of`; `gains` are relevances above 0.

    Source: K. Jarvelin, J. Kekalainen, Cumulated gain-based evaluation of IR techniques, ACM TOIS 20 (2002); the gain
    2^r - 1 of C. Burges et al., Learning to rank using gradient descent, ICML (2005).
    """
    power = np.exp2(np.asarray(gains, np.float64)) - 1
    found = gains_of(items[:, :k], right, power, num_items)
    discounts = 1 / np.log2(np.arange(max(k, 1)) + 2)
    reached = found @ discounts[: found.shape[1]]
    order = np.lexsort((-power, right[0]))
    queries = right[0][order]
    place = np.arange(len(queries)) - np.searchsorted(queries, queries, "left")
    is_deep = place < k
    best = np.bincount(queries[is_deep], power[order][is_deep] * discounts[place[is_deep]], minlength=len(items))
    found_share: Values = np.divide(reached, best, out=np.zeros(len(items)), where=best > 0)
    return found_share


def _is_in(keys: Ints, wanted: Ints) -> Floats:
    if not len(wanted):
        return np.zeros(keys.shape, np.float32)
    place = np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1)
    is_wanted: Floats = (wanted[place] == keys).astype(np.float32)
    return is_wanted


def _by_item(scores: Floats, items: Ints) -> tuple[Ints, Floats]:
    """Items of a block, each once, and the best score of their rows; (Q, items)."""
    order = np.argsort(items, kind="stable")
    found, firsts = np.unique(items[order], return_index=True)
    if len(found) == len(items):
        return found, scores[:, order]
    return found, np.maximum.reduceat(scores[:, order], firsts, axis=1)


def _merge(items: Ints, scores: Floats, new_items: Ints, new_scores: Floats, k: int) -> tuple[Ints, Floats]:
    if new_scores.shape[1] > k:
        chosen = _first_best(new_scores, k)
        new_items = np.take_along_axis(new_items, chosen, 1)
        new_scores = np.take_along_axis(new_scores, chosen, 1)
    items, scores = np.hstack([items, new_items]), np.hstack([scores, new_scores])
    order = np.lexsort((items, -scores), axis=1)
    items, scores = np.take_along_axis(items, order, 1), np.take_along_axis(scores, order, 1)
    by_item = np.argsort(items, axis=1, kind="stable")  # of equal items, the better score first
    sorted_items = np.take_along_axis(items, by_item, 1)
    is_again = np.zeros(items.shape, np.bool_)
    np.put_along_axis(is_again, by_item, np.diff(sorted_items, axis=1, prepend=-1) == 0, 1)
    scores = np.where(is_again, -np.inf, scores)
    width = min(k, int((~is_again).sum(axis=1).min(initial=k)))
    kept = np.argsort(is_again, axis=1, kind="stable")[:, :width]
    return np.take_along_axis(items, kept, 1), np.take_along_axis(scores, kept, 1)


def _first_best(scores: Floats, k: int) -> Ints:
    """Columns of the k best scores of each row, ascending; the first of those that tie."""
    last = -np.partition(-scores, k - 1, axis=1)[:, k - 1 : k]
    is_above, is_tied = scores > last, scores == last
    is_taken = is_above | (is_tied & (is_tied.cumsum(axis=1) <= k - is_above.sum(axis=1, keepdims=True)))
    return np.nonzero(is_taken)[1].reshape(len(scores), k)
