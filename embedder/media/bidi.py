"""Display order of a line of mixed directions, without explicit marks, which `embedder.storage.printable` shows. Pure.

Source: Unicode Standard Annex 9, rules P2, W1 to W7, N1, N2, I1, I2 and L2.
"""

from collections.abc import Sequence
from itertools import pairwise
from unicodedata import bidirectional

Direction = str  # "L", "R", or "N": a number in right-to-left text

_STRONG = {"L": "L", "R": "R", "AL": "R"}
_LEVELS = {"L": {"L": 0, "R": 1, "N": 2}, "R": {"R": 1, "L": 2, "N": 2}}


def base_direction(text: str) -> Direction:
    """Return the direction of the first letter, "L" or "R"."""
    return next((_STRONG[kind] for kind in map(bidirectional, text) if kind in _STRONG), "L")


def levels(clusters: Sequence[str], base: Direction) -> list[int]:
    """Return the nesting depth of each piece of a line; pieces of odd depth run from right to left."""
    kinds = [bidirectional(cluster[0]) for cluster in clusters]
    directions = _without_neutrals(_with_numbers(kinds, base), base)
    return [_LEVELS[base][direction] for direction in directions]


def visual_order(depths: Sequence[int]) -> list[int]:
    """Return the places of the pieces from left to right."""
    order = list(range(len(depths)))
    for depth in range(max(depths, default=0), 0, -1):
        deeper = [depths[place] >= depth for place in order] + [False]
        edges = [number for number, (one, other) in enumerate(pairwise([False, *deeper])) if one != other]
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            order[start:stop] = order[start:stop][::-1]
    return order


def _with_numbers(kinds: Sequence[str], base: Direction) -> list[Direction | None]:
    """Return the directions of letters and numbers; None for those that take their neighbours'."""
    found: list[Direction | None] = []
    last = base
    for place, kind in enumerate(kinds):
        last = _STRONG.get(kind, last)
        is_number = kind in ("EN", "AN") or _belongs_to_number(kinds, place)
        found.append(_STRONG.get(kind) or (("L" if last == "L" and kind != "AN" else "N") if is_number else None))
    return found


def _belongs_to_number(kinds: Sequence[str], place: int) -> bool:
    """Return whether a mark is between two digits, or a sign is next to one: 1,5 and 10 %."""
    around = {kinds[near] for near in (place - 1, place + 1) if 0 <= near < len(kinds)}
    if kinds[place] in ("CS", "ES"):
        return around == {"EN"} and 0 < place < len(kinds) - 1
    return kinds[place] == "ET" and "EN" in around


def _without_neutrals(directions: Sequence[Direction | None], base: Direction) -> list[Direction]:
    """Give spaces and marks the direction of both sides if these agree, else the paragraph's."""
    after: list[Direction] = []
    following = base
    for direction in reversed(directions):
        following = _side(direction) or following
        after.append(following)
    found: list[Direction] = []
    before = base
    for direction, following in zip(directions, reversed(after), strict=True):
        before = _side(direction) or before
        found.append(direction or (before if before == following else base))
    return found


def _side(direction: Direction | None) -> Direction | None:
    return "R" if direction == "N" else direction
