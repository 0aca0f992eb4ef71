"""Others' indexes of the same vectors, under the same limits: imports nothing of this project, for any interpreter.

    python rivals.py build lancedb FOLDER '{"num_images": 200000, ...}'
    python rivals.py serve lancedb FOLDER '{"num_images": 200000, ...}'

Each is brought to the recall asked for with the first captions, from the cheapest effort up; the others are asked one
at a time. In a limit of memory: `ivfpq`, FAISS's lists of product codes, re-ranked from the mapped file of vectors;
`autofaiss`, what it picks for that memory; `lancedb`. Without: `hnsw`, FAISS's graph, and `usearch`, of 16 bits.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

K = 10
BLOCK = 65_536
NUM_WARMING = 500
NUM_TIMED = 50
LIMITED, UNLIMITED = ("ivfpq", "lancedb", "autofaiss"), ("hnsw", "usearch")

Effort = dict[str, int]
Find = Callable[[np.ndarray, Effort], np.ndarray]
"""One query (E,), effort -> rows (K,)."""


@dataclass(frozen=True)
class Rival:
    """Rival that was opened."""

    find: Find  # finds the nearest rows of one query
    efforts: list[list[Effort]]  # to try, for each depth of re-ranking the cheapest first


def blocks(folder: Path, settings: dict) -> Iterator[np.ndarray]:
    """Images, block by block."""
    width, num_images = settings["width"], settings["num_images"]
    with (folder / "images.f32").open("rb") as file:
        for start in range(0, num_images, BLOCK):
            size = min(BLOCK, num_images - start)
            yield np.frombuffer(file.read(size * width * 4), np.float32).reshape(size, width)


def mapped(folder: Path, settings: dict) -> np.ndarray:
    """Images in their file."""
    import mmap

    shape = (settings["num_images"], settings["width"])
    images = np.memmap(folder / "images.f32", np.float32, "r", shape=shape)
    images._mmap.madvise(mmap.MADV_RANDOM)
    return images


def powers(most: int, least: int = 1) -> list[int]:
    """Powers of two from one number to another, and halves between them."""
    values = {least << n for n in range(40)} | {3 * least << n >> 1 for n in range(40)}
    return sorted(value for value in values if value <= most)


def build_ivfpq(folder: Path, settings: dict) -> str:
    """Build lists of 8-bit product codes, as many bytes as memory allows, after a rotation."""
    import faiss

    width, num_images = settings["width"], settings["num_images"]
    lists = 1 << round(math.log2(2.5 * math.sqrt(num_images)))  # 8,192 of ten million
    most = min(width / 4, settings["index_bytes"] / num_images - 8 if settings["index_bytes"] else width)
    code = max(n for n in range(1, width) if width % n == 0 and (n <= most or n == 1))
    design = f"OPQ{code},IVF{lists},PQ{code}"
    index = faiss.index_factory(width, design, faiss.METRIC_INNER_PRODUCT)
    rotation = faiss.downcast_VectorTransform(index.chain.at(0))
    rotation.niter, rotation.max_train_points = 10, 16_384
    rng, images = np.random.default_rng(0), mapped(folder, settings)
    wanted = min(num_images, 40 * lists, 1 << 18)
    index.train(np.ascontiguousarray(images[np.sort(rng.choice(num_images, wanted, replace=False))]))
    for block in blocks(folder, settings):
        index.add(block)
    faiss.write_index(index, str(folder / "ivfpq.faiss"))
    return f"{design} of FAISS {faiss.__version__}, re-ranked from a mapped file"


def open_ivfpq(folder: Path, settings: dict) -> Rival:
    import faiss

    faiss.omp_set_num_threads(1)
    index, images = faiss.read_index(str(folder / "ivfpq.faiss")), mapped(folder, settings)
    lists = faiss.extract_index_ivf(index)

    def find(query: np.ndarray, effort: Effort) -> np.ndarray:
        wanted = faiss.SearchParametersPreTransform(
            index_params=faiss.SearchParametersIVF(nprobe=min(effort["nprobe"], lists.nlist))
        )
        rows = index.search(query[None], K * effort["factor"], params=wanted)[1][0]
        rows = np.sort(rows[rows >= 0])
        return rows[np.argsort(-(images[rows] @ query), kind="stable")[:K]]

    probes = powers(lists.nlist, 8)
    return Rival(find, [[{"factor": factor, "nprobe": n} for n in probes] for factor in (64, 32, 16, 8, 4)])


def build_autofaiss(folder: Path, settings: dict) -> str:
    """Build what autofaiss picks for the memory, and let it tune that."""
    import faiss
    from autofaiss import build_index, version

    index, _ = build_index(
        np.memmap(folder / "images.f32", np.float32, "r", shape=(settings["num_images"], settings["width"])),
        index_path=str(folder / "autofaiss.faiss"),
        index_infos_path=str(folder / "autofaiss.json"),
        metric_type="ip",
        max_index_memory_usage=f"{(settings['index_bytes'] or settings['build_bytes']) // 1_000_000}MB",
        current_memory_available=f"{settings['build_bytes'] // 1_000_000}MB",
        max_index_query_time_ms=15.0,
    )
    infos = json.loads((folder / "autofaiss.json").read_text())
    del index
    return f"{infos.get('index_key')} of autofaiss {version.__version__}, FAISS {faiss.__version__}"


def open_autofaiss(folder: Path, settings: dict) -> Rival:
    import faiss

    del settings
    faiss.omp_set_num_threads(1)
    index = faiss.read_index(str(folder / "autofaiss.faiss"))
    space = faiss.ParameterSpace()
    key = "efSearch" if isinstance(faiss.downcast_index(index), faiss.IndexHNSW) else "nprobe"
    most = 16_384 if key == "efSearch" else faiss.extract_index_ivf(index).nlist

    def find(query: np.ndarray, effort: Effort) -> np.ndarray:
        space.set_index_parameter(index, key, effort[key])
        return index.search(query[None], K)[1][0]

    return Rival(find, [[{key: value} for value in powers(most, 16)]])


def build_hnsw(folder: Path, settings: dict) -> str:
    """Build a graph of float32 vectors."""
    import faiss

    index = faiss.index_factory(settings["width"], "HNSW32", faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 100
    for block in blocks(folder, settings):
        index.add(block)
    faiss.write_index(index, str(folder / "hnsw.faiss"))
    return f"HNSW32 of FAISS {faiss.__version__}"


def open_hnsw(folder: Path, settings: dict) -> Rival:
    import faiss

    del settings
    faiss.omp_set_num_threads(1)
    index = faiss.read_index(str(folder / "hnsw.faiss"))

    def find(query: np.ndarray, effort: Effort) -> np.ndarray:
        return index.search(query[None], K, params=faiss.SearchParametersHNSW(efSearch=effort["ef"]))[1][0]

    return Rival(find, [[{"ef": value} for value in powers(16_384, 16)]])


def build_usearch(folder: Path, settings: dict) -> str:
    """Build a graph of vectors in 16 bits."""
    import usearch
    from usearch.index import Index

    index = Index(ndim=settings["width"], metric="ip", dtype="f16")
    start = 0
    for block in blocks(folder, settings):
        index.add(np.arange(start, start + len(block)), block)
        start += len(block)
    index.save(str(folder / "usearch.index"))
    return f"usearch {usearch.__version__}, f16"


def open_usearch(folder: Path, settings: dict) -> Rival:
    from usearch.index import Index

    del settings
    index = Index.restore(str(folder / "usearch.index"))

    def find(query: np.ndarray, effort: Effort) -> np.ndarray:
        if index.expansion_search != effort["expansion"]:
            index.expansion_search = effort["expansion"]
        return index.search(query, K, threads=1).keys.astype(np.int64)

    return Rival(find, [[{"expansion": value} for value in powers(16_384, 16)]])


def build_lancedb(folder: Path, settings: dict) -> str:
    """Write a dataset, and lists of product codes in it, as many as its makers' rule gives."""
    import lance
    import pyarrow as pa

    width, num_images = settings["width"], settings["num_images"]
    schema = pa.schema([pa.field("vector", pa.list_(pa.float32(), width))])

    def batches() -> Iterator[pa.RecordBatch]:
        for block in blocks(folder, settings):
            column = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), width)
            yield pa.record_batch([column], schema=schema)

    data = lance.write_dataset(batches(), str(folder / "lance"), schema=schema, mode="overwrite")
    partitions = max(1, round(math.sqrt(num_images)))
    data.create_index(
        "vector", "IVF_PQ", metric="dot", num_partitions=partitions, num_sub_vectors=width // 4, replace=True
    )
    return f"IVF_PQ of Lance {lance.__version__}, {partitions} partitions, {width // 4} sub-vectors"


