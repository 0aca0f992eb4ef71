"""Vectors on which an index tuned with pictures fails people silently.

A picture holds its meaning and its appearance, a caption the meaning alone, beyond a gap between the modalities: so
captions' nearest pictures lie far from where pictures lie near each other.
"""

from dataclasses import dataclass

import numpy as np

WIDTH = 256
NUM_CENTRES = 3000
NUM_MEANINGS, NUM_LOOKS = 24, 72
MEANING_NOISE, LOOK_NOISE, CAPTION_NOISE = 0.5, 0.4, 0.3
LOOK_STRENGTH = 1.6
CHUNK = 65_536


@dataclass(frozen=True)
class Vectors:
    """Pictures (N, 256) and captions (Q, 256), float32 of unit norm."""

    pictures: np.ndarray
    captions: np.ndarray


def make_vectors(num_pictures: int, num_captions: int, seed: int = 0) -> Vectors:
    """Make pictures, and captions of some of them."""
    rng = np.random.default_rng(seed)
    meaning_centres = rng.standard_normal((NUM_CENTRES, NUM_MEANINGS), dtype=np.float32)
    look_centres = rng.standard_normal((NUM_CENTRES, NUM_LOOKS), dtype=np.float32)
    meaning_map = rng.standard_normal((NUM_MEANINGS, WIDTH), dtype=np.float32) / np.sqrt(np.float32(NUM_MEANINGS))
    look_map = rng.standard_normal((NUM_LOOKS, WIDTH), dtype=np.float32) / np.sqrt(np.float32(NUM_LOOKS))
    gap = _unit(rng.standard_normal(WIDTH, dtype=np.float32))
    pictures = np.empty((num_pictures, WIDTH), np.float32)
    meanings = np.empty((num_pictures, NUM_MEANINGS), np.float32)
    for start in range(0, num_pictures, CHUNK):
        chunk = slice(start, min(start + CHUNK, num_pictures))
        meanings[chunk] = _around(rng, meaning_centres, meanings[chunk].shape, MEANING_NOISE)
        looks = _around(rng, look_centres, (len(meanings[chunk]), NUM_LOOKS), LOOK_NOISE)
        pictures[chunk] = _unit(meanings[chunk] @ meaning_map + LOOK_STRENGTH * looks @ look_map)
    said = meanings[rng.integers(0, num_pictures, num_captions)]
    said += CAPTION_NOISE * rng.standard_normal(said.shape, dtype=np.float32)
    return Vectors(pictures, _unit(_unit(said @ meaning_map) + gap))


def _around(rng: np.random.Generator, centres: np.ndarray, shape: tuple[int, int], noise: float) -> np.ndarray:
    chosen = centres[rng.integers(0, len(centres), shape[0])]
    return chosen + np.float32(noise) * rng.standard_normal(shape, dtype=np.float32)


def _unit(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values, axis=-1, keepdims=True)
