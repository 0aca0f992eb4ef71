"""What all contestants embed: a folder of pairs (a picture, and its caption in a text file beside it), and a model."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_runs import DEMO_MODEL, make_model
from shipped_pictures import read_shipped

PHOTO_SUFFIXES = (".jpg", ".jpeg")

# ViT-S/16, and an ALBERT with the dimensions of albert-base-v2 but the shipped tokeniser's vocabulary.
VIT_S = {"image_size": 224, "patch_size": 16, "width": 384, "depth": 12, "num_heads": 6}
ALBERT_BASE = {
    "hidden_size": 768,
    "embedding_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}

Original = tuple[bytes, str, str]
"""Content of a picture's file, its suffix, its caption."""


@dataclass(frozen=True)
class Workload:
    """A model folder and a folder of items.

    Attributes:
        name: for the table.
        model: model folder.
        items: folder of files `000000.jpg` with `000000.txt`.
        num_items: pairs in it.
        num_distinct: pairs after which the contents begin anew.
    """

    name: str
    model: Path
    items: Path
    num_items: int
    num_distinct: int


def vit_s_on_photographs(root: Path, photographs: Path, num_items: int) -> Workload:
    """The larger pair of towers, with fresh weights, on a folder of JPEGs."""
    model = make_model(root / "vit-s-model", VIT_S, ALBERT_BASE)
    originals = read_photographs(photographs, num_items)
    return _workload("vit-s", model, root / "photographs", num_items, originals)


def small_on_emoji(root: Path, num_items: int) -> Workload:
    """The shipped model on the shipped emoji."""
    pictures, captions = read_shipped()
    originals = [(content, ".png", caption) for content, caption in zip(pictures, captions, strict=True)]
    return _workload("small", DEMO_MODEL, root / "emoji", num_items, originals[:num_items])


def read_photographs(folder: Path, limit: int) -> list[Original]:
    """The JPEGs of a folder; a caption is what stands in the file's name behind the first underscore.

    Raises:
        SystemExit: there are none.
    """
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PHOTO_SUFFIXES)[:limit]
    if not paths:
        raise SystemExit(f"{folder}: no JPEG; give another folder with --photographs, or leave out the model vit-s")
    return [(path.read_bytes(), ".jpg", _caption_of(path)) for path in paths]


def _caption_of(path: Path) -> str:
    return "a photograph of a " + path.stem.partition("_")[2].replace("_", " ")


def _workload(name: str, model: Path, folder: Path, num_items: int, originals: Sequence[Original]) -> Workload:
    write_pairs(folder, num_items, originals)
    return Workload(name, model, folder, num_items, len(originals))


def write_pairs(folder: Path, num_items: int, originals: Sequence[Original]) -> None:
    """Write pairs; behind the last original, names are links to the first ones' files, which are read from memory."""
    folder.mkdir(parents=True)
    for number in range(num_items):
        content, suffix, caption = originals[number % len(originals)]
        picture, text = folder / f"{number:06d}{suffix}", folder / f"{number:06d}.txt"
        if number < len(originals):
            picture.write_bytes(content)
            text.write_text(caption, encoding="utf-8")
        else:
            first = folder / f"{number % len(originals):06d}{suffix}"
            os.link(first, picture)
            os.link(first.with_suffix(".txt"), text)