def open_lancedb(folder: Path, settings: dict) -> Rival:
    import lance

    data = lance.dataset(str(folder / "lance"))
    most = max(1, round(math.sqrt(settings["num_images"])))

    def find(query: np.ndarray, effort: Effort) -> np.ndarray:
        nearest = {"column": "vector", "q": query, "k": K, "nprobes": effort["nprobe"]}
        table = data.to_table(
            columns=["_rowid", "_distance"], nearest=nearest | {"refine_factor": effort["factor"]}, with_row_id=True
        )
        numbers = table["_rowid"].to_numpy()
        # A row's number is that of its fragment, and its place there; fragments have 1,048,576 rows.
        return ((numbers >> 32) << 20) + (numbers & 0xFFFFFFFF)

    probes = powers(most, 8)
    return Rival(find, [[{"factor": factor, "nprobe": n} for n in probes] for factor in (64, 32, 16, 8, 4)])


def recall(found: np.ndarray, exact: np.ndarray) -> float:
    """Share of the exact rows that were found."""
    pairs = zip(found.tolist(), exact.tolist(), strict=True)
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in pairs]))


def ask(rival: Rival, queries: np.ndarray, effort: Effort) -> tuple[np.ndarray, np.ndarray]:
    """Ask one query after the other: rows (Q, K), -1 where there were fewer, and milliseconds (Q,)."""
    rows, times = np.full((len(queries), K), -1, np.int64), np.empty(len(queries))
    for number, query in enumerate(queries):
        started = time.perf_counter()
        found = rival.find(query, effort)
        times[number] = (time.perf_counter() - started) * 1000
        rows[number, : len(found)] = found
    return rows, times


