"""Hostile inputs, made by a seeded mutator from good files of every format, through the real decode step.

    python scripts/hostile_inputs.py [NUM] [SEED] [--keep DIR]

Half are crafted by hand (decompression bombs, absurd sizes, endless videos, playlists, tars that climb, odd names and
captions; NUM permitting, all of them), the others are good files damaged at random: flipped bits, truncations, swapped
headers and the like. Each must be embedded or rejected with a reason, without a crash, a hang over 30 s, or more
memory than the decoding child is allowed. Prints what happened and, as its last line, one JSON object; exit 1 where an
input broke that promise. The same NUM and SEED make the same inputs.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import socket
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from corpus import DEMO_MODEL
from embedder.config_toml.run_sections import Columns, SourceConfig
from embedder.errors import SourceError
from embedder.media.limits import DecodeLimits
from embedder.media.resize import ResizeSpec
from embedder.sources.listing import list_sources
from embedder.steps.decode import ItemReader
from embedder.steps.item_decoder import DecodeSpec
from harness import peak_rss_bytes
from hostile.files import Good, Make, good_files, media_cases, tar_of, writer

LONG_NAME = "n" * 240


def source_cases(good: Good) -> Iterator[tuple[str, Make]]:
    for name, content in captions().items():
        yield f"caption: {name}", caption_case(good["plain.jpg"], name, content)
    for name in names():
        yield f"name: {name!r}", named_case(name, good["plain.jpg"])
    for name, make in (("link out of the root", link_out), ("link to itself", link_loop), ("socket", unix_socket)):
        yield name, make
    yield "pipe", lambda folder: os.mkfifo(folder / "pipe.jpg")
    yield "folder that looks like an image", lambda folder: (folder / "folder.jpg").mkdir()
    yield "folder as deep as can be", lambda folder: (folder / "/".join(["d"] * 200)).mkdir(parents=True)
    for name, content in tars(good):
        yield f"tar: {name}", writer("shard.tar", content)
    for name, text in hostile_tables().items():
        yield f"table: {name}", writer(name.rpartition(" ")[2], text)


def captions() -> dict[str, bytes]:
    return {
        "nul.txt": b"a red\x00 car\x00", "not utf-8.txt": b"caf\xe9 \xff\xfe",
        "ten thousand words.txt": b"word " * 10_000, "one word of a megabyte.txt": b"w" * 1_000_000,
        "too large.txt": b"a " * 5_000_000, "utf-16.txt": "a red car".encode("utf-16"), "blank.txt": b" \n\t\n",
        "empty.txt": b"", "controls.txt": bytes(range(1, 32)),
        "right to left.txt": "\u202egnp.exe \u200b\u200d\ufeff a\u0301".encode() * 50,
        "families.txt": ("\U0001f468\u200d\U0001f469\u200d\U0001f467" * 2000).encode(),
        "special tokens.txt": b"[CLS] [SEP] [PAD] [MASK] <unk> </s>" * 100,
        "half a pair.json": b'{"caption": "a \\ud800 car"}', "nul in json.json": b'{"caption": "a \\u0000 car"}',
        "deep.json": b"[" * 100_000 + b"]" * 100_000, "deep object.json": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "long number.json": b'{"caption": ' + b"9" * 100_000 + b"}", "not a number.json": b'{"caption": NaN}',
        "a list.json": b'["a", "b"]', "twice.json": b'{"caption": "first", "caption": "second"}',
        "of another type.json": b'{"caption": {"text": ["a"]}}', "cut off.json": b'{"caption": "a red ',
        "many keys.json": json.dumps({str(number): number for number in range(50_000)}).encode(),
    }  # fmt: skip


def caption_case(image: bytes, name: str, content: bytes) -> Make:
    """Only the caption, and next to an image, which it must not cost."""

    def make(folder: Path) -> None:
        stem, _, suffix = name.rpartition(".")
        (folder / f"{stem} pair.jpg").write_bytes(image)
        (folder / f"{stem} pair.{suffix}").write_bytes(content)
        (folder / name).write_bytes(content)

    return make


def names() -> list[bytes]:
    return [
        b"with  spaces .jpg", "\u00e9\u4e2d\u0416\U0001f600.jpg".encode(), "e\u0301 and \u00e9.jpg".encode(),
        b"line\nbreak.jpg", b"tab\tbell\x07.jpg", b"\xff\xfe not utf-8.jpg", b"#fragment?query=1&a.jpg",
        b"100%25 %00.jpg", b"-rf.jpg", b"*[a-z]?.jpg", b"$(touch x);`id`.jpg", b"'quotes\"\\.jpg",
        b"a.tar#member=b.jpg", b".hidden.jpg", b"..jpg", b"no suffix", b"CON.jpg ", LONG_NAME.encode() + b".jpg",
        b"[bold red]markup.jpg",
    ]  # fmt: skip


def named_case(name: bytes, image: bytes) -> Make:
    def make(folder: Path) -> None:
        Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_bytes(image)  # noqa: PTH118 - bytes

    return make


def link_out(folder: Path) -> None:
    (folder / "passwd.txt").symlink_to("/etc/passwd")
    (folder / "root.jpg").symlink_to("/")
    (folder / "climbs.txt").symlink_to("../" * 30 + "etc/passwd")
    (folder / "zero.jpg").symlink_to("/dev/zero")


def link_loop(folder: Path) -> None:
    (folder / "loop.jpg").symlink_to("loop.jpg")
    (folder / "here").symlink_to(".", target_is_directory=True)


def unix_socket(folder: Path) -> None:
    here = Path.cwd()
    os.chdir(folder)  # names of sockets may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket.jpg")
    finally:
        os.chdir(here)


def tars(good: Good) -> Iterator[tuple[str, bytes]]:
    image = good["plain.jpg"]
    yield ("members that climb", tar({"../../escape.jpg": image, "/etc/absolute.jpg": image, "a/../../b.jpg": image}))
    yield "one name three times", tar_of(*[("a.jpg", image, {})] * 3)
    yield "a tar in a tar in a tar", tar({"inner.tar": tar({"innermost.tar": good["shard.tar"]})})
    kinds = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "char": tarfile.CHRTYPE, "fifo": tarfile.FIFOTYPE}
    special = ((f"{name}.jpg", b"", {"type": kind, "linkname": "/etc/passwd"}) for name, kind in kinds.items())
    yield "links and devices", tar_of(*special)
    yield "ten thousand empty members", tar({f"{number}.jpg": b"" for number in range(10_000)})
    yield "size beyond the end", lie(good["shard.tar"], b"77777777777\0")
    yield "size of 2^63", lie(good["shard.tar"], b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7)
    yield "size below zero", lie(good["shard.tar"], b"\xff" * 12)
    yield "size that is no number", lie(good["shard.tar"], b"size, please")
    yield "a name of a megabyte", tar({"n" * 1_000_000 + ".jpg": image})
    yield "names that are none", tar({"": image, ".": image, "./": image, "\n": image, "a//b.jpg": image})
    yield "nothing but zeros", bytes(10_240)
    yield "only half a block", good["shard.tar"][:300]
    yield "headers that claim gigabytes", lie(tar_of(("x", b"", {"type": tarfile.XHDTYPE})), b"77777777777\0")


def tar(members: dict[str, bytes]) -> bytes:
    return tar_of(*((name, content, {}) for name, content in members.items()))


def lie(content: bytes, size: bytes) -> bytes:
    """Another size in the first member's header, with the checksum that goes with it."""
    header = bytearray(content[:512])
    header[124:136] = size.ljust(12, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content[512:]


def hostile_tables() -> dict[str, bytes]:
    return {
        "no header empty.csv": b"",
        "nul bytes nul.csv": b"id,caption\n1,a\x00b\n",
        "a million columns wide.csv": b",".join(b"c%d" % number for number in range(100_000)) + b"\n",
        "an open quote open.csv": b'id,caption\n1,"never closed\n' + b"x,y\n" * 10_000,
        "one long line long.jsonl": b'{"id": "1", "caption": "' + b"w" * 5_000_000 + b'"}',
        "deep deep.jsonl": b'{"id": "1", "caption": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        "half a pair pair.jsonl": b'{"id": "\\ud800", "caption": "\\ud800"}',
        "no parquet no.parquet": b"PAR1" + b"\xff" * 100 + b"PAR1",
    }


HEAD_BYTES = 512
EXTREMES = (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x00", b"\x80\x00\x00\x00")


def flip_bits(rng: Random, data: bytes, reach: int, numbers: tuple[int, ...]) -> bytes:
    flipped = bytearray(data)
    for _ in range(rng.choice(numbers)):
        flipped[rng.randrange(min(reach, len(data)))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def write_sizes(rng: Random, data: bytes) -> bytes:
    """Where a header has a size, it is now absurd; most numbers stand at even places near the front."""
    for _ in range(rng.choice((1, 2, 6))):
        place = 2 * rng.randrange(max(1, min(HEAD_BYTES, len(data)) // 2))
        data = data[:place] + rng.choice(EXTREMES) + data[place + 4 :]
    return data


def put(rng: Random, data: bytes, piece: bytes, num_replaced: int = 0) -> bytes:
    """Put a piece somewhere, in the place of so many bytes."""
    place = rng.randrange(len(data))
    return data[:place] + piece + data[place + num_replaced :]


def take(rng: Random, data: bytes, most: int) -> bytes:
    start = rng.randrange(len(data))
    return data[start : start + rng.randrange(1, most)]


MUTATIONS: dict[str, Callable[[Random, bytes, bytes], bytes]] = {
    "flip_bits": lambda rng, data, _: flip_bits(rng, data, len(data), (1, 4, 64)),
    "flip_bits_of_the_head": lambda rng, data, _: flip_bits(rng, data, HEAD_BYTES, (1, 3, 10)),
    "truncate": lambda rng, data, _: data[: rng.randrange(len(data))],
    "swap_header": lambda rng, data, other: other[: (num := rng.choice((4, 12, 64, 512)))] + data[num:],
    "splice": lambda rng, data, other: put(rng, data, piece := take(rng, other, 2000), len(piece)),
    "insert": lambda rng, data, _: put(rng, data, rng.randbytes(rng.randrange(1, 5000))),
    "repeat": lambda rng, data, _: put(rng, data, take(rng, data, 3000) * rng.choice((1, 5, 50))),
    "cut_out": lambda rng, data, _: put(rng, data, b"", rng.randrange(1, 1000)),
    "blank": lambda rng, data, _: put(rng, data, rng.choice((b"\0", b"\xff")) * (num := rng.randrange(1, 2000)), num),
    "huge_size": lambda rng, data, _: write_sizes(rng, data),
    "append": lambda rng, data, other: data + rng.choice((other, rng.randbytes(5000))),
    "noise_behind_the_head": lambda rng, data, _: (
        data[: rng.choice((4, 16, 64))] + rng.randbytes(rng.randrange(20_000))
    ),
}
"""Ways to damage a file, by what is done to it; each may take of another good one."""


def mutate(rng: Random, data: bytes, other: bytes) -> tuple[bytes, str]:
    """Damage a file in one or two ways; gives the content, and what was done."""
    chosen = rng.sample(list(MUTATIONS), rng.choice((1, 1, 2)))
    for name in chosen:
        data = MUTATIONS[name](rng, data, other) or b"\0"
    return data, "+".join(chosen)


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
        tokenizer_json=(DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"), max_caption_tokens=32,
        segment_s=5.0, frames_per_segment=2, rows_per_batch=32, animations="clip",
    )  # fmt: skip
    reader = ItemReader(spec)
    while True:
        name, folder = connection.recv()
        connection.send(_try(name, Path(folder), reader))


def _try(name: str, folder: Path, reader: ItemReader) -> Outcome:
    outcome = Outcome(name)
    begun_s = time.monotonic()
    try:
        for listing in list_sources([_source(folder)]):
            tables = reader.decode(listing, lambda: False)
            rows = (row for table in tables for row in table.select(JUDGED).to_pylist())
            _judge(outcome, listing.to_pylist(), rows)
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


MAX_FILE_S = 30.0
STATES = ("embedded", "embedded_in_part", "rejected")
SLOW_S = 10.0  # inputs that take longer are shown
MAX_OWN_BYTES = 1 << 30  # of the process that lists and asks, libraries included


def main() -> None:
    parser = argparse.ArgumentParser(description="Hostile inputs through the decode step.")
    parser.add_argument("num", nargs="?", type=int, default=1000)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the inputs there")
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp(prefix="hostile-"))
    trials = Trials()
    try:
        outcomes = []
        for name, make in cases(options.num, options.seed):
            outcomes.append(try_one(trials, name, make, root))
            if outcomes[-1].faults or outcomes[-1].seconds > SLOW_S:
                print(outcomes[-1], flush=True)
    finally:
        trials.close()
        if options.keep is None:
            remove(root)
    sys.exit(report(outcomes, options.seed))


def cases(num: int, seed: int) -> Iterator[tuple[str, Make]]:
    """Crafted and damaged inputs by turns, until there are `num`."""
    rng = Random(seed)
    good = good_files()
    crafted = [*media_cases(good), *source_cases(good)]
    rng.shuffle(crafted)
    for number in range(num):
        if number % 2 == 0 and crafted:
            yield crafted.pop()
        else:
            yield damaged(Random(f"{seed} {number}"), number, good)


def damaged(rng: Random, number: int, good: dict[str, bytes]) -> tuple[str, Make]:
    """A good file, damaged; media often have a caption next to them, which must survive."""
    name = rng.choice(sorted(good))
    content, what = mutate(rng, good[name], good[rng.choice(sorted(good))])
    with_caption = rng.random() < 0.3

    def make(folder: Path) -> None:
        (folder / name).write_bytes(content)
        if with_caption and Path(name).suffix not in (".tar", ".csv", ".jsonl", ".parquet", ".txt", ".json"):
            (folder / name).with_suffix(".txt").write_text("a red car")

    return f"{number}: {what} of {name}", make


def try_one(trials: Trials, name: str, make: Make, root: Path) -> Outcome:
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        make(folder)
        outcome = trials.run(name, folder)
    finally:
        remove(folder)
    num_files = max(1, outcome.num_items)
    if outcome.seconds > MAX_FILE_S * num_files:
        outcome.faults.append(f"took {outcome.seconds:.1f} s for {num_files} item(s)")
    if outcome.child_peak_bytes > MEMORY_BYTES:
        outcome.faults.append(f"a decoder took {outcome.child_peak_bytes / 2**20:,.0f} MiB")
    if outcome.peak_bytes > MAX_OWN_BYTES:
        outcome.faults.append(f"the reader took {outcome.peak_bytes / 2**20:,.0f} MiB")
    return outcome


def remove(folder: Path) -> None:
    """Delete a folder whose names may be no text."""
    shutil.rmtree(os.fsencode(folder))


def report(outcomes: list[Outcome], seed: int) -> int:
    faults = [(outcome.name, fault) for outcome in outcomes for fault in outcome.faults]
    slowest = max(outcomes, key=lambda outcome: outcome.seconds / max(1, outcome.num_items))
    reasons = Counter(reason for outcome in outcomes for reason in outcome.reasons)
    tally = {
        "inputs": len(outcomes), "items": sum(outcome.num_items for outcome in outcomes),
        **{state: sum(outcome.states[state] for outcome in outcomes) for state in STATES},
        "sources_refused": sum(outcome.refused is not None for outcome in outcomes),
        "crashes": sum("crashed" in fault for _, fault in faults),
        "hangs": sum("hung" in fault or " s for " in fault for _, fault in faults),
        "other_faults": sum(not any(text in fault for text in ("crashed", "hung", " s for ")) for _, fault in faults),
        "slowest_s": round(slowest.seconds / max(1, slowest.num_items), 2), "slowest": slowest.name,
        "decoder_peak_mib": max(outcome.child_peak_bytes for outcome in outcomes) >> 20,
        "reader_peak_mib": max(outcome.peak_bytes for outcome in outcomes) >> 20, "seed": seed,
    }  # fmt: skip
    for name, fault in faults:
        print(f"FAULT {name}: {fault}")
    for reason, num in reasons.most_common():
        print(f"{num:7,}  {reason}")
    for key, value in tally.items():
        print(f"{key:18} {value}")
    print(json.dumps(tally | {"reasons": dict(reasons), "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    main()
