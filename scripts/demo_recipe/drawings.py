"""What the demo model learns from: drawings of emoji in several styles, and what people call them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.plugins.train.trainer.batch import item_key

STYLES = ("twemoji", "openmoji", "fluent-flat", "fluent-modern")
HELD_OUT_EVERY = 8


Concept = dict[str, Any]
"""What is known of a concept in words: `hexcode`, `caption`, `tags`, and `groups`, the two that it stands in."""


@dataclass(frozen=True)
class Drawings:
    """Images: uint8 (N, H, H, 3), and which concept (place among all) and item each is; int64 (N,)."""

    pixels: torch.Tensor
    concepts: torch.Tensor
    keys: torch.Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, places: torch.Tensor) -> "Drawings":
        """Some of them."""
        return Drawings(self.pixels[places], self.concepts[places], self.keys[places])


def joined(one: Drawings, other: Drawings) -> Drawings:
    """All of both."""
    fields = ("pixels", "concepts", "keys")
    return Drawings(*(torch.cat([getattr(one, field), getattr(other, field)]) for field in fields))


def read_concepts(data: Path) -> list[Concept]:
    """Every concept of the training styles, ordered by code; no column but these is opened."""
    known: dict[str, Concept] = {}
    for style in STYLES:
        columns = ["hexcode", "caption", "tags", "group", "subgroup"]
        for row in pq.read_table(data / f"{style}.parquet", columns=columns).to_pylist():
            groups = [row[name].replace("-", " ") for name in ("group", "subgroup")]
            known.setdefault(row["hexcode"], row | {"tags": row["tags"] or [], "groups": groups})
    return [known[hexcode] for hexcode in sorted(known)]


def read_drawings(
    data: Path, styles: tuple[str, ...], concepts: list[Concept], image_size: int, work: Path
) -> Drawings:
    """Decode images of concepts that training knows in the pipeline's own sandbox; once, then from `work`.

    Args:
        data: folder of the styles' tables.
        styles: to read.
        concepts: that training knows.
        image_size: side of the square.
        work: folder that keeps what was decoded.
    """
    cache = work / f"{'+'.join(styles)}-{image_size}.npz"
    if not cache.exists():
        tables = [table_of(style, data, work) for style in styles]
        _decode(tables, concepts, image_size, cache)
    arrays = np.load(cache)
    return Drawings(*(torch.from_numpy(arrays[name]) for name in ("pixels", "concepts", "keys")))


def table_of(style: str, data: Path, work: Path) -> Path:
    """Table of a style: of the data's folder, else one that the recipe makes in `work`."""
    given = data / f"{style}.parquet"
    return given if given.exists() else work / f"{style}.parquet"


def _decode(tables: list[Path], concepts: list[Concept], image_size: int, cache: Path) -> None:
    resize = ResizeSpec(image_size, mode="squash", interpolation="bicubic", reduced_decode=True)
    places = {concept["hexcode"]: place for place, concept in enumerate(concepts)}
    pixels, found, keys = [], [], []
    with SandboxedDecoder() as sandbox:
        for table in tables:
            for row in pq.read_table(table, columns=["item_id", "hexcode", "image"]).to_pylist():
                if row["hexcode"] in places:
                    pixels.append(sandbox.image(row["image"], resize))
                    found.append(places[row["hexcode"]])
                    keys.append(item_key(row["item_id"]))
    np.savez(cache, pixels=np.stack(pixels), concepts=np.array(found), keys=np.array(keys))


def learnt_and_held_out(
    data: Path, concepts: list[Concept], image_size: int, work: Path, more_styles: tuple[str, ...] = ()
) -> tuple[Drawings, Drawings]:
    """Read the drawings of the four styles but those that are held out, with those of more styles; and those held out.

    Args:
        data: folder of the styles' tables.
        concepts: that training knows.
        image_size: side of the square.
        work: folder that keeps what was decoded.
        more_styles: of which nothing is held out.
    """
    learnt, held_out = hold_out(read_drawings(data, STYLES, concepts, image_size, work))
    if more_styles:
        learnt = joined(learnt, read_drawings(data, more_styles, concepts, image_size, work))
    return learnt, held_out


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
