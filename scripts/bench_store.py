"""The store at a size: vectors read, index built and judged, a store opened cold, 1 % changed, a bucket read by ranges.

    python scripts/bench_store.py --rows 1000000                            # an hour on two cores; 8 GB of disk
    python scripts/bench_store.py --rows 200000 --beside DIR                # another checkout's code, part by part
    python scripts/bench_store.py --rows 10000000 --dim 64 --only open changes
    python scripts/bench_store.py --rows 5000000 --dim 16 --only marks        # rows that leave: written anew, or marked

The vectors are made up around some centres; the store's own writer writes them and its own publication publishes them.
What bounds reading is memory: `np.fromfile` of the same bytes in the same process, in turns, on one thread. Gigabytes a
second are of CPU time, as are all `_cpu_s`; others are seconds on the clock. Before a store is opened cold, its files
are flushed and leave the page cache (`posix_fadvise`, which needs no rights); how many of them are still there is told.
A changed row costs `rewritten_over_changed` times its bytes in both tables. Marked rows are then compacted, a thousand
changed items purged, and the first publication brought back; each time all rows are compared with what they have to be.
The last line is one JSON document: of this checkout, and in `beside` of each other one.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from published_rows import as_embedded, listed_items, publish_rows, versions_of

from corpus import make_clip, unit
from embedder.batch_schema import VECTOR
from embedder.config import RunConfig
from embedder.executors.job import store_info
from embedder.models.model_folder import open_model
from embedder.retrieval.store_api import open_store
from embedder.storage.object_ranges import PIECE_BYTES
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.maintenance.purge.purge import purge
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.history import publications
from embedder.store.schema import TABLES
from embedder.store.store_info import read_store_info
from embedder.store.tables.arrow_tensors import pack_vectors, unpack_vectors
from embedder.store.tables.tables import RecordTable
from harness import EMBEDDER, MIB, Server, free_port, json_of, number, run_watched, serving, table, until

PART_ROWS, BUCKET_ROWS = 50_000, 50_000
NUM_CENTRES, EVERY_CAPTION, CHANGED_SHARE = 1000, 20, 0.01
ROUNDS, NUM_ASKED, NUM_PURGED, K, TIMEOUT_S = 3, 100, 1000, 10, 7200.0
MARKS = {"chosen": "auto", "anew": False, "marked": True}
"""How rows leave: as a run chooses, by files without them, or by marks."""
COLUMN = "image_embedding"
TINY = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
SECRETS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}


@dataclass(frozen=True)
class Contestant:
    """A checkout and its own store of the same rows."""

    name: str
    checkout: Path | None  # whose product runs; None for this one's
    folder: Path
    num_rows: int
    dim: int

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def step(self, name: str, *arguments: object) -> dict:
        """Run a function of `STEPS` in a process of its own, with the contestant's product."""
        command = [sys.executable, __file__, "step", name, self.store, *map(str, arguments)]
        return json_of(command, TIMEOUT_S, checkout=self.checkout)

    def run(self, *command: str | Path) -> dict:
        """Run a command of the product; gives its seconds, its peak memory, and the JSON of its last line."""
        took = run_watched([*EMBEDDER, *command, "--store", self.store], self.folder, TIMEOUT_S, checkout=self.checkout)
        said = json.loads(took.last_line) if took.last_line.startswith("{") else {}
        return {"s": took.wall_s, "peak_mib": took.peak_bytes / MIB, "said": said}


def make_store(store: str, num_rows: str, dim: str) -> dict:
    """Write the rows in part files of the size that compaction makes, and publish them without an index."""
    model = make_clip(Path(store).parent / "model", int(dim), TINY)
    files, began_s, cpu_s = StoreFiles(store), time.perf_counter(), time.process_time()
    info = store_info(RunConfig(model=str(model)).rows, open_model(str(model)), "float32")
    starts = range(0, int(num_rows), PART_ROWS)
    publish_rows(files, info, (rows_of(np.arange(at, min(at + PART_ROWS, int(num_rows))), int(dim)) for at in starts))
    found = {"make_s": time.perf_counter() - began_s, "make_cpu_s": time.process_time() - cpu_s}
    return found | {"store_bytes": sum(each.stat().st_size for each in Path(store).rglob("*.parquet"))}


def rows_of(numbers: np.ndarray, dim: int, version: int = 1) -> pa.Table:
    """Rows by their numbers, as an embedder hands them to the writer; a version has vectors of its own."""
    rng = np.random.default_rng([version, int(numbers[0]), len(numbers)])
    images = draw_vectors(rng, len(numbers), dim)
    has_caption = numbers % EVERY_CAPTION == 0
    noise = rng.standard_normal((np.count_nonzero(has_caption), dim), dtype=np.float32) / np.float32(dim**0.5)
    captions = [f"picture {each}" if has else None for each, has in zip(numbers, has_caption, strict=True)]
    names = [f"{each:09d}.jpg" for each in numbers]
    listed = listed_items(names, "/pictures/", captions, str(version))
    rows = as_embedded(listed, pack_vectors(images, np.ones(len(names), bool)), content_version=str(version))
    texts = pack_vectors(unit(images[has_caption] + noise), has_caption)
    return rows.set_column(rows.schema.get_field_index("text_embedding"), pa.field("text_embedding", VECTOR), texts)