def tune(rival: Rival, queries: np.ndarray, exact: np.ndarray, target: float) -> tuple[Effort, float]:
    """Find the fastest effort that reaches a recall, or the one of the highest recall.

    The deepest re-ranking comes first: where it misses the recall at all efforts, so do others.
    """
    reached: list[tuple[float, Effort, float]] = []
    best: tuple[float, Effort] = (-1.0, rival.efforts[0][-1])
    first = 0
    for efforts in rival.efforts:
        for place in range(min(first, len(efforts) - 1), len(efforts)):
            rows, times = ask(rival, queries[:NUM_TIMED], efforts[place])
            found = recall(rows, exact[:NUM_TIMED])
            if found >= target - 0.03:  # of few queries, so it may be a little below
                rows, times = ask(rival, queries, efforts[place])
                found = recall(rows, exact)
            best = max(best, (found, efforts[place]), key=lambda each: each[0])
            if found >= target:
                reached.append((float(np.median(times)), efforts[place], found))
                first = place
                break
        else:
            break
    if not reached:
        return best[1], best[0]
    _, effort, found = min(reached, key=lambda each: each[0])
    return effort, found


def serve(name: str, folder: Path, settings: dict) -> dict:
    """Open a rival, bring it to the recall, and ask the captions that it was not tuned with, one at a time."""
    rival = OPENED[name](folder, settings)
    queries, exact = np.load(folder / "captions.npy")[: settings["num_held_out"]], np.load(folder / "exact.npy")
    effort = settings.get("effort")
    if effort is None:
        effort, _ = tune(rival, queries[:NUM_WARMING], exact[:NUM_WARMING], settings["recall"])
    ask(rival, queries[:NUM_WARMING], effort)
    rows, times = ask(rival, queries[NUM_WARMING:], effort)
    shares = {f"p{share}_ms": round(float(np.percentile(times, share)), 3) for share in (50, 99)}
    found = {"effort": effort, "recall_at_10": round(recall(rows, exact[NUM_WARMING:]), 4)}
    return found | shares | {"queries_per_s": round(1000 * len(times) / float(times.sum()), 1)} | memory()


def build(name: str, folder: Path, settings: dict) -> dict:
    """Build a rival."""
    started, cpu_started = time.perf_counter(), time.process_time()
    found: dict = {"design": BUILT[name](folder, settings)}
    found |= {"build_s": round(time.perf_counter() - started, 1)}
    return found | {"build_cpu_s": round(time.process_time() - cpu_started, 1)} | memory()


def memory() -> dict[str, int]:
    """Memory of this process: its own now, and the most that was resident."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(status[name].split()[0]) for name in ("VmHWM", "RssAnon")}
    return {"peak_rss_bytes": kib["VmHWM"] * 1024, "own_bytes": kib["RssAnon"] * 1024}


BUILT = {
    "ivfpq": build_ivfpq,
    "autofaiss": build_autofaiss,
    "lancedb": build_lancedb,
    "hnsw": build_hnsw,
    "usearch": build_usearch,
}
OPENED = {
    "ivfpq": open_ivfpq,
    "autofaiss": open_autofaiss,
    "lancedb": open_lancedb,
    "hnsw": open_hnsw,
    "usearch": open_usearch,
}

if __name__ == "__main__":
    step, name, folder, settings = sys.argv[1:]
    print(f"\n{json.dumps({'build': build, 'serve': serve}[step](name, Path(folder), json.loads(settings)))}")
