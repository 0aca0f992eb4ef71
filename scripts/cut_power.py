"""Cut the power of a file system on which a store is written, and look at what is left.

    python scripts/cut_power.py [NUM_CUTS] [SEED] [--plant sync-nothing]

A writer publishes without pause on an ext4 file system in an image file (a loop device; needs root). At a random moment
the image is copied as its device has it, without what the kernel holds back. The copy is mounted, and must be what the
writer had said to be done, or later, and pass `embedder store check --deep`, also after the next writer. `--plant
sync-nothing` leaves the flushes out, which must be found. The last line is one JSON object; exit 1 where something was
lost, and 3 where there is no loop device.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
from published_rows import as_embedded, listed_items, versions_of

from embedder.batch_schema import VECTOR
from embedder.errors import StoreError
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.store_check.check import check_store
from embedder.plugins.maintain.vacuum import vacuum
from embedder.store.backends import Disk
from embedder.store.files import StoreFiles
from embedder.store.journal.journal_segments import names_in_journal, seal
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.journal.runs import start_run
from embedder.store.layout import read_current
from embedder.store.lock import write_lock
from embedder.store.maintenance.compact import compact
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import PublishIntent, finish_publication, publish
from embedder.store.publish.tombstones import read_purged
from embedder.store.store_info import bind_store
from store_simulation.schedules import INFO, none

IMAGE_BYTES = 96 << 20
OPTIONS = "loop,noauto_da_alloc,commit=300"
"""The kernel flushes nothing by itself: neither what takes another file's name, nor names every five seconds."""
ITEMS = tuple(f"item{number}" for number in range(8))
MAX_COPIES, DIMENSIONS = 2000, 16
NO_DEVICE = 3

Rows = dict[str, str]
"""Item -> version of its content."""


class Writer:
    """Writer that publishes one change after another, and knows what is published then."""

    def __init__(self, folder: Path, random: Random) -> None:
        self.files, self.random, self.rows, self._num = StoreFiles(folder), random, dict[str, str](), 0

    def change(self) -> Iterator[Rows]:
        """Make one change: yields the rows that there are after it before it begins."""
        self._num += 1
        work = self.random.choices(("embed", "retire", "compact", "vacuum", "purge"), (8, 2, 1, 2, 1))[0]
        purged = next((item for item in self.rows if item.startswith("secret")), None)
        chosen, gone = dict[str, str](), None
        if work == "embed" or not self.rows or (work == "purge" and purged is None):
            chosen = dict.fromkeys(self.random.sample(ITEMS, self.random.randint(1, 3)), f"{self._num:032x}")
            chosen |= {f"secret{self._num}": f"{self._num:032x}"} if purged is None else {}
        elif work in ("retire", "purge"):
            gone = purged if work == "purge" else self.random.choice(sorted(self.rows))
        self.rows = {item: version for item, version in self.rows.items() if item != gone} | chosen
        yield self.rows
        if chosen or work == "retire":
            self.embed(chosen, [] if gone is None else [gone])
        elif work == "purge":
            self.locked(lambda: purge(self.files, {purged}, none))
        elif work == "compact":
            self.locked(lambda: compact(self.files, choose_index=none))
        else:
            self.locked(lambda: vacuum(self.files, keep_days=0, keep_versions=2))

    def embed(self, chosen: Mapping[str, str], retired: Sequence[str] = ()) -> None:
        with write_lock(self.files):
            bind_store(self.files, INFO)
            finish_publication(self.files)
            run = start_run(self.files, INFO, pa.schema([]))
            metadata = RunMetadata(run.run_id, run.session, "f", "p", pa.schema([]))
            for task, (item, version) in enumerate(chosen.items()):
                vector = np.random.default_rng(int(version, 16)).standard_normal(DIMENSIONS, np.float32)
                listed = listed_items([item], "/texts/", [f"text of {item}"])
                write_part(self.files, metadata, task, as_embedded(listed, pa.array([vector], VECTOR), version))
            if len(chosen) > 1:
                seal(self.files, run.run_id, sorted(names_in_journal(self.files, run.run_id)))
            intent = PublishIntent(kind="refresh", info=INFO)
            publish([ModelWork(run, metadata, intent, pa.chunked_array([pa.array(retired, pa.string())]))])

    def locked(self, work: Callable[[], object]) -> None:
        with write_lock(self.files):
            finish_publication(self.files)
            work()


def write_forever(folder: Path, seed: int) -> None:
    """Publish until the end; reports each change before and after it, one JSON value a line."""
    writer = Writer(folder, Random(seed))
    while True:
        for rows in writer.change():
            print(json.dumps(rows), flush=True)
        print("done", flush=True)


