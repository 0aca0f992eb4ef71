"""The world of a disturbed run: its source, its configuration, and states of its store, read as a reader does."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from deltalake.exceptions import TableNotFoundError
from PIL import Image
from published_rows import delta_rows

import embedder
from corpus import encode, make_model, write_clip
from embedder.errors import StoreError
from embedder.store.environment import RepeatingThread
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, read_current
from embedder.store.tables.models import model_files
from embedder.store.tables.tables import RecordTable
from embedder.store_index.index_versions import fetched_manifest

NUM_ITEMS = 96
WORDS = ("red", "blue", "green", "car", "cat", "bird", "horse", "tree", "house", "sea", "sun", "night", "old", "runs")
# Small batches and part files: many moments at which something is half done. Seeded towers have learned nothing, and a
# caption that moves one image in ten is no sign of anything.
RUN_SETTINGS = {
    "rows_per_part": 8, "batch_size": 4, "segment_s": 1.0, "frames_per_segment": 2, "no_progress_timeout_s": 60,
    "max_reject_fraction": 0.0, "max_retire_fraction": 0.2, "max_retrieval_drop": 1.0, "decode.items_per_task": 8,
}  # fmt: skip
# Towers of 4 + 4 layers, that embed an image in a millisecond.
SMALL_VISION = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 4, "num_heads": 2}
TEXT = {
    "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
STEP_FILE = "own_step.py"
HALVES = """
def halves(batch):
    image = batch["image"][0].as_py()
    half = image["width"] // 2
    regions = [{"x": x, "y": 0, "width": half, "height": image["height"]} for x in (0, half)]
    return {"region": regions, "side": ["left", "right"]}