def draw_vectors(rng: np.random.Generator, num: int, dim: int) -> np.ndarray:
    """Vectors around centres that all rows of a store share; float32 (num, dim) of unit norm."""
    centres = np.random.default_rng(0).standard_normal((NUM_CENTRES, dim), dtype=np.float32)
    vectors = rng.standard_normal((num, dim), dtype=np.float32)
    vectors *= np.float32(0.7)
    vectors += centres[rng.integers(0, NUM_CENTRES, num)]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def read_vectors(files: StoreFiles) -> np.ndarray:
    """All vectors of the published images in one matrix, by the fastest way that the product has."""
    current = read_current(files)
    embeddings = RecordTable(files, "embeddings", None if current is None else current.embeddings)
    if hasattr(embeddings, "read_vectors"):
        return embeddings.read_vectors(COLUMN).values
    return unpack_vectors(embeddings.read([COLUMN])[COLUMN].drop_null())  # of checkouts before that


def take_cpu_s(work: Callable[[], np.ndarray]) -> float:
    """CPU seconds of this process, while it makes an array."""
    before_s = time.process_time()
    work()
    return time.process_time() - before_s


def time_vectors(store: str) -> dict:
    """Read all vectors, and the same bytes as a plain file, in turns; the first pass only fills the page cache."""
    files, plain = StoreFiles(store), Path(store).parent / "vectors.bin"
    matrix = read_vectors(files)
    matrix.tofile(plain)
    num_bytes, dtype = matrix.nbytes, matrix.dtype
    del matrix
    np.fromfile(plain, dtype)
    turns = [(take_cpu_s(lambda: read_vectors(files)), take_cpu_s(lambda: np.fromfile(plain, dtype))) for _ in range(3)]
    plain.unlink()
    ours, bare = (median(each) for each in zip(*turns, strict=True))
    return {
        "vectors_gb_s": num_bytes / 1e9 / ours,
        "fromfile_gb_s": num_bytes / 1e9 / bare,
        "over_fromfile": ours / bare,
    }


