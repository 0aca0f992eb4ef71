"""What the word index of hybrid search takes: to build, to update, to open and to ask.

    python -m growth.words STEP FOLDER NUMBER    # one step in a process of its own; the last line is its JSON

Captions have ten words of a Zipf distribution, over as many words as a twentieth of the captions; queries are three
words of one caption, so that most have a common one. A table of embeddings without vectors holds them, in part files of
a compacted store. An update changes 1 % of the captions, scattered, so that all part files were written anew.

`lists` draws the lists of the commonest 20,000 words instead, without captions; `ask` asks them then: of the
million words of 10 million captions, all but the rarest.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc

from growth.asking import timed
from growth.names import take
from harness import MIB, show

ROWS_PER_PART, WORDS_PER_CAPTION, WORDS_PER_QUERY = 50_000, 10, 3
CHANGED_EVERY, NUM_QUERIES, DEPTH = 100, 200, 100
FIRST, SECOND = 1, 2  # versions of the table; 0 has no rows
STEPS = ("make", "build", "change", "update", "ask")
COLUMNS = {
    "captions": "{number:,}",
    "step": "{step}",
    "wall s": "{wall_s:,.1f}",
    "CPU s": "{cpu_s:,.1f}",
    "peak MiB": "{mib:,.0f}",
    "index MiB": "{index_mib:,.0f}",
    "first answer ms": "{first_ms:,.0f}",
    "p50 ms": "{p50_ms:,.1f}",
    "p99 ms": "{p99_ms:,.1f}",
    "filtered p50 ms": "{filtered_ms:,.1f}",
}


def measure_words(root: Path, number: int) -> list[dict[str, Any]]:
    """Build, update and ask a word index of some captions; gives the figures of each step.

    Args:
        root: to work in.
        number: of captions.

    Raises:
        CommandFailedError: a step failed.
    """
    found = []
    for step in STEPS:
        figures, own = take([sys.executable, "-m", "growth.words", step, str(root), str(number)])
        found.append({"number": number, "step": step, **figures, **own})
        print(f"{number:,} captions: {step}: {figures['cpu_s']:.1f} s of CPU", flush=True)
    return found


def show_words(taken: Sequence[dict[str, Any]]) -> None:
    """Print one line for each step over each number of captions; what a step does not measure is 0."""
    empty = dict.fromkeys(("index_mib", "first_ms", "p50_ms", "p99_ms", "filtered_ms"), 0.0)
    show([empty | row | {"mib": row["peak_bytes"] / MIB} for row in taken if row["step"] != "make"], COLUMNS)


def captions_of(number: int, seed: int, vocabulary: int) -> pa.Array:
    """Make captions of ten words."""
    shares = np.cumsum(1 / np.arange(1, vocabulary + 1))
    rng = np.random.default_rng(seed)
    chosen = np.searchsorted(shares, rng.random(number * WORDS_PER_CAPTION) * shares[-1])
    words = pc.binary_join_element_wise("w", pc.cast(pa.array(chosen), pa.string()), "")
    offsets = pa.array(np.arange(number + 1, dtype=np.int32) * WORDS_PER_CAPTION)
    return pc.binary_join(pa.ListArray.from_arrays(offsets, words), " ")


def make(root: Path, number: int, changed_every: int = 0) -> dict[str, Any]:
    """Write a version of the table; the later one has other captions in every so many rows."""
    from embedder.store.files import StoreFiles
    from embedder.store.part_writer import store_part
    from embedder.store.schema import TABLES
    from embedder.store.tables import RecordTable

    files, name, parts = StoreFiles(str(root)), "embeddings", []
    vocabulary = max(1000, number // 20)
    for task, start in enumerate(range(0, number, ROWS_PER_PART)):
        rows = min(ROWS_PER_PART, number - start)
        captions = captions_of(rows, task, vocabulary)
        if changed_every:
            other = captions_of(rows, task + 1_000_000, vocabulary)
            captions = pc.if_else(pa.array(np.arange(start, start + rows) % changed_every == 0), other, captions)
        ids = pc.binary_join_element_wise(
            "pictures/", pc.cast(pa.array(np.arange(start, start + rows)), pa.string()), ""
        )
        table = pa.table({"item_id": ids, "segment": pa.repeat(pa.scalar(0, pa.int32()), rows), "caption": captions})
        path = f"part-20261125T000000Z-{changed_every:06x}-{task:06d}.parquet"
        parts.append(store_part(files, name, path, table, session=""))
    table = RecordTable(files, name)
    return {"version": table.commit_files(f"run{changed_every}", parts, TABLES[name])}


def build(root: Path, number: int) -> dict[str, Any]:
    """Build the index of the first version, and publish that."""
    from embedder.config_toml.index_section import IndexConfig
    from embedder.store.current import move_current
    from embedder.store.files import StoreFiles
    from embedder.store.layout import Current, utc_now
    from embedder.store_index.keep_words import ensure_words

    del number
    files = StoreFiles(str(root))
    ensure_words(files, FIRST, IndexConfig())
    move_current(files, Current(run_id="first", embeddings=FIRST, items=-1, published_at=utc_now()))
    return {"index_mib": index_bytes(root, FIRST) / MIB}


def update(root: Path, number: int) -> dict[str, Any]:
    """Update it with the second version."""
    from embedder.config_toml.index_section import IndexConfig
    from embedder.store.files import StoreFiles
    from embedder.store_index.keep_words import ensure_words

    del number
    ensure_words(StoreFiles(str(root)), SECOND, IndexConfig())
    return {"index_mib": index_bytes(root, SECOND) / MIB}


def draw_lists(root: Path, number: int) -> dict[str, Any]:
    """Write the word index of the second version with drawn lists, and ask it."""
    from embedder.store_index.analyser import RULES, hash_term
    from embedder.store_index.word_index import ROWS_NAME, WordsManifest
    from embedder.store_index.word_parts import WordPart, part_names, sums_of, write_part
    from index.atomic_folder import hash_files

    folder = root / "words" / f"{SECOND:06d}"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    share = WORDS_PER_CAPTION / np.sum(1 / np.arange(1, number // 20 + 1))
    lists = {}
    for rank in range(1, 1 + min(20_000, number // 20)):
        most = min(0.95, share / rank)
        steps = rng.geometric(most, int(number * most * 1.1) + 20)
        docs = np.cumsum(steps) - 1
        lists[hash_term(f"w{rank - 1}")] = docs[docs < number].astype("<u4")
    terms = np.sort(np.array(list(lists), "<u8"))
    starts = np.cumsum([0, *(len(lists[term]) for term in terms.tolist())]).astype("<u8")
    docs = np.concatenate([lists.pop(term) for term in terms.tolist()])
    counts = np.ones(len(docs), "u1")
    lengths = rng.integers(5, 16, number).astype("<u2")
    write_part(folder, 1, WordPart(terms, starts, docs, counts, sums_of(terms, starts, docs, counts), lengths))
    np.arange(number, dtype="<u4").tofile(folder / ROWS_NAME)
    names = [*part_names(1), ROWS_NAME]
    manifest = WordsManifest(
        analyser="unicode",
        rules=RULES,
        embeddings_version=SECOND,
        parts=(1,),
        num_captions=number,
        num_gone=0,
        num_terms=int(lengths.sum(dtype=np.int64)),
        sizes={name: (folder / name).stat().st_size for name in names},
        sha256=hash_files(folder / name for name in names),
        build_s=0,
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    return {"num_postings": len(docs), "index_mib": index_bytes(root, SECOND) / MIB}


def ask(root: Path, number: int) -> dict[str, Any]:
    """Open the updated index, none of whose files is in the page cache, and ask it."""
    from embedder.retrieval.hybrid import CaptionWords
    from embedder.store.files import StoreFiles
    from embedder.store_index.keep_words import open_words

    forget(root / "words" / f"{SECOND:06d}")
    texts = captions_of(NUM_QUERIES, 7, max(1000, number // 20)).to_pylist()
    queries = [" ".join(text.split()[:WORDS_PER_QUERY]) for text in texts]
    started, started_cpu = time.perf_counter(), time.process_time()
    words = CaptionWords(open_words(StoreFiles(str(root)), SECOND))
    words.ranking(queries[0], DEPTH)
    first_ms, first_cpu_ms = 1e3 * (time.perf_counter() - started), 1e3 * (time.process_time() - started_cpu)
    times = [timed(lambda query=query: words.ranking(query, DEPTH)) for query in queries]
    among = np.random.default_rng(1).random(number) < 0.01
    filtered = [timed(lambda query=query: words.ranking(query, DEPTH, among)) for query in queries[:50]]
    held = psutil.Process().memory_info()
    return {
        "first_ms": first_ms,
        "first_cpu_ms": first_cpu_ms,
        "cpu_ms": 1e3 * (time.process_time() - started_cpu) / (1 + NUM_QUERIES + 50),
        "p50_ms": median(times),
        "p99_ms": float(np.quantile(times, 0.99)),
        "filtered_ms": median(filtered),
        "rss_bytes": held.rss,
        "mapped_bytes": held.shared,
        "own_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "index_mib": index_bytes(root, SECOND) / MIB,
    }


def forget(folder: Path) -> None:
    """Drop the files of a folder, and of those in it, from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def index_bytes(root: Path, version: int) -> int:
    """Size of a version's files."""
    return sum(path.stat().st_size for path in (root / "words" / f"{version:06d}").iterdir())


if __name__ == "__main__":
    step, folder, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    steps = {
        "make": make,
        "change": lambda root, number: make(root, number, CHANGED_EVERY),
        "build": build,
        "update": update,
        "ask": ask,
        "lists": draw_lists,
    }
    print(json.dumps(steps[step](folder, size)))
