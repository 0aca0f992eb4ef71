"""Vectors on which an index tuned with images fails people silently.

An image holds its meaning and its appearance, a caption the meaning alone, beyond a gap between the modalities: so
captions' nearest images lie far from where images lie near each other.
"""

import numpy as np

from corpus import unit

WIDTH = 256
NUM_CENTRES = 3000
NUM_MEANINGS, NUM_LOOKS = 24, 72
MEANING_NOISE, LOOK_NOISE, CAPTION_NOISE = 0.5, 0.4, 0.3
LOOK_STRENGTH = 1.6
CHUNK = 65_536


def make_vectors(
    num_images: int, num_captions: int, seed: int = 0, width: int = WIDTH
) -> tuple[np.ndarray, np.ndarray]:
    """Make images (N, E), and captions (Q, E) of some of them; float32 of unit norm."""
    rng = np.random.default_rng(seed)
    meaning_centres = rng.standard_normal((NUM_CENTRES, NUM_MEANINGS), dtype=np.float32)
    look_centres = rng.standard_normal((NUM_CENTRES, NUM_LOOKS), dtype=np.float32)
    meaning_map = rng.standard_normal((NUM_MEANINGS, width), dtype=np.float32) / np.sqrt(np.float32(NUM_MEANINGS))
    look_map = rng.standard_normal((NUM_LOOKS, width), dtype=np.float32) / np.sqrt(np.float32(NUM_LOOKS))
    gap = unit(rng.standard_normal(width, dtype=np.float32))
    images = np.empty((num_images, width), np.float32)
    meanings = np.empty((num_images, NUM_MEANINGS), np.float32)
    for start in range(0, num_images, CHUNK):
        chunk = slice(start, min(start + CHUNK, num_images))
        meanings[chunk] = _around(rng, meaning_centres, meanings[chunk].shape, MEANING_NOISE)
        looks = _around(rng, look_centres, (len(meanings[chunk]), NUM_LOOKS), LOOK_NOISE)
        images[chunk] = unit(meanings[chunk] @ meaning_map + LOOK_STRENGTH * looks @ look_map)
    said = meanings[rng.integers(0, num_images, num_captions)]
    said += CAPTION_NOISE * rng.standard_normal(said.shape, dtype=np.float32)
    return images, unit(unit(said @ meaning_map) + gap)


def _around(rng: np.random.Generator, centres: np.ndarray, shape: tuple[int, int], noise: float) -> np.ndarray:
    chosen = centres[rng.integers(0, len(centres), shape[0])]
    return chosen + np.float32(noise) * rng.standard_normal(shape, dtype=np.float32)