class States:
    """What a writer has said: the rows after each change, and how many changes are done."""

    def __init__(self, writer: subprocess.Popen[str]) -> None:
        self.begun: list[Rows] = [{}]
        self.num_done = 0
        self._lines = writer.stdout or ()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._lines:
            if line == "done\n":
                self.num_done = len(self.begun) - 1
            else:
                self.begun.append(json.loads(line))


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[str]:
    """Mount an image; gives the name of its device."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "ext4", "-o", OPTIONS, image, folder], check=True)
    try:
        yield Path(subprocess.check_output(["findmnt", "-n", "-o", "SOURCE", folder], text=True).strip()).name
    finally:
        subprocess.run(["umount", folder], check=True)


def copy_image(image: Path, target: Path, device: str) -> None:
    """Copy an image as its device has it at one moment: again where something was written meanwhile."""
    for _ in range(MAX_COPIES):
        before = _writes(device)
        with image.open("rb") as source, target.open("wb") as copy:
            copy.truncate(IMAGE_BYTES)
            for start, end in _extents(source.fileno()):
                os.lseek(copy.fileno(), start, os.SEEK_SET)
                os.sendfile(copy.fileno(), source.fileno(), start, end - start)
        if _writes(device) == before:
            return
    raise TimeoutError(f"{image}: written without pause while it was copied {MAX_COPIES} times")


def _writes(device: str) -> tuple[str, ...]:
    """Writes and flushes that a device has ended, and those that it is at."""
    found = Path(f"/sys/block/{device}/stat").read_text(encoding="ascii").split()
    return (found[4], found[6], found[8], *found[15:16])


def _extents(file: int) -> Iterator[tuple[int, int]]:
    end = 0
    while True:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(file, start, os.SEEK_HOLE)
        yield start, end


def published_rows(files: StoreFiles) -> Rows:
    return {} if read_current(files) is None else dict(zip(*versions_of(files).to_pydict().values(), strict=True))


def judge(folder: Path, allowed: list[Rows], seed: int) -> list[str]:
    """Look at what a power cut has left, have the next writer continue, and look again; what is wrong."""
    files = StoreFiles(folder)
    try:
        wrong = _errors(files, ("error",)) if read_current(files) is not None else []
        rows = published_rows(files)
        if rows not in allowed:
            wrong.append(f"holds {rows}, and the last that was said to be done is {allowed[0]}")
        writer = Writer(folder, Random(seed))
        writer.embed({"next": f"{seed:032x}"})
        purged = read_purged(files)
        for item in sorted({item for each in allowed for item in each if purged.hash_of(item) in purged.unfinished}):
            writer.locked(lambda item=item: purge(files, {item}, none))
        after = published_rows(files)
        if after.pop("next", None) is None or not _is_between(after, allowed):
            wrong.append(f"after the next writer it holds {after}")
        writer.locked(lambda: vacuum(files, keep_days=0, keep_versions=1))
        return wrong + _errors(files, ("error", "warning", "note"))
    except (StoreError, ValueError, OSError) as error:
        return [f"{type(error).__name__}: {error}"]


def _is_between(rows: Rows, states: list[Rows]) -> bool:
    """Whether each item is as in one of some states: the next writer publishes what was finished of a change."""
    items = rows.keys() | {item for each in states for item in each}
    return all(rows.get(item) in {each.get(item) for each in states} for item in items)


def _errors(files: StoreFiles, severities: tuple[str, ...]) -> list[str]:
    return [each.text for each in check_store(files, deep=True).findings if each.severity in severities]


def cut_power(num_cuts: int, seed: int, root: Path, plant: str | None) -> int:
    image, copy, random, began_s = root / "disk.img", root / "cut.img", Random(seed), time.monotonic()
    subprocess.run(["truncate", "-s", str(IMAGE_BYTES), image], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-J", "size=4", "-E", "lazy_itable_init=0", image], check=True)
    command = [sys.executable, __file__, "--write", root / "disk" / "store", "--seed", str(seed)]
    command += ["--plant", plant] if plant else []
    faults, publications = 0, 0
    with mounted(image, root / "disk") as device:
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            states = States(writer)
            while not states.num_done and writer.poll() is None:
                time.sleep(0.05)
            for number in range(num_cuts):
                time.sleep(random.uniform(0.0, 0.5))
                if writer.poll() is not None:
                    print(f"the writer has ended with {writer.returncode}")
                    return 1
                first = states.num_done
                copy_image(image, copy, device)
                time.sleep(0.05)  # until what was begun before the copy is heard of
                allowed = states.begun[first:]
                with mounted(copy, root / "cut"):
                    wrong = judge(root / "cut" / "store", allowed, seed + number)
                faults += bool(wrong)
                for each in wrong:
                    print(f"cut {number + 1}: {each}", flush=True)
            publications = states.num_done
        finally:
            writer.kill()
            writer.wait()
    seconds = round(time.monotonic() - began_s, 1)
    print(json.dumps({"cuts": num_cuts, "faults": faults, "publications": publications, "seconds": seconds}))
    return 1 if faults else 0


def has_loop_devices() -> bool:
    tools = all(shutil.which(each) for each in ("mkfs.ext4", "mount", "findmnt"))
    return os.geteuid() == 0 and tools and Path("/dev/loop-control").exists()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_cuts", nargs="?", type=int, default=200)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    parser.add_argument("--plant", choices=["sync-nothing"])
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", dest="writer_seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        if options.plant:
            Disk.sync_file = Disk.sync_folder = lambda disk, path: None  # type: ignore[method-assign]
        write_forever(options.write, options.writer_seed)
    if not has_loop_devices():
        print("no image can be mounted here: that needs root, a loop device, and mkfs.ext4")
        return NO_DEVICE
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing stays mounted
    with tempfile.TemporaryDirectory() as folder:
        return cut_power(options.num_cuts, options.seed, Path(folder), options.plant)


if __name__ == "__main__":
    sys.exit(main())
