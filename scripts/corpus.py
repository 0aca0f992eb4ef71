"""What the scripts embed and search: shipped images, pairs of files, models with fresh weights, unlearned vectors."""

import io
import json
import tarfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from shards.fresh import init_model
from shards.model_config import ModelConfig
from shards.preprocess import PreprocessConfig
from shards.towers.clip import ClipTextTower
from shards.towers.vit import VitTower

PACKAGE = Path(__file__).parents[1] / "embedder"
DEMO_MODEL = PACKAGE / "demo_model"
DEMO_TAR = PACKAGE / "demo_data" / "noto.tar"
PHOTO_SUFFIXES = (".jpg", ".jpeg")

Pair = tuple[bytes, str, str]
"""Content of an image's file, its suffix, its caption."""


def read_shipped() -> tuple[list[bytes], list[str]]:
    """The shipped emoji (PNG files) and the caption of each."""
    with tarfile.open(DEMO_TAR) as tar:
        files = {member.name: file.read() for member in tar if (file := tar.extractfile(member)) is not None}
    names = sorted(name for name in files if name.endswith(".png"))
    captions = [json.loads(files[name.removesuffix("png") + "json"])["caption"] for name in names]
    return [files[name] for name in names], captions


def shipped_pairs() -> list[Pair]:
    return [(content, ".png", caption) for content, caption in zip(*read_shipped(), strict=True)]


def read_photographs(folder: Path, limit: int) -> list[Pair]:
    """The JPEGs of a folder; a caption is what stands in the file's name behind the first underscore."""
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PHOTO_SUFFIXES)[:limit]
    if not paths:
        raise SystemExit(f"{folder}: no JPEG; give another folder with --photographs, or leave out the model vit-s")
    objects = [path.stem.partition("_")[2].replace("_", " ") for path in paths]
    return [(path.read_bytes(), ".jpg", f"a photograph of a {name}") for path, name in zip(paths, objects, strict=True)]


def write_pairs(folder: Path, num_items: int, originals: Sequence[Pair]) -> Path:
    """Write pairs; behind the last original they begin again, with a number behind the end of an image.

    So no two files are equal: those would be computed once.
    """
    folder.mkdir(parents=True)
    for number in range(num_items):
        content, suffix, caption = originals[number % len(originals)]
        tail = str(number).encode() if number >= len(originals) else b""
        (folder / f"{number:06d}{suffix}").write_bytes(content + tail)
        (folder / f"{number:06d}.txt").write_text(caption, encoding="utf-8")
    return folder


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def write_clip(path: Path, frames: Sequence[np.ndarray], codec: str = "mpeg4", kind: str | None = None) -> None:
    with av.open(str(path), "w", format=kind) as container:
        stream = container.add_stream(codec, rate=Fraction(8))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.thread_count = 1
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def make_model(folder: Path, vision: dict, text: dict) -> Path:
    """A model folder with fresh weights, and the demo's tokeniser."""
    demo = json.loads((DEMO_MODEL / "config.json").read_text())
    text = {"vocab_size": demo["text"]["vocab_size"], "max_position_embeddings": 64, "pool": "mean"} | text
    config = ModelConfig(
        name=folder.name, trained=False, embedding_dim=256, vision=VitTower(**vision), text=text,
        preprocess=PreprocessConfig(image_size=vision["image_size"], resize="squash", max_caption_tokens=64),
    )  # fmt: skip
    return init_model(config, folder, seed=0, tokenizer_json=(DEMO_MODEL / "tokenizer.json").read_text())


def make_clip(folder: Path, dim: int, text: dict) -> Path:
    """A model folder with fresh weights whose text tower is CLIP's, for those who ask only with texts."""
    tokenizer_json = (DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8")
    end_id = Tokenizer.from_str(tokenizer_json).token_to_id("[SEP]")
    towers = {
        "vision": VitTower(image_size=32, patch_size=16, width=64, depth=1, num_heads=2),
        "text": ClipTextTower(**text, eos_token_id=end_id, pad_token_id=end_id),
        "preprocess": PreprocessConfig(image_size=32, max_caption_tokens=77),
    }
    config = ModelConfig(name=folder.name, trained=False, embedding_dim=dim, **towers)
    return init_model(config, folder, seed=0, tokenizer_json=tokenizer_json)


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)
