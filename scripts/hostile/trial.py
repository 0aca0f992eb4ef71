"""One hostile input through the real listing and the real decode step, in a process that may die without harm."""

import multiprocessing
import resource
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from corpus import DEMO_MODEL
from embedder.config import Columns, SourceConfig
from embedder.errors import SourceError
from embedder.media.limits import DecodeLimits
from embedder.media.resize import ResizeSpec
from embedder.sources.listing import list_sources
from embedder.steps.decode import ItemReader
from embedder.steps.item_decoder import DecodeSpec
from harness import peak_rss_bytes

MEMORY_BYTES = 1 << 30
# What one file may take: an image, or a segment; a whole video. The rest of the 30 s is for listing and hashing.
TIMEOUT_S, VIDEO_TIMEOUT_S = 10.0, 20.0
HUNG_S = 120.0  # then the whole process is given up
MAX_ERROR_CHARACTERS = 2000
JUDGED = ["item_id", "modality", "num_vectors", "step", "error_type", "error"]
TABLE_SUFFIXES = {".parquet": Columns(id="id", image="image", caption="caption")} | dict.fromkeys(
    (".csv", ".jsonl"), Columns(id="id", caption="caption")
)


@dataclass
class Outcome:
    """What became of one input: its items counted by state, or why the source as a whole was refused."""

    name: str
    states: Counter[str] = field(default_factory=Counter)
    refused: str | None = None
    reasons: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0
    child_peak_bytes: int = 0

    @property
    def num_items(self) -> int:
        return self.states.total()


class Trials:
    """Runs inputs one after another; a process that crashes or hangs is replaced, and its input is to blame."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, name: str, folder: Path) -> Outcome:
        try:
            self._connection.send((name, str(folder)))
            if self._connection.poll(HUNG_S):
                outcome: Outcome = self._connection.recv()
                return outcome
            fault = f"hung for {HUNG_S:g} s"
        except (EOFError, OSError):
            self._process.join()
            fault = f"crashed with exit code {self._process.exitcode}"
        self.close()
        self._start()
        return Outcome(name, faults=[fault], seconds=HUNG_S if "hung" in fault else 0.0)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection) -> None:
    spec = DecodeSpec(
        resize=ResizeSpec(image_size=64, mode="crop", interpolation="bicubic", reduced_decode=True),
        limits=DecodeLimits(timeout_s=TIMEOUT_S, video_timeout_s=VIDEO_TIMEOUT_S, memory_bytes=MEMORY_BYTES),
        tokenizer_json=(DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"),
        max_caption_tokens=32,
        segment_s=5.0,
        frames_per_segment=2,
        rows_per_batch=32,
        animations="clip",
    )
    reader = ItemReader(spec)
    while True:
        name, folder = connection.recv()
        connection.send(_try(name, Path(folder), reader))


def _try(name: str, folder: Path, reader: ItemReader) -> Outcome:
    outcome = Outcome(name)
    begun_s = time.monotonic()
    try:
        for listing in list_sources([_source(folder)]):
            _judge(outcome, listing.to_pylist(), _decoded(reader, listing))
    except SourceError as error:
        outcome.refused = str(error)
        _check_reason(outcome, "source", str(error))
    except Exception as error:  # noqa: BLE001 - whatever else comes out of it is what we look for
        outcome.faults.append(f"raised {type(error).__name__}: {str(error)[:300]}")
    outcome.seconds = time.monotonic() - begun_s
    outcome.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    child_pid = reader.decoder.sandbox.child_pid
    outcome.child_peak_bytes = max(ended, peak_rss_bytes(child_pid) if child_pid is not None else 0)
    return outcome


def _source(folder: Path) -> SourceConfig:
    """A tar and a table are sources by themselves; anything else is found in its folder."""
    names = [path for path in folder.iterdir() if path.name == "shard.tar" or path.stem in ("table", "crafted")]
    path = names[0] if len(names) == 1 else folder
    if path.suffix in TABLE_SUFFIXES:
        return SourceConfig(path=str(path), kind="table", columns=TABLE_SUFFIXES[path.suffix])
    return SourceConfig(path=str(path), kind="webdataset" if path.suffix == ".tar" else "files")


def _decoded(reader: ItemReader, listing: Any) -> Iterator[dict[str, Any]]:
    for table in reader.decode(listing, lambda: False):
        yield from table.select(JUDGED).to_pylist()


def _judge(outcome: Outcome, listed: list[dict[str, Any]], rows: Iterator[dict[str, Any]]) -> None:
    """Count items by state; each must be finished once, with a vector or with a reason."""
    finished: dict[str, dict[str, Any]] = {}
    num_vectors: Counter[str] = Counter()
    for row in rows:
        key = row["item_id"]
        num_vectors[key] += row["modality"] is not None
        if row["num_vectors"] is not None:
            if key in finished:
                outcome.faults.append(f"{key!r} was finished twice")
            finished[key] = row
    missing = [item["item_id"] for item in listed if item["item_id"] not in finished]
    outcome.faults += [f"{key!r} was lost" for key in missing]
    for key, row in finished.items():
        if row["num_vectors"] != num_vectors[key]:
            outcome.faults.append(f"{key!r} has {num_vectors[key]} vectors and says {row['num_vectors']}")
        _count(outcome, key, row)


def _count(outcome: Outcome, key: str, row: dict[str, Any]) -> None:
    if row["error_type"] is None:
        outcome.states["embedded"] += 1
        if row["num_vectors"] == 0:
            outcome.faults.append(f"{key!r} has neither vectors nor a reason")
        return
    outcome.states["embedded_in_part" if row["num_vectors"] else "rejected"] += 1
    outcome.reasons.append(row["error_type"])
    _check_reason(outcome, key, f"{row['step']}: {row['error_type']}: {row['error']}")


def _check_reason(outcome: Outcome, key: str, reason: str) -> None:
    if "None" in reason.split(": ")[:3] or not reason.strip():
        outcome.faults.append(f"{key!r} was rejected without a reason")
    if len(reason) > MAX_ERROR_CHARACTERS:
        outcome.faults.append(f"{key!r} has a reason of {len(reason):,} characters")