def search_flat(store: str, dim: str) -> dict:
    """Open a store and search all of its vectors, without an index."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    open_store(store).search(queries(int(dim)), K)
    return {"flat_search_s": time.perf_counter() - began_s, "flat_search_cpu_s": time.process_time() - cpu_s}


def queries(dim: int) -> np.ndarray:
    return draw_vectors(np.random.default_rng(7), NUM_ASKED, dim)


def change_rows(store: str, num_rows: str, dim: str, where: str, leave: str = "chosen") -> dict:
    """Publish other vectors of 1 % of the rows, and weigh the files that it writes in both tables."""
    num_changed = max(1, int(int(num_rows) * CHANGED_SHARE))
    rng = np.random.default_rng(len(where))
    start = int(rng.integers(0, int(num_rows) - num_changed + 1))
    scattered = np.sort(rng.choice(int(num_rows), num_changed, replace=False))
    numbers = scattered if where == "scattered" else np.arange(start, start + num_changed)
    files, before = StoreFiles(store), table_files(store)
    part_bytes = sum(part.size_bytes for name in TABLES for part in RecordTable(files, name).parts())
    rows, began_s, cpu_s = rows_of(numbers, int(dim), 2 + len(where)), time.perf_counter(), time.process_time()
    publish_rows(files, read_store_info(files), [rows], deletion_vectors=MARKS[leave])
    took = {"s": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}
    written = sum(size for path, size in table_files(store).items() if path not in before)
    changed = part_bytes * num_changed / int(num_rows)
    sizes = {"num_changed": num_changed, "changed_bytes": changed, "written_bytes": written, "tables_bytes": part_bytes}
    return {"rewritten_over_changed": written / changed, **took, **sizes}


def table_files(store: str) -> dict[Path, int]:
    """Files of both tables, their logs among them -> bytes."""
    paths = (path for name in TABLES for path in Path(store, name).rglob("*"))
    return {path: path.stat().st_size for path in paths if path.is_file()}


def keep_up_marked(store: str) -> dict:
    """Compact, purge and roll back where rows are marked, and compare the rows each time; seconds of each."""
    files = StoreFiles(store)
    versions, first = versions_of(files), publications(files)[0].run_id
    is_first = pc.equal(versions["content_version"], "1")
    gone = versions.filter(pc.invert(is_first))["item_id"].to_pylist()[:NUM_PURGED]
    kept = versions.filter(pc.invert(pc.is_in(versions["item_id"], pa.array(gone))))
    first_kept = kept.set_column(1, "content_version", pa.array(["1"] * len(kept)))
    steps: dict[str, tuple[Callable[[], object], pa.Table]] = {
        "compact": (lambda: compact(files, PartTarget(marked_share=0.001)), versions),
        "purge": (lambda: purge(files, gone, lambda candidate, model="": None), kept),
        "rollback": (lambda: rollback(files, first, lambda candidate, model="": None), first_kept),
    }
    seconds = {}
    for name, (step, expected) in steps.items():
        began_s = time.monotonic()
        step()
        seconds[f"{name}_s"] = time.monotonic() - began_s
        if not versions_of(files).equals(expected):
            raise SystemExit(f"{store}: the rows differ from what they have to be after {name}")
        if name == "purge" and (paths := find_holders(files, pa.array(gone))):
            raise SystemExit(f"{store}: purged items are held by {paths[:3]}")
    return seconds


def find_holders(files: StoreFiles, ids: pa.Array) -> list[str]:
    """Parquet files with an id, whether or not a version has them."""
    paths = [info.path for info in files.list("") if info.path.endswith(".parquet") and "_delta_log" not in info.path]
    named = {path: rows for path in paths if "item_id" in (rows := files.read_table(path, ["item_id"])).column_names}
    return [path for path, rows in named.items() if pc.any(pc.is_in(rows["item_id"], ids)).as_py()]


def time_bucket(store: str, num_rows: str, dim: str, bucket: str) -> dict:
    """Publish rows to a bucket; read their part files by bare ranges, as large as the product's, and their vectors."""
    files = StoreFiles(f"{bucket}/{Path(store).parent.name}")
    info = read_store_info(StoreFiles(store))
    publish_rows(files, info, [rows_of(np.arange(min(int(num_rows), BUCKET_ROWS)), int(dim))])
    paths = [f"embeddings/{path}" for path in RecordTable(files, "embeddings").paths()]
    turns = []
    for _ in range(1 + ROUNDS):
        began_s = time.perf_counter()
        for path in paths:
            with files.open(path) as file:
                while file.read(PIECE_BYTES):
                    pass
        bare_s, began_s = time.perf_counter() - began_s, time.perf_counter()
        read_vectors(files)
        turns.append((bare_s, time.perf_counter() - began_s))
    bare_s, ours_s = (median(each) for each in zip(*turns[1:], strict=True))
    return {"bucket_bare_s": bare_s, "bucket_vectors_s": ours_s, "bucket_over_bare": bare_s / ours_s}


STEPS: dict[str, Callable[..., dict]] = {
    "make": make_store, "vectors": time_vectors, "flat": search_flat, "change": change_rows, "bucket": time_bucket,
    "keep up": keep_up_marked,
}  # fmt: skip


def measure_index(who: Contestant) -> dict:
    took = who.run("index", "build", "--force", "--set", "index.min_recall=0")
    sizes = [path.stat().st_size for path in (who.store / "index").rglob("*") if path.is_file()]
    return {"index_build_s": took["s"], "index_build_peak_mib": took["peak_mib"], "index_mib": sum(sizes) / MIB}


def measure_evaluate(who: Contestant) -> dict:
    took = who.run("evaluate", "--num-queries", "200", "--json")
    return {"evaluate_s": took["s"], "evaluate_peak_mib": took["peak_mib"]}


def measure_open(who: Contestant) -> dict:
    """Open the store cold: by one search of the command line, then by the service; the first of each pass is dropped.

    It fills the page cache with the libraries, and writes the byte code that an installed package has.
    """
    file, found = who.folder / "queries.npy", dict[str, float]()
    np.save(file, queries(who.dim)[:1])
    for _ in range(2):
        found["num_files"], found["num_still_cached"] = drop_from_cache(who.store)
        found["search_s"] = who.run("search", "--vector", file, "--json")["s"]
    for _ in range(2):
        drop_from_cache(who.store)
        with serving(who.store, who.folder / "serve.log", checkout=who.checkout) as server:
            found["open_s"] = server.ready_s
            found["first_answer_s"], found["second_answer_s"] = ask(server, who.dim), ask(server, who.dim)
            found["service_mib"] = server.memory_bytes / MIB
    return found


def drop_from_cache(folder: Path) -> tuple[int, int]:
    """Flush files and drop them from the page cache; gives their number, and how many are still there."""
    os.sync()
    paths = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    num_cached = 0
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            num_cached += bool(os.preadv(file, [bytearray(1)], 0, os.RWF_NOWAIT))
        except OSError:  # it would have to wait for the disk
            pass
        finally:
            os.close(file)
    return len(paths), num_cached


