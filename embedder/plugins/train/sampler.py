"""Order of the items and choice of their captions: by (seed, epoch, item), never by arrival. Pure."""

from functools import lru_cache
from typing import Any

import numpy as np

Keys = np.ndarray[Any, np.dtype[np.int64]]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]

_UINT64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# One number for each thing that is drawn, so that the draws are independent.
SHUFFLE, CAPTIONS, SPLIT = 1, 2, 3


def scramble(keys: Keys, seed: int, epoch: int, purpose: int) -> Hashes:
    """One evenly spread number for each item's key; `purpose` is SHUFFLE, CAPTIONS or SPLIT.

    Source: the finaliser of SplitMix64 (Steele et al. 2014), run over the key and over (seed, epoch, purpose).
    """
    values = keys.view(np.uint64) ^ np.uint64(_state(seed, epoch, purpose))
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FACTORS[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=8)
def _state(seed: int, epoch: int, purpose: int) -> int:
    return _mix(((seed * 3 + purpose) * _GOLDEN + epoch * 0xD1342543DE82EF95) & _UINT64)


def _mix(value: int) -> int:
    """Do what `scramble` does for one number; for a handful this is twenty times faster."""
    value = ((value ^ (value >> 30)) * _FACTORS[0]) & _UINT64
    value = ((value ^ (value >> 27)) * _FACTORS[1]) & _UINT64
    return value ^ (value >> 31)


def epoch_order(keys: Keys, seed: int, epoch: int) -> Keys:
    """Positions of the items in the order of one epoch; the same items give the same order, however they were listed.

    `keys` are `embedder.plugins.train.trainer.batch.item_key` of each item.
    """
    return np.lexsort((keys, scramble(keys, seed, epoch, SHUFFLE)))


def num_batches(num_items: int, batch_size: int) -> int:
    """Number of whole batches of one epoch; each epoch has its own order, so no item is always left out."""
    return max(1, num_items // batch_size)


def is_held_out(concept_keys: Keys, fraction: float, seed: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Mask of the items for validation: all items of a concept or none; `fraction` is the share of the concepts."""
    return scramble(concept_keys, seed, 0, SPLIT) < np.uint64(min(int(fraction * 2**64), _UINT64))


def drawn_captions(key: int, num_captions: int, num_drawn: int, seed: int, epoch: int) -> list[int]:
    """Draw some of an item's captions, none twice."""
    if num_captions <= num_drawn:
        return list(range(num_captions))
    state = _state(seed, epoch, CAPTIONS) ^ (key & _UINT64)
    return sorted(sorted(range(num_captions), key=lambda number: _mix(state ^ number))[:num_drawn])
