"""A store that the search page is tried on: images of several shapes with columns next to them, and a video."""

import datetime
import os
from io import BytesIO
from pathlib import Path

import clips
import pyarrow as pa
import pyarrow.parquet as pq
import samples

from embedder.config import RunConfig, load_config
from embedder.ingest.embed import embed

NUM_IMAGES = 60
SHAPES = ((240, 160), (160, 240), (200, 200), (320, 140))
GROUPS = ("boats", "trees", "O'Brien's \"best\"")
MARKUP = "<script>document.title = 'attacked'</script><img src=x onerror=\"document.title='attacked'\">"
MARKUP_SKU = "a b/ü'\"&?#%<i>"
MARKUP_ID = f"shop:{MARKUP_SKU}"
VIDEO_SECONDS, SEGMENT_S = 6, 2.0
VIDEO_ID = "clips:film.webm"
FOLDERS = ("2024/01 Lisbon", "2024/07 Norway/raw", "2025 Kyoto")
NUM_IN_FOLDERS = 24
LONG_NAME = "a name as long as cameras, scanners and people who describe all that they see make them.png"
TAKEN = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)


def write_catalogue(path: Path, num_images: int = NUM_IMAGES) -> None:
    """Write a table of images; the third has markup in its caption and whatever an id may hold."""
    numbers = range(num_images)
    ids = [f"pictures/{number:03d}" for number in numbers]
    captions = [f"{samples.SENTENCES[number % len(samples.SENTENCES)]} {number}" for number in numbers]
    ids[2], captions[2] = MARKUP_SKU, MARKUP
    table = pa.table(
        {
            "sku": ids,
            "photo": pa.array([_image(number) for number in numbers], pa.binary()),
            "title": captions,
            "group": [GROUPS[number % 3] for number in numbers],
            "price": pa.array([0.5 * number for number in numbers], pa.float64()),
            "is_new": [None if number % 7 == 0 else number % 2 == 0 for number in numbers],
            "taken": pa.array([TAKEN + datetime.timedelta(days=number) for number in numbers]),
        }
    )
    pq.write_table(table, path)


def make_page_store(folder: Path, model: Path) -> RunConfig:
    """Embed the table and the video."""
    (folder / "clips").mkdir()
    write_catalogue(folder / "catalogue.parquet")
    colours = [((40 * second) % 256, 90, 255 - 40 * second) for second in range(VIDEO_SECONDS) for _ in range(10)]
    clips.write(folder / "clips" / "film.webm", colours, codec="libvpx", kind="webm", size=(160, 90))
    columns = {"id": "sku", "image": "photo", "caption": "title"}
    carryover = ["group", "price", "is_new", "taken"]
    sources = [
        {"path": str(folder / "catalogue.parquet"), "name": "shop", "columns": columns, "carryover": carryover},
        {"path": str(folder / "clips"), "name": "clips"},
    ]
    config = load_config(
        overrides={
            "model": str(model),
            "store": str(folder / "store"),
            "source": sources,
            "engine": "local",
            "segment_s": SEGMENT_S,
            "no_progress_timeout_s": 60,
        }
    )
    embed(config)
    return config


def make_folder_store(folder: Path, model: Path) -> RunConfig:
    """Embed a folder as people have them: dated folders in folders, captions next to some, a long name, junk."""
    root = folder / "pictures"
    for number in range(NUM_IN_FOLDERS):
        place = root / FOLDERS[number % len(FOLDERS)]
        place.mkdir(parents=True, exist_ok=True)
        kind = "jpg" if number in (6, 14) else "png"
        path = place / (LONG_NAME if number == 0 else f"IMG_{number:04d}.{kind}")
        path.write_bytes(_image(number // 2 if number in (10, 11) else number, kind))  # two of them are the same
        if number % 2:
            path.with_suffix(".txt").write_text(f"{samples.SENTENCES[number]} {number}")
        seconds = (TAKEN + datetime.timedelta(days=number)).timestamp()
        os.utime(path, (seconds, seconds))
    (root / "broken.jpg").write_bytes(b"\xff\xd8\xff" + bytes(300))
    (root / "broken.txt").write_text("an old letter")
    source = {"path": str(root)}
    chosen = {"model": str(model), "store": str(folder / "store"), "source": [source], "engine": "local"}
    config = load_config(overrides=chosen | {"no_progress_timeout_s": 60})
    embed(config)
    return config


def _image(number: int, kind: str = "png") -> bytes:
    file = BytesIO()
    samples.make_image(number, *SHAPES[number % len(SHAPES)]).save(file, {"png": "PNG", "jpg": "JPEG"}[kind])
    return file.getvalue()
