"""Seeded images and captions of many shapes, for tests that an index keeps what it promises on each of them.

An image is a meaning and a look; a caption is only the meaning, with some noise. Shapes differ in the directions that
either uses, and in how the images are spread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from corpus import unit

_BLOCK = 65_536
Draw = Callable[[np.random.Generator, int], np.ndarray]
"""Draws a map of vectors of a width; (E, E)."""


@dataclass(frozen=True)
class Shape:
    """Form of a table: `meaning` and `look` map (n, E) of unit variance to vectors, `spread` draws (n, E)."""

    meaning: Callable[[np.ndarray], np.ndarray]
    look: Callable[[np.ndarray], np.ndarray]
    spread: Callable[[np.random.Generator, int], np.ndarray]
    look_strength: float = 1.6
    caption_noise: float = 0.3
    gap: float = 1.0


def make_shape(name: str, num_images: int, num_captions: int, dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make images (N, E) and captions (Q, E) of some of them, of one of `SHAPES`; float32 of unit norm."""
    rng = np.random.default_rng(seed)
    shape = SHAPES[name](rng, dim)
    owners = np.sort(rng.integers(0, num_images, num_captions))
    images, said = np.empty((num_images, dim), np.float32), np.empty((num_captions, dim), np.float32)
    for start in range(0, num_images, _BLOCK):
        stop = min(start + _BLOCK, num_images)
        meanings, looks = shape.spread(rng, stop - start), shape.spread(rng, stop - start)
        images[start:stop] = unit(shape.meaning(meanings) + shape.look_strength * shape.look(looks))
        here = (owners >= start) & (owners < stop)
        said[here] = meanings[owners[here] - start]
    if name == "duplicates":  # thousands of copies of some, and the rest in copies of a few
        images = images[(num_images * rng.random(num_images) ** 6).astype(np.int64)]
    said += np.float32(shape.caption_noise) * rng.standard_normal(said.shape, dtype=np.float32)
    offset = unit(rng.standard_normal((1, dim)))
    captions = unit(unit(shape.meaning(said)) + np.float32(shape.gap) * offset)
    return images, captions[rng.permutation(num_captions)]


def _power(rng: np.random.Generator, dim: int, exponent: float = 0.5) -> np.ndarray:
    """Draw a map with strengths that fall as a power of their number, in its own basis."""
    strengths = np.arange(1, dim + 1) ** -exponent
    basis = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    return (strengths[:, None] / np.linalg.norm(strengths) * basis).astype(np.float32)


def _low_rank(rng: np.random.Generator, dim: int, most: int = 24) -> np.ndarray:
    chosen, rank = np.zeros((dim, dim), np.float32), min(most, dim)
    chosen[:rank] = rng.standard_normal((rank, dim)) / np.sqrt(rank * dim)
    return chosen


def _centred(rng: np.random.Generator, dim: int) -> Callable[..., np.ndarray]:
    centres = rng.standard_normal((3000, dim), dtype=np.float32)

    def spread(rng: np.random.Generator, num_drawn: int) -> np.ndarray:
        chosen = centres[rng.integers(0, len(centres), num_drawn)]
        return chosen + np.float32(0.5) * rng.standard_normal(chosen.shape, dtype=np.float32)

    return spread


def _uneven(rng: np.random.Generator, dim: int) -> Callable[..., np.ndarray]:
    """Return a draw of clusters: half of all are in the largest few, and widths differ a hundredfold."""
    centres = rng.standard_normal((400, dim), dtype=np.float32)
    shares = np.arange(1, 401) ** -1.2
    widths = (10 ** rng.uniform(-2, 0, 400)).astype(np.float32)

    def spread(rng: np.random.Generator, num_drawn: int) -> np.ndarray:
        chosen = rng.choice(400, num_drawn, p=shares / shares.sum())
        noise = rng.standard_normal((num_drawn, dim), dtype=np.float32)
        return centres[chosen] + widths[chosen, None] * noise

    return spread


def _normal(_: np.random.Generator, dim: int) -> Callable[..., np.ndarray]:
    return lambda rng, num_drawn: rng.standard_normal((num_drawn, dim), dtype=np.float32)


def _linear(matrix: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: values @ matrix


def _of(meaning: Draw, look: Draw, spread: Callable[..., Any] = _centred, **others: float) -> Callable[..., Shape]:
    return lambda rng, dim: Shape(_linear(meaning(rng, dim)), _linear(look(rng, dim)), spread(rng, dim), **others)


def _waved(exponent: float, **others: float) -> Callable[..., Shape]:
    """Return a maker whose look is a nonlinear map: the sine between two linear ones."""

    def make(rng: np.random.Generator, dim: int) -> Shape:
        first, second, meaning = (_power(rng, dim, exponent) for _ in range(3))
        wide = np.float32(3.0 * np.sqrt(dim))

        def look(values: np.ndarray) -> np.ndarray:
            return np.sin(values @ first * wide) @ second

        return Shape(_linear(meaning), look, _normal(rng, dim), **others)

    return make


def _isotropic(_: np.random.Generator, dim: int) -> np.ndarray:
    return np.eye(dim, dtype=np.float32) / np.float32(np.sqrt(dim))


def _ordered(rng: np.random.Generator, dim: int) -> np.ndarray:
    """Make a map whose first dimensions hold the most, as models that are trained to be cut have."""
    strengths = np.exp(-4 * np.arange(dim) / dim)
    return np.diag(strengths / np.linalg.norm(strengths)).astype(np.float32)


SHAPES: dict[str, Callable[[np.random.Generator, int], Shape]] = {
    "few directions": _of(_low_rank, lambda rng, dim: _low_rank(rng, dim, dim)),
    "all directions": _of(_power, _power),
    "nonlinear look": _waved(0.75, caption_noise=1.0, gap=0.2),
    "sharp look": _waved(1.0, look_strength=4.0),
    "steep power law": _of(lambda rng, dim: _power(rng, dim, 1.0), lambda rng, dim: _power(rng, dim, 1.0)),
    "uneven clusters": _of(_power, _power, _uneven, look_strength=0.8),
    "duplicates": _of(_power, _power),
    "constant offset": _of(_power, _power, gap=5.0),
    "matryoshka": _of(_ordered, _ordered),
    "nearly isotropic": _of(_isotropic, _isotropic, _normal, look_strength=0.5, gap=0.2),
}
"""Makers of a shape by name: from a generator of random numbers, and the width E."""
