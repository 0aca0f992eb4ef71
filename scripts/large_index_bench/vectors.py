"""Two kinds of images and captions, made block by block: what is in memory does not grow with their number.

low-rank    meaning in 24 directions, looks in 72; a caption is the meaning alone, beyond a gap between the modalities
power-law   both in every direction, with spectra that fall as the root of the number, each in a basis of its own
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np

KINDS = ("low-rank", "power-law")
BLOCK = 65_536
NUM_CENTRES = 3000
NUM_MEANINGS, NUM_LOOKS = 24, 72
MEANING_NOISE, LOOK_NOISE, CAPTION_NOISE = 0.5, 0.4, 0.3
LOOK_STRENGTH = 1.6
NUM_NEIGHBOURS = 10


@dataclass(frozen=True)
class Maps:
    """Maps of meanings and looks to vectors, (n, E), and the centres that either lies around."""

    meaning: np.ndarray
    look: np.ndarray
    meaning_centres: np.ndarray
    look_centres: np.ndarray
    gap: np.ndarray


def make_maps(kind: str, width: int, rng: np.random.Generator) -> Maps:
    """Draw the maps of a kind."""

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    if kind == "low-rank":
        meaning, look = (normal(rank, width) / np.float32(np.sqrt(rank)) for rank in (NUM_MEANINGS, NUM_LOOKS))
    else:
        strengths = np.arange(1, width + 1) ** -0.5
        strengths /= np.linalg.norm(strengths)
        meaning, look = (
            (strengths[:, None] * np.linalg.qr(normal(width, width))[0]).astype(np.float32) for _ in range(2)
        )
    centres = [normal(NUM_CENTRES, len(each)) for each in (meaning, look)]
    return Maps(meaning, look, *centres, unit(normal(1, width)))


def write_vectors(folder: Path, kind: str, num_images: int, num_captions: int, seed: int, width: int) -> None:
    """Write `images.f32` with a hundredth more images for an update, and `captions.npy` of the others."""
    rng = np.random.default_rng(seed)
    maps = make_maps(kind, width, rng)
    owners = np.sort(rng.integers(0, num_images, num_captions))
    said = np.empty((num_captions, len(maps.meaning)), np.float32)
    total = num_images + num_images // 100
    with (folder / "images.f32").open("wb") as file:
        for start in range(0, total, BLOCK):
            size = min(BLOCK, total - start)
            meanings = _around(rng, maps.meaning_centres, size, MEANING_NOISE)
            looks = _around(rng, maps.look_centres, size, LOOK_NOISE)
            file.write(unit(meanings @ maps.meaning + LOOK_STRENGTH * looks @ maps.look).data)
            here = (owners >= start) & (owners < start + size)
            said[here] = meanings[owners[here] - start]
    said += CAPTION_NOISE * rng.standard_normal(said.shape, dtype=np.float32)
    captions = unit(unit(said @ maps.meaning) + maps.gap)
    np.save(folder / "captions.npy", captions[rng.permutation(num_captions)])


def blocks(folder: Path, width: int, start: int, stop: int) -> Iterator[np.ndarray]:
    """Images from one row to another, block by block."""
    with (folder / "images.f32").open("rb") as file:
        file.seek(start * width * 4)
        for first in range(start, stop, BLOCK):
            size = min(BLOCK, stop - first)
            yield np.frombuffer(file.read(size * width * 4), np.float32).reshape(size, width)


def exact_rows(folder: Path, queries: np.ndarray, num_images: int) -> np.ndarray:
    """Ten nearest images of each query, (Q, 10), by brute force."""
    best, rows, start = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64), 0
    for block in blocks(folder, queries.shape[1], 0, num_images):
        scores, found = faiss.knn(queries, block, min(NUM_NEIGHBOURS, len(block)), metric=faiss.METRIC_INNER_PRODUCT)
        best, rows = np.hstack([best, scores]), np.hstack([rows, found + start])
        order = np.argsort(-best, axis=1, kind="stable")[:, :NUM_NEIGHBOURS]
        best, rows = np.take_along_axis(best, order, 1), np.take_along_axis(rows, order, 1)
        start += len(block)
    return rows


def unit(values: np.ndarray) -> np.ndarray:
    """Divide rows by their norms."""
    return (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)


def _around(rng: np.random.Generator, centres: np.ndarray, size: int, noise: float) -> np.ndarray:
    chosen = centres[rng.integers(0, len(centres), size)]
    return chosen + np.float32(noise) * rng.standard_normal(chosen.shape, dtype=np.float32)