"""
STEP = f"""[[step]]
name = "halves"
callable = "{STEP_FILE}:halves"
inputs = ["image"]
outputs = {{ region = "region", side = "string" }}
one_to_many = true
"""


class World:
    """A folder that holds all of it."""

    def __init__(self, root: Path, rng: Random, num_models: int = 1, has_step: bool = False) -> None:
        self.root, self.source, self.rng, self.num_made = root, root / "source", rng, 0
        self.further = [f"other{number}" for number in range(1, num_models)]
        self.has_step = has_step
        self.in_bucket: dict[str, str] = {}
        """URIs of stores that are not in the folder, by name."""

    def build(self, num_images: int = NUM_ITEMS, vision: dict = SMALL_VISION) -> None:
        self.source.mkdir(parents=True)
        for _ in range(num_images):
            self._add()
        for number in range(2):  # brightness grows with time
            frames = [np.full((48, 48, 3), (9 * frame + 40 * number) % 256, np.uint8) for frame in range(24)]
            write_clip(self.source / f"clip{number}.mp4", frames)
        make_model(self.root / "model", vision, TEXT)
        (self.root / STEP_FILE).write_text(HALVES)
        for number, name in enumerate(self.further, 1):  # of its own size, so that each image is decoded twice
            make_model(self.root / name, vision | {"image_size": vision["image_size"] + number * 8}, TEXT)

    def config_file(self, store: str, engine: str, **settings: object) -> Path:
        path, model = self.root / f"{store}-{engine}.toml", str(self.root / "model")
        values = {"store": str(self.store(store)), "engine": engine} | RUN_SETTINGS | settings
        tables: list[tuple[str, dict[str, str]]] = [("source", {"path": str(self.source)})]
        if self.further:
            tables += [("model", {"uri": model})]
            tables += [("model", {"name": name, "uri": str(self.root / name)}) for name in self.further]
        else:
            values["model"] = model
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        for name, own in tables:
            lines += [f"[[{name}]]", *(f"{key} = {json.dumps(value)}" for key, value in own.items())]
        path.write_text("\n".join([*lines, STEP if self.has_step else ""]))
        return path

    def store(self, name: str) -> Path | str:
        return self.in_bucket.get(name, self.root / name)

    def change(self) -> str:
        """Add, change, touch and delete some items; says what was done."""
        images = sorted(self.source.glob("*.png"))
        self.rng.shuffle(images)
        changed, captioned, touched, deleted = (images[a:b] for a, b in ((0, 16), (16, 20), (20, 24), (24, 30)))
        for path in changed:
            path.write_bytes(self._image())
        for path in captioned:
            path.with_suffix(".txt").write_text(self._caption())
        for path in touched:
            os.utime(path)
        for path in deleted:
            path.unlink()
            path.with_suffix(".txt").unlink(missing_ok=True)
        for _ in range(6):
            self._add()
        return f"{len(changed)} changed, {len(captioned)} captions, {len(touched)} touched, {len(deleted)} gone, 6 new"

    def _add(self) -> None:
        path = self.source / f"{self.num_made:05d}.png"
        self.num_made += 1
        path.write_bytes(self._image())
        if self.num_made % 2:
            path.with_suffix(".txt").write_text(self._caption())

    def _image(self) -> bytes:
        pixels = np.random.default_rng(self.rng.getrandbits(32)).integers(0, 255, (6, 8, 3), np.uint8)
        return encode(Image.fromarray(pixels).resize((64, 48), Image.Resampling.NEAREST))

    def _caption(self) -> str:
        return " ".join(self.rng.choices(WORDS, k=6))


MIN_COSINE = 0.9999
EXACT = ("modality", "uri", "caption", "content_version", "model_fingerprint", "preprocess_fingerprint")
OF_STEP = ("region", "side")  # columns, where runs have one
STATE_COLUMNS = ["item_id", "segment", "content_version"]
ITEM_FACTS = ("content_version", "state", "size_bytes", "modified", "num_vectors")

Fingerprint = frozenset[tuple[str, int, str]]
"""What distinguishes two states: item, segment and content of each row."""


def fingerprint(rows: Any) -> Fingerprint:
    return frozenset(zip(*(rows[name].to_pylist() for name in STATE_COLUMNS), strict=True))


def state_of(store: Path | str) -> Fingerprint:
    return fingerprint(embedder.open_store(store).to_arrow(STATE_COLUMNS))


def compare(store: Path | str, undisturbed: Path) -> tuple[int, dict[str, list[Any]]]:
    """Compare rows and items of all models of two stores: keys, versions, fingerprints, vectors; and count the rows."""
    num_rows, difference = 0, {"lost": [], "duplicated": [], "differing": []}
    for model in (None, *embedder.open_store(undisturbed).models):
        num_rows += _compare_model(store, undisturbed, model, difference)
    return num_rows, difference


def _compare_model(store: Path | str, undisturbed: Path, model: str | None, difference: dict[str, list[Any]]) -> int:
    """Compare the rows and items of one model; gives the number of its rows."""
    found, expected = (embedder.open_store(each, model=model) for each in (store, undisturbed))
    rows = found.to_arrow()
    for these, others, key, facts in (
        (rows, expected.to_arrow(), ("item_id", "segment"), EXACT),
        (found.items(), expected.items(), ("item_id",), ITEM_FACTS),
    ):
        by_key, wanted = ({tuple(map(row.get, key)): row for row in each.to_pylist()} for each in (these, others))
        counts = Counter(zip(*(these[name].to_pylist() for name in key), strict=True))
        difference["duplicated"] += [key for key, count in counts.items() if count > 1]
        difference["lost"] += wanted.keys() - by_key.keys()
        difference["differing"] += by_key.keys() - wanted.keys()
        common = wanted.keys() & by_key.keys()
        difference["differing"] += [key for key in common if not _same(by_key[key], wanted[key], facts)]
    return rows.num_rows


def _same(row: dict[str, Any], other: dict[str, Any], facts: Sequence[str]) -> bool:
    if any(row.get(name) != other.get(name) for name in (*facts, *OF_STEP)):
        return False
    pairs = [(row.get(name), other.get(name)) for name in ("image_embedding", "text_embedding")]
    return all(a is b if a is None or b is None else np.dot(a, b) >= MIN_COSINE for a, b in pairs)


class Poller:
    """Opens what is published all the while, as searches do, and on a disk both tables as other programs do."""

    def __init__(self, store: Path | str) -> None:
        self.allowed: list[Fingerprint] = [frozenset()]
        """States that may be seen: each that the source was in."""
        self.num_polls = 0
        self.seen: list[Fingerprint] = []
        """States in the order of their first sight."""
        self.faults: list[str] = []
        self._store = store

    def start(self) -> RepeatingThread:
        every_s = 0.02 if isinstance(self._store, Path) else 1.0  # the bucket's server has one thread
        return RepeatingThread(every_s, self._try_to_poll, "reader")

    def _try_to_poll(self) -> bool:
        try:
            self.poll()
        except (StoreError, OSError, ValueError) as error:
            self.faults.append(f"{type(error).__name__}: {error}")
        return True

    def poll(self) -> None:
        self.num_polls += 1
        files = StoreFiles(self._store)
        if isinstance(self._store, Path):
            self._look_at_newest(files)
        current = read_current(files) if files.exists("CURRENT.json") else None
        if current is None:
            return
        state = self._whole_state(files, current)
        for name, own in current.models.items():
            if self._whole_state(model_files(files, name), own) != state:
                self.faults.append(f"run {current.run_id}: model {name} is of another state than the main one")
        if state not in self.allowed:
            self.faults.append(f"run {current.run_id}: {len(state)} rows that are no state of the source")
        elif state not in self.seen:
            self.seen.append(state)

    def _whole_state(self, files: StoreFiles, current: Current) -> Fingerprint:
        """The published rows; items, rows and index must belong together."""
        rows = RecordTable(files, "embeddings", current.embeddings).read(STATE_COLUMNS)
        items = RecordTable(files, "items", current.items).read(["item_id", "num_vectors"]).to_pylist()
        num_found = Counter(rows["item_id"].to_pylist())
        num_stated = {item["item_id"]: item["num_vectors"] for item in items if item["num_vectors"]}
        if num_found != Counter(num_stated):
            self.faults.append(f"run {current.run_id}: items and embeddings do not belong together")
        if len(set(zip(rows["item_id"].to_pylist(), rows["segment"].to_pylist(), strict=True))) != rows.num_rows:
            self.faults.append(f"run {current.run_id}: a row stands twice")
        state = fingerprint(rows)
        if current.index is not None:  # a compaction keeps that of the version before, of equal rows
            indexed = RecordTable(files, "embeddings", fetched_manifest(files, current.index).embeddings_version)
            if fingerprint(indexed.read(STATE_COLUMNS)) != state:
                self.faults.append(f"run {current.run_id}: the index is of another state")
        return state

    def _look_at_newest(self, files: StoreFiles) -> None:
        """Programs that know no CURRENT.json may be one commit ahead, never in the middle of one."""
        try:
            rows = delta_rows(files.uri("embeddings"), columns=STATE_COLUMNS)
        except TableNotFoundError:
            return
        if rows.num_rows and fingerprint(rows) not in self.allowed:
            self.faults.append(f"newest embeddings: {rows.num_rows} rows that are no state")
