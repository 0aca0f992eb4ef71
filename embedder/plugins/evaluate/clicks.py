"""Grades of answers from a log of what was shown and clicked, corrected for the position that it was shown at.

People look at the first places more than at later ones, so clicks on an answer depend on its place as well as on its
worth. In the position-based model, a click's probability is an examination, which depends only on the position, times
an attraction, which depends on query and item. Both are estimated from the log by expectation maximisation. That needs
pairs of a query and an item that were shown at several positions, which link these positions with each other; unlinked
positions can't be compared. Then each click counts 1 / examination (inverse propensity scoring), so that an item's rate
is the one that it would have at the first place.

Sources: N. Craswell et al., An experimental comparison of click position-bias models, WSDM (2008), the model; A.
Chuklin, I. Markov, M. de Rijke, Click Models for Web Search (2015), section 4.2, its estimation; T. Joachims, A.
Swaminathan, T. Schnabel, Unbiased learning-to-rank with biased feedback, WSDM (2017), inverse propensity scoring.

Legend: `C` cells (a pair of query and item at one position), `P` pairs, `K` positions.
"""

import logging
from typing import Any

import numpy as np

from embedder.errors import ConfigError
from embedder.plugins.evaluate.exact import Ints
from embedder.quantities import plural

LOG = logging.getLogger(__name__)
Values = np.ndarray[Any, np.dtype[np.float64]]

NUM_ITERATIONS = 200
MIN_PROPENSITY = 0.05  # else one click at a place that is hardly looked at would weigh as much as hundreds
MIN_CLICKS = 2  # one may be a slip
MIN_RATE = 0.1  # corrected clicks per showing, from which an item is right
MAX_GRADE = 3.0  # of an item that is clicked whenever it is seen
_SMALL = 1e-9


def grades_of_clicks(rows: list[dict[str, Any]], group: str | None = None) -> list[dict[str, Any]]:
    """Grade each pair of a query and an item that was shown for it, in the order of its first row.

    Rows have `query`, `item_id`, `position` from 1, `clicked`, and the column `group`, if any; the pair's first row
    counts. Each pair gets a row with its `relevance`: 0 if it isn't right, else above 0 up to 3. Rows of positions that
    are not linked with the most shown ones are left out. Raises `ConfigError` if no positions are linked, though there
    are several.
    """
    rows = _linked_rows(rows)
    keys: dict[tuple[str, str], int] = {}
    first: list[dict[str, Any]] = []
    numbers = np.empty(len(rows), np.int64)
    for place, row in enumerate(rows):
        numbers[place] = keys.setdefault((row["query"], row["item_id"]), len(keys))
        if len(first) < len(keys):
            first.append(row)
    positions = np.array([row["position"] for row in rows], np.int64) - 1
    is_clicked = np.array([row["clicked"] for row in rows], np.float64)
    rates, clicks = corrected_rates(numbers, positions, is_clicked)
    is_right = (clicks >= MIN_CLICKS) & (rates >= MIN_RATE)
    kept = ["query", "item_id", *([group] if group is not None else [])]
    return [
        {name: row[name] for name in kept} | {"relevance": float(grade)}
        for row, grade in zip(first, np.where(is_right, MAX_GRADE * rates, 0.0), strict=True)
    ]


def _linked_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the positions whose examination can be compared; ConfigError as in `grades_of_clicks`."""
    _, pairs = np.unique([f"{row['query']}\0{row['item_id']}" for row in rows], return_inverse=True)
    positions = np.array([row["position"] for row in rows], np.int64) - 1
    group = linked_positions(pairs.astype(np.int64), positions)
    is_kept = group[positions] == np.bincount(group[positions]).argmax()
    if len(np.unique(positions)) > 1 and len(np.unique(positions[is_kept])) == 1:
        raise ConfigError(
            "the log shows each item of a query at only one position, so clicks for its place can't be distinguished "
            "from clicks for its worth; log some answers in a shuffled order, or give a column relevance"
        )
    if not is_kept.all():
        LOG.warning(
            f"{plural(int((~is_kept).sum()), 'row')} of {len(rows):,} left out of the log: what was shown at their "
            "positions was never shown at the others, so their clicks can't be corrected"
        )
    return [row for row, is_one in zip(rows, is_kept.tolist(), strict=True) if is_one]


def linked_positions(pairs: Ints, positions: Ints) -> Ints:
    """Group of each position, int64 (K,), named by its lowest position; pairs shown at several positions link these.

    `pairs` and `positions`, from 0, are int64 (showings,).
    """
    group = np.arange(int(positions.max()) + 1)
    while True:
        of_pair = np.full(int(pairs.max()) + 1, len(group))
        np.minimum.at(of_pair, pairs, group[positions])
        lower = group.copy()
        np.minimum.at(lower, positions, of_pair[pairs])
        if np.array_equal(lower, group):
            return group
        group = lower


def corrected_rates(pairs: Ints, positions: Ints, is_clicked: Values) -> tuple[Values, Values]:
    """Click rate of each pair as at the first position, float64 (P,) in [0, 1], and its clicks, float64 (P,).

    `pairs` (numbers of query and item) and `positions`, from 0, are int64 (showings,); `is_clicked` is float64, 0 or 1.
    """
    examined = propensities(pairs, positions, is_clicked)
    weights = is_clicked / np.maximum(examined[positions], MIN_PROPENSITY)
    rates: Values = np.minimum(1.0, np.bincount(pairs, weights) / np.bincount(pairs))
    clicks: Values = np.bincount(pairs, is_clicked).astype(np.float64)
    return rates, clicks


def propensities(pairs: Ints, positions: Ints, is_clicked: Values) -> Values:
    """Examination of each position relative to the most examined one, float64 (K,); 1 at a position never shown.

    Arguments are as in `corrected_rates`.
    """
    num_positions = int(positions.max()) + 1
    cells, cell = np.unique(pairs * num_positions + positions, return_inverse=True)
    shown, clicks = np.bincount(cell).astype(np.float64), np.bincount(cell, is_clicked)
    pair, position = cells // num_positions, cells % num_positions
    of_pair, of_position = np.bincount(pair, shown), np.bincount(position, shown, num_positions)
    attraction, examined = np.full(len(of_pair), 0.5), np.full(num_positions, 0.5)
    for _ in range(NUM_ITERATIONS):
        seen, liked = examined[position], attraction[pair]
        unclicked = (shown - clicks) / np.maximum(1 - seen * liked, _SMALL)
        attraction = np.bincount(pair, clicks + unclicked * liked * (1 - seen)) / np.maximum(of_pair, _SMALL)
        examined = np.bincount(position, clicks + unclicked * seen * (1 - liked), num_positions) / np.maximum(
            of_position, _SMALL
        )
    scale = max(float(examined.max()), _SMALL)
    return np.where(of_position > 0, examined / scale, 1.0)
