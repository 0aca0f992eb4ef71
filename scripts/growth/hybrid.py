"""What a hybrid search takes in a process that may hold 1 GiB: to open a store, to its first answer, and after that.

    python -m growth.hybrid FOLDER NUMBER    # makes the store alone

The store has images whose vectors are drawn, of low rank, as wide as the shipped model's; captions of ten words of a
Zipf distribution, as in `growth.words`; and vectors of a few captions, by which the index is tuned. Queries are three
words of one caption, which the shipped model's query tower encodes; what it makes of such words is of no matter. They
are asked in a cgroup, whose memory has the page cache, too; where none can be made, without a limit.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from large_index_bench.cgroups import memory_group, own_group, run_limited
from large_index_bench.vectors import make_maps, unit

from corpus import DEMO_MODEL, write_config
from growth.made_up import ROWS_PER_PART, as_embedded, publish
from growth.names import take
from growth.words import WORDS_PER_QUERY, captions_of, forget
from harness import EMBEDDER, MIB, show
from shards.config import load_model_config

SERVE_BYTES = 1 << 30
INDEX_ROW_BYTES = 45  # of the vectors' index in memory, so that ten million have 450 MB of the 1 GiB
QUERIES_NAME = "queries.json"
NUM_QUERIES, PAIRS_PER_PART = 200, 64
QUERIES_SEED = 2_000_000  # no part file has it
COLUMNS = {
    "captions": "{number:,}",
    "open s": "{open_s:,.1f}",
    "first answer ms": "{first_ms:,.0f}",
    "p50 ms": "{p50_ms:,.1f}",
    "p99 ms": "{p99_ms:,.1f}",
    "resident MiB": "{rss_mib:,.0f}",
    "of it mapped": "{mapped_mib:,.0f}",
    "peak MiB": "{peak_mib:,.0f}",
    "of the group": "{group_mib:,.0f}",
}


def measure_hybrid(root: Path, number: int) -> list[dict[str, Any]]:
    """Make a store with both indexes, and search it under a limit of memory; gives the figures of each step."""
    found = []
    steps = {
        "make": [sys.executable, "-m", "growth.hybrid", str(root), str(number)],
        "towers": [*EMBEDDER, "export-query-towers", "--store", str(root / "store")],
        "build": [*EMBEDDER, "index", "build", "--config", str(root / "hybrid.toml"), "--json"],
    }
    for step, command in steps.items():
        if (root / f"{step}.json").exists():
            continue
        figures, _ = take(command)
        (root / f"{step}.json").write_text(json.dumps(figures))
        found.append({"number": number, "step": step, **figures})
        print(f"{number:,} captions: {step}: {figures['cpu_s']:.1f} s of CPU", flush=True)
    forget(root / "store")  # pages that another process has read would not count
    asking = ["-m", "growth.asking", str(root / "store"), str(root / QUERIES_NAME)]
    line, group_bytes = run_limited(asking, group(), SERVE_BYTES)
    return [*found, {"number": number, "step": "ask", "group_bytes": group_bytes, **json.loads(line)}]


def group() -> Path | None:
    """Folder in which a group can be made; None where none can."""
    parent = own_group()
    try:
        with memory_group(parent, SERVE_BYTES):
            return parent
    except OSError:
        return None


def show_hybrid(taken: Sequence[dict[str, Any]]) -> None:
    """Print one line for each number of captions."""
    rows = [each for each in taken if each["step"] == "ask"]
    sizes = {"rss_mib": "rss_bytes", "mapped_mib": "mapped_bytes", "peak_mib": "peak_bytes", "group_mib": "group_bytes"}
    show([row | {name: (row[key] or 0) / MIB for name, key in sizes.items()} for row in rows], COLUMNS)


def make(root: Path, number: int) -> None:
    """Publish a store of images with captions, and write the configuration of its indexes, and queries."""
    root.mkdir(parents=True, exist_ok=True)
    texts = captions_of(1 + NUM_QUERIES, QUERIES_SEED, vocabulary(number)).to_pylist()
    (root / QUERIES_NAME).write_text(json.dumps([" ".join(text.split()[:WORDS_PER_QUERY]) for text in texts]))
    index = {"memory_bytes": max(64 << 20, number * INDEX_ROW_BYTES)}
    publish(write_config(root / "hybrid.toml", DEMO_MODEL, root / "store", root, index=index), rows_of(number))


def vocabulary(number: int) -> int:
    """Number of words in so many captions."""
    return max(1000, number // 20)


def rows_of(number: int) -> Iterator[pa.Table]:
    """Rows of images and captions as the last stage hands them over; of some captions with a vector."""
    width = load_model_config(DEMO_MODEL).embedding_dim
    rng = np.random.default_rng(0)
    maps = make_maps("low-rank", width, rng)
    for task, start in enumerate(range(0, number, ROWS_PER_PART)):
        size = min(ROWS_PER_PART, number - start)
        meanings = rng.standard_normal((size, len(maps.meaning)), np.float32)
        looks = rng.standard_normal((size, len(maps.look)), np.float32)
        images, said = unit(meanings @ maps.meaning + looks @ maps.look), unit(meanings @ maps.meaning)[:PAIRS_PER_PART]
        names = [f"pictures/{place:08d}.jpg" for place in range(start, start + size)]
        listed = {"item_id": names, "uri": names, "caption": captions_of(size, task, vocabulary(number))}
        listed |= {"source": pa.repeat("pictures", size), "size_bytes": pa.repeat(pa.scalar(150_000, pa.int64()), size)}
        rows = as_embedded(pa.table(listed | {"modified": pa.nulls(size, pa.float64())}), task)
        type_ = rows.schema.field("image_embedding").type
        text = pa.concat_arrays([vectors_of(said, type_), pa.nulls(size - len(said), type_)])
        columns = {"modality": pa.repeat("image", size), "image_embedding": vectors_of(images, type_)}
        for name, column in (columns | {"text_embedding": text}).items():
            rows = rows.set_column(rows.schema.get_field_index(name), name, column)
        yield rows


def vectors_of(values: np.ndarray, type_: pa.DataType) -> pa.Array:
    """Rows of an array as lists."""
    offsets = pa.array(np.arange(len(values) + 1, dtype=np.int32) * values.shape[1])
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel())).cast(type_)


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