def ask(server: Server, dim: int) -> float:
    """Seconds of one search by the service."""
    body = json.dumps({"queries": [{"vector": queries(dim)[0].tolist()}], "k": K})
    began_s, connection = time.perf_counter(), HTTPConnection(urlsplit(server.url).netloc, timeout=300)
    connection.request("POST", "/search", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.status != 200 or b'"hits":[{' not in content:
        raise SystemExit(f"the service answered {answer.status}: {content[:300]!r}")
    return time.perf_counter() - began_s


def measure_changes(who: Contestant, leave: str = "chosen") -> dict:
    """Change the clustered rows first, since scattered changes leave files of their own."""
    places, sizes = ("clustered", "scattered"), (who.num_rows, who.dim)
    clustered, scattered = (who.step("change", *sizes, where, leave) for where in places)
    found = {f"{name}_scattered": value for name, value in scattered.items()}
    found |= {f"{name}_clustered": value for name, value in clustered.items()}
    return found | {"rewritten_over_changed": scattered["rewritten_over_changed"]}


def measure_marks(who: Contestant) -> dict:
    """Change rows of a store whose files are written anew, and of one that marks them, which is kept up then."""
    found = {}
    for leave in ("anew", "marked"):
        own = replace(who, folder=who.folder / leave)
        own.folder.mkdir()
        own.step("make", own.num_rows, own.dim)
        changes = measure_changes(own, leave) | (own.step("keep up") if leave == "marked" else {})
        found |= {f"{leave}_{name}": value for name, value in changes.items()}
    return found


def measure_bucket(who: Contestant) -> dict:
    """Read a store in a bucket of moto's server on this machine."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ |= SECRETS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true"}
    try:
        until(lambda: is_bucket_made(port, "bench"), "the bucket's server", 60.0)
        return who.step("bucket", who.num_rows, who.dim, "s3://bench")
    finally:
        server.kill()
        server.wait()


def is_bucket_made(port: int, name: str) -> bool:
    """Make a bucket, if the server is there."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("PUT", f"/{name}")
        return connection.getresponse().status == 200
    except ConnectionError:
        return False
    finally:
        connection.close()


PARTS: dict[str, Callable[[Contestant], dict]] = {
    "vectors": lambda who: who.step("vectors"), "flat": lambda who: who.step("flat", who.dim), "index": measure_index,
    "evaluate": measure_evaluate, "open": measure_open, "s3": measure_bucket, "changes": measure_changes,
    "marks": measure_marks,
}  # fmt: skip
"""What `--only` takes, in the order in which they are measured: flat search before there is an index, changes last."""


def measure_all(everyone: list[Contestant], only: list[str]) -> Iterator[tuple[Contestant, dict]]:
    """Measure part by part, the contestants in turns; the vectors several times."""
    for who in everyone:
        yield who, who.step("make", who.num_rows, who.dim)
    for part in (name for name in PARTS if name in only):
        rounds = [[PARTS[part](who) for who in everyone] for _ in range(ROUNDS if part == "vectors" else 1)]
        for place, who in enumerate(everyone):
            turns = [each[place] for each in rounds]
            yield who, {name: median(turn[name] for turn in turns) for name in turns[0]}


def main() -> None:
    if sys.argv[1:2] == ["step"]:  # one of its own processes
        pa.set_cpu_count(1)
        found = STEPS[sys.argv[2]](*sys.argv[3:])
        print(json.dumps(found | {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
        return
    options = read_options()
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=options.folder) as name:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sizes, os.environ["PYTHONPYCACHEPREFIX"] = (options.rows, options.dim), str(Path(name, "byte code"))
        everyone = [Contestant("this", None, Path(name, "this"), *sizes)]
        for place, checkout in enumerate(options.beside, 1):
            everyone.append(Contestant(f"{place}: {checkout.name}", checkout, Path(name, str(place)), *sizes))
        found: dict[str, dict] = {who.name: {} for who in everyone}
        for who in everyone:
            who.folder.mkdir()
        for who, figures in measure_all(everyone, options.only):
            figures.pop("peak_mib", None)
            found[who.name] |= figures
            print(f"{who.name}: {', '.join(f'{key} {number(value, 2)}' for key, value in figures.items())}", flush=True)
    ours = found.pop("this")
    names = {name: None for each in (ours, *found.values()) for name in each}
    table(
        [
            ["", "this", *found],
            *([name, *(number(each.get(name), 3) for each in (ours, *found.values()))] for name in names),
        ]
    )
    print(json.dumps({"rows": options.rows, "dim": options.dim, **ours, "beside": found}))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--beside", type=Path, action="append", default=[], metavar="DIR", help="another checkout")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    options = parser.parse_args()
    options.beside = [checkout.resolve() for checkout in options.beside]
    return options


if __name__ == "__main__":
    main()
