"""What the demo model learns from: drawings of emoji in several styles, and what people call them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from shards.training.batch import item_key

STYLES = ("twemoji", "openmoji", "fluent-flat", "fluent-modern")
HELD_OUT_EVERY = 8


@dataclass(frozen=True)
class Concepts:
    """What is known of each concept in words: caption, tags, and the two groups that it stands in."""

    hexcodes: list[str]
    captions: list[str]
    tags: list[tuple[str, ...]]
    groups: list[tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.hexcodes)


@dataclass(frozen=True)
class Drawings:
    """Pictures: uint8 (N, H, H, 3), and which concept (place in `Concepts`) and item each is; int64 (N,)."""

    pixels: torch.Tensor
    concepts: torch.Tensor
    keys: torch.Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, places: torch.Tensor) -> "Drawings":
        """Some of them."""
        return Drawings(self.pixels[places], self.concepts[places], self.keys[places])


def read_concepts(data: Path) -> Concepts:
    """Every concept of the training styles, ordered by code; no column but these is opened."""
    known: dict[str, dict[str, Any]] = {}
    for style in STYLES:
        columns = ["hexcode", "caption", "tags", "group", "subgroup"]
        for row in pq.read_table(data / f"{style}.parquet", columns=columns).to_pylist():
            known.setdefault(row["hexcode"], row)
    rows = [known[hexcode] for hexcode in sorted(known)]
    return Concepts(
        [row["hexcode"] for row in rows],
        [row["caption"] for row in rows],
        [tuple(row["tags"] or ()) for row in rows],
        [(row["group"].replace("-", " "), row["subgroup"].replace("-", " ")) for row in rows],
    )


def read_drawings(data: Path, styles: tuple[str, ...], concepts: Concepts, image_size: int, work: Path) -> Drawings:
    """Decode pictures of concepts that training knows through the pipeline's own door; once, then from `work`."""
    cache = work / f"{'+'.join(styles)}-{image_size}.npz"
    if not cache.exists():
        _decode(data, styles, concepts, image_size, cache)
    arrays = np.load(cache)
    return Drawings(*(torch.from_numpy(arrays[name]) for name in ("pixels", "concepts", "keys")))


def _decode(data: Path, styles: tuple[str, ...], concepts: Concepts, image_size: int, cache: Path) -> None:
    fit = ResizeSpec(image_size, resize="squash", interpolation="bicubic", reduced_decode=True)
    places = {hexcode: place for place, hexcode in enumerate(concepts.hexcodes)}
    pixels, found, keys = [], [], []
    with SandboxedDecoder() as door:
        for style in styles:
            for row in pq.read_table(data / f"{style}.parquet", columns=["item_id", "hexcode", "image"]).to_pylist():
                if row["hexcode"] in places:
                    pixels.append(door.image(row["image"], fit))
                    found.append(places[row["hexcode"]])
                    keys.append(item_key(row["item_id"]))
    np.savez(cache, pixels=np.stack(pixels), concepts=np.array(found), keys=np.array(keys))


def hold_out(drawings: Drawings) -> tuple[Drawings, Drawings]:
    """Hold out one drawing of every eighth concept that has three or more; which one follows from the items' keys."""
    counts = torch.bincount(drawings.concepts)
    held_out = []
    for concept in torch.nonzero(counts >= 3).flatten().tolist()[::HELD_OUT_EVERY]:
        places = torch.nonzero(drawings.concepts == concept).flatten()
        held_out.append(int(places[int(drawings.keys[places].argmin())]))
    is_held_out = torch.zeros(len(drawings), dtype=torch.bool)
    is_held_out[held_out] = True
    return drawings.take(~is_held_out), drawings.take(is_held_out)
