"""Another library's index of a folder's images: built, saved, opened in a fresh process and measured on one thread.

    PYTHON scripts/retrieval_peers.py PEER FOLDER K     # PYTHON: an interpreter that has the library

Imports nothing of this project. The folder has `images.npy` and `held_out.npy`, which is asked; `exact.npy`, the rows
nearest to each of these; and `captions.npy`, to learn from. An index that is there is not built again. Prints one
JSON document: a curve over search efforts, memory, seconds to build, and the library's version.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

Find = Callable[[np.ndarray, int, Any], np.ndarray]
"""Queries (Q, E), k and an effort -> rows (Q, k); a row of -1 for none."""
EFFORTS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
PROBES = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CANDIDATES = (40, 160, 640)  # to re-rank
BATCH, NUM_SINGLE = 64, 128
ENOUGH, LEAST_TIMED, LONGEST_MS = 0.995, 0.85, 30.0
LINKS, EF_CONSTRUCTION = 32, 200


@dataclass(frozen=True)
class Peer:
    """Kind of index of another library; `efforts` of `open` are searched with in turn, list after list."""

    package: str
    design: str
    build: Callable[[np.ndarray, np.ndarray, Path], None]
    """Images and captions -> files in a folder."""
    open: Callable[[Path, int], Find]
    """The folder and its number of images -> how it is searched."""
    efforts: Callable[[int], Sequence[Sequence[Any]]]
    """k -> lists of efforts, each of which rises."""


def curve(find: Find, efforts: Sequence[Sequence[Any]], folder: Path, k: int) -> list[dict]:
    """Recall by score, milliseconds of a query asked alone, and queries a second of batches, of rising efforts."""
    images, queries = np.load(folder / "images.npy", mmap_mode="r"), np.load(folder / "held_out.npy")
    last = np.einsum("qe,qe->q", images[np.load(folder / "exact.npy")[:, k - 1]], queries)
    points = []
    for rising in efforts:
        before = -1.0
        for effort in rising:
            first = find(queries[:BATCH], k, effort).astype(np.int64)
            if recall_by_score(first, images, queries[:BATCH], last[:BATCH]) < LEAST_TIMED - 0.1:
                continue
            rows, seconds = [], []
            for start in range(0, len(queries), BATCH):
                started = time.perf_counter()
                rows.append(find(queries[start : start + BATCH], k, effort))
                seconds.append((time.perf_counter() - started) / len(rows[-1]))
            found = recall_by_score(np.concatenate(rows).astype(np.int64), images, queries, last)
            if found >= LEAST_TIMED:
                ms = median(single_ms(find, queries[:NUM_SINGLE], k, effort))
                points.append({"effort": effort, "recall": found, "batch_per_s": 1 / median(seconds), "ms": ms})
            if found >= ENOUGH or found - before < 1e-4 or median(seconds) * 1000 > LONGEST_MS:
                break
            before = found
    return points


def single_ms(find: Find, queries: np.ndarray, k: int, effort: Any) -> Iterator[float]:
    for number in range(len(queries)):
        started = time.perf_counter()
        find(queries[number : number + 1], k, effort)
        yield (time.perf_counter() - started) * 1000


def recall_by_score(rows: np.ndarray, images: np.ndarray, queries: np.ndarray, last: np.ndarray) -> float:
    """Share of the k that are at least as near as the exact k-th (with a score of `last`), each row counted once."""
    rows = np.sort(rows, axis=1)
    is_found = (rows >= 0) & (np.diff(rows, axis=1, prepend=-1) != 0)
    scores = np.einsum("qke,qe->qk", images[np.maximum(rows, 0)], queries)
    return float(np.mean(is_found & (scores >= last[:, None] - 1e-6)))


def count_lists(num_images: int) -> int:
    """Four times the root, as a power of two; at most one for every eight images."""
    return int(2 ** round(np.log2(min(4 * num_images**0.5, num_images / 8))))


def lists_and_candidates(k: int) -> list[list[tuple[int, int]]]:
    counts = [max(count, k) for count in CANDIDATES if count >= k]
    return [[(probes, count) for probes in PROBES] for count in counts]


def of_faiss(design: str) -> Peer:
    """Kind of index of FAISS, by its factory string; `{lists}` and `{half}`, of the dimensions, are filled in."""
    import_faiss = __import__  # heavy, and not in each environment

    def build(images: np.ndarray, _: np.ndarray, path: Path) -> None:
        faiss = import_faiss("faiss")
        dim = images.shape[1]
        factory = design.format(lists=count_lists(len(images)), half=dim // 2)
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        if "HNSW" in design:
            index.hnsw.efConstruction = EF_CONSTRUCTION
        index.train(images)
        index.add(images)
        faiss.write_index(index, str(path / "index.faiss"))

    def efforts(k: int) -> list[list[str]]:
        if "HNSW" in design:
            return [[f"efSearch={effort}" for effort in EFFORTS if effort >= k]]
        if "R" not in design.rpartition(",")[2].replace("RaBitQ", ""):
            return [[f"nprobe={probes}" for probes in PROBES]]
        return [[f"nprobe={p},k_factor_rf={c / k:g}" for p, c in each] for each in lists_and_candidates(k)]

    return Peer("faiss-cpu", design, build, open_faiss, efforts)


def open_faiss(path: Path, _: int) -> Find:
    import faiss

    index, space, now = faiss.read_index(str(path / "index.faiss")), faiss.ParameterSpace(), [""]

    def find(queries: np.ndarray, k: int, effort: str) -> np.ndarray:
        if effort != now[0]:
            space.set_index_parameters(index, effort)
            now[0] = effort
        return index.search(queries, k)[1]

    return find


def build_autofaiss(images: np.ndarray, _: np.ndarray, path: Path) -> None:
    import faiss
    from autofaiss import build_index

    index, _infos = build_index(
        images, save_on_disk=False, metric_type="ip", max_index_memory_usage="4GB", current_memory_available="8GB",
        max_index_query_time_ms=10.0, nb_cores=1,
    )  # fmt: skip
    faiss.write_index(index, str(path / "index.faiss"))


def graph_efforts(k: int) -> list[list[int]]:
    return [[effort for effort in EFFORTS if effort >= k]]


def of_svs(kind: str) -> Peer:
    """Vamana graph of Intel's SVS: over half floats, LVQ codes, or projections that were learnt with captions."""

    def build(images: np.ndarray, captions: np.ndarray, path: Path) -> None:
        import svs

        data: Any = images.astype(np.float16)
        if kind != "float16":
            svs.write_vecs(images, str(path / "vectors.fvecs"))
            file, half = svs.VectorDataLoader(str(path / "vectors.fvecs"), svs.DataType.float32), images.shape[1] // 2
            data = svs.LVQLoader(file, 4, 8)
            if kind == "LeanVec OOD":
                lvq8, matrices = svs.LeanVecKind.lvq8, svs.compute_leanvec_matrices(images[:100_000], captions, half)
                data = svs.LeanVecLoader(file, half, lvq8, lvq8, *matrices)
        graph = svs.VamanaBuildParameters(alpha=0.95, graph_max_degree=2 * LINKS, window_size=EF_CONSTRUCTION)
        index = svs.Vamana.build(graph, data, svs.DistanceType.MIP, num_threads=1)
        index.save(*(str(path / name) for name in ("config", "graph", "data")))
        (path / "vectors.fvecs").unlink(missing_ok=True)

    def open_index(path: Path, _: int) -> Find:
        import svs

        loaders = {"LVQ4x8": svs.LVQLoader, "LeanVec OOD": svs.LeanVecLoader}
        loader = loaders.get(kind, lambda name: svs.VectorDataLoader(name, svs.DataType.float16))
        graph, data = svs.GraphLoader(str(path / "graph")), loader(str(path / "data"))
        index = svs.Vamana(str(path / "config"), graph, data, svs.DistanceType.MIP, num_threads=1)

        def find(queries: np.ndarray, k: int, effort: int) -> np.ndarray:
            if index.search_window_size != effort:
                index.search_window_size = effort
            return index.search(queries, k)[0]

        return find

    return Peer("scalable-vs", f"Vamana{2 * LINKS}, {kind}", build, open_index, graph_efforts)


def of_usearch(dtype: str) -> Peer:
    def build(images: np.ndarray, _: np.ndarray, path: Path) -> None:
        from usearch.index import Index

        kind = {"dtype": dtype, "connectivity": LINKS, "expansion_add": EF_CONSTRUCTION}
        index = Index(ndim=images.shape[1], metric="cos", **kind)
        index.add(np.arange(len(images)), images, threads=1)
        index.save(str(path / "index.usearch"))

    def open_index(path: Path, _: int) -> Find:
        from usearch.index import Index

        index = Index.restore(str(path / "index.usearch"))

        def find(queries: np.ndarray, k: int, effort: int) -> np.ndarray:
            index.expansion_search = effort
            return index.search(queries, k, threads=1).keys.reshape(len(queries), k)

        return find

    return Peer("usearch", f"HNSW{LINKS}, {dtype}", build, open_index, graph_efforts)


def build_hnswlib(images: np.ndarray, _: np.ndarray, path: Path) -> None:
    import hnswlib

    index = hnswlib.Index("ip", images.shape[1])
    index.init_index(len(images), EF_CONSTRUCTION, LINKS)
    index.add_items(images, num_threads=1)
    index.save_index(str(path / f"{images.shape[1]}.hnsw"))


def open_hnswlib(path: Path, _: int) -> Find:
    import hnswlib

    file = next(path.glob("*.hnsw"))
    index = hnswlib.Index("ip", int(file.stem))
    index.load_index(str(file))

    def find(queries: np.ndarray, k: int, effort: int) -> np.ndarray:
        index.set_ef(effort)
        return index.knn_query(queries, k, num_threads=1)[0].astype(np.int64)

    return find


def of_scann(kept: str) -> Peer:
    def build(images: np.ndarray, _: np.ndarray, path: Path) -> None:
        from scann import ReorderType, scann_ops_pybind

        lists = count_lists(len(images))
        builder = scann_ops_pybind.builder(images, 10, "dot_product")
        builder = builder.tree(lists, lists // 10, training_sample_size=min(len(images), 250_000))
        builder = builder.score_ah(2, anisotropic_quantization_threshold=0.2)
        builder.reorder(100, quantize=ReorderType[kept]).build().serialize(str(path))

    def open_index(path: Path, _: int) -> Find:
        from scann import scann_ops_pybind

        index = scann_ops_pybind.load_searcher(str(path))

        def find(queries: np.ndarray, k: int, effort: tuple[int, int]) -> np.ndarray:
            if len(queries) == 1:
                return index.search(queries[0], k, effort[1], effort[0])[0][None]
            return np.asarray(index.search_batched(queries, k, effort[1], effort[0])[0])

        return find

    return Peer("scann", f"tree, AH2, reorder {kept.lower()}", build, open_index, lists_and_candidates)


def of_rabitq(bits: int) -> Peer:
    def build(images: np.ndarray, _: np.ndarray, path: Path) -> None:
        import faiss
        import rabitqlib

        lists, dim = count_lists(len(images)), images.shape[1]
        means = faiss.Kmeans(dim, lists, niter=10, seed=1)
        means.train(images)
        nearest = means.index.search(images, 1)[1][:, 0].astype(np.uint32)
        index = rabitqlib.IvfIndex(dim, len(images), lists, bits, "ip")
        index.build(images, means.centroids, nearest, 1)
        index.save(str(path / "index.rabitq"))

    def open_index(path: Path, _: int) -> Find:
        import rabitqlib

        index = rabitqlib.IvfIndex.load(str(path / "index.rabitq"))
        return lambda queries, k, effort: index.search(queries, k, effort)[0].astype(np.int64)

    return Peer("rabitqlib", f"IVF, {bits} bits", build, open_index, lambda k: [PROBES])


def build_symphony(images: np.ndarray, _: np.ndarray, path: Path) -> None:
    import rabitqlib

    index = rabitqlib.SymqgIndex(images.shape[1], LINKS, "ip")
    index.build(images, EF_CONSTRUCTION, 1)
    index.save(str(path / "index.symqg"))


def open_symphony(path: Path, _: int) -> Find:
    import rabitqlib

    index = rabitqlib.SymqgIndex.load(str(path / "index.symqg"))
    return lambda queries, k, effort: index.search_batch(queries, k, effort)[0].astype(np.int64)


def of_lorann(share: float) -> Peer:
    """Lists with learnt scoring; clusters of all dimensions (advised below 200), or of a share of these."""

    def build(images: np.ndarray, captions: np.ndarray, path: Path) -> None:
        import lorann

        width = None if share == 1 else max(1, round(share * images.shape[1] / 32)) * 32
        index = lorann.LorannIndex(images, count_lists(len(images)), width, 8, distance=lorann.IP)
        index.build(n_threads=1, training_queries=captions)
        index.save(str(path / "index.lorann"))

    return Peer("lorann", f"8 bits, {share:.0%} of the dimensions", build, open_lorann, lists_and_candidates)


def open_lorann(path: Path, _: int) -> Find:
    import lorann

    index = lorann.LorannIndex.load(str(path / "index.lorann"))

    def find(queries: np.ndarray, k: int, effort: tuple[int, int]) -> np.ndarray:
        return np.asarray(index.search(queries, k, *effort, n_threads=1)).reshape(len(queries), k)

    return find


def build_lance(images: np.ndarray, _: np.ndarray, path: Path) -> None:
    import lancedb
    import pyarrow as pa

    dim = images.shape[1]
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(images.ravel()), dim)
    table = lancedb.connect(path).create_table("images", pa.table({"row": np.arange(len(images)), "vector": vectors}))
    lists = count_lists(len(images))
    table.create_index("dot", num_partitions=lists, num_sub_vectors=dim // 4, vector_column_name="vector")


def lance_efforts(k: int) -> list[list[tuple[int, int]]]:
    return [[(probes, max(count, k)) for probes in (8, 32, 128, 512)] for count in CANDIDATES]  # each takes seconds


def open_lance(path: Path, _: int) -> Find:
    import lancedb

    table = lancedb.connect(path).open_table("images")

    def find_one(query: np.ndarray, k: int, effort: tuple[int, int]) -> np.ndarray:
        asked = table.search(query).distance_type("dot").nprobes(effort[0]).refine_factor(max(1, effort[1] // k))
        rows = asked.limit(k).select(["row", "_distance"]).to_arrow()["row"].to_numpy()
        return np.pad(rows, (0, k - len(rows)), constant_values=-1)

    return lambda queries, k, effort: np.stack([find_one(query, k, effort) for query in queries])


PEERS = {
    "faiss-pq-fast-scan": of_faiss("IVF{lists},PQ{half}x4fs,RFlat"),
    "faiss-pq-fast-scan-sq8": of_faiss("IVF{lists},PQ{half}x4fs,Refine(SQ8)"),
    "faiss-rabitq-fast-scan": of_faiss("IVF{lists},RaBitQfs,Refine(SQ8)"),
    "faiss-rabitq-4-bits": of_faiss("IVF{lists},RaBitQfs4,Refine(SQ8)"),
    "faiss-sq-fast-scan": of_faiss("IVF{lists},SQ8fs"),
    "faiss-hnsw": of_faiss(f"HNSW{LINKS}"),
    "scann": of_scann("FLOAT32"),
    "scann-int8": of_scann("INT8"),
    "lorann": of_lorann(1),
    "lorann-half": of_lorann(0.5),
    "rabitqlib-5-bits": of_rabitq(5),
    "rabitqlib-8-bits": of_rabitq(8),
    "svs-leanvec": of_svs("LeanVec OOD"),
    "svs-lvq": of_svs("LVQ4x8"),
    "svs-float16": of_svs("float16"),
    "symphony-qg": Peer("rabitqlib", f"SymphonyQG{LINKS}", build_symphony, open_symphony, graph_efforts),
    "usearch-f16": of_usearch("f16"),
    "usearch-i8": of_usearch("i8"),
    "hnswlib": Peer("hnswlib", f"HNSW{LINKS}", build_hnswlib, open_hnswlib, graph_efforts),
    "autofaiss": Peer("autofaiss", "its pick", build_autofaiss, open_faiss, of_faiss("HNSW").efforts),
    "lancedb": Peer("lancedb", "IVF_PQ, refined", build_lance, open_lance, lance_efforts),
}


def main() -> None:
    peer, folder, k = PEERS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3])
    path = folder / sys.argv[1]
    if sys.argv[4:] == ["opened"]:
        print(json.dumps(measure(peer, path, folder, k)))
        return
    found = {"version": f"{peer.package} {version(peer.package)}", "design": peer.design}
    if not (path / "built.json").exists():
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        images, captions = np.load(folder / "images.npy"), np.load(folder / "captions.npy")
        started = time.perf_counter()
        peer.build(images, captions, path)
        (path / "built.json").write_text(json.dumps({"build_s": time.perf_counter() - started}))
    found |= json.loads((path / "built.json").read_text())
    done = subprocess.run([sys.executable, *sys.argv, "opened"], check=True, stdout=subprocess.PIPE, text=True)
    print(json.dumps(found | json.loads(done.stdout.splitlines()[-1])))


def measure(peer: Peer, path: Path, folder: Path, k: int) -> dict:
    """Open an index in this fresh process, and measure; its memory is what that and a batch of searches take."""
    queries = np.load(folder / "held_out.npy")
    __import__({"faiss-cpu": "faiss", "scalable-vs": "svs", "autofaiss": "faiss"}.get(peer.package, peer.package))
    efforts = peer.efforts(k)
    before = psutil.Process().memory_info().rss
    find = peer.open(path, len(np.load(folder / "images.npy", mmap_mode="r")))
    find(queries[:BATCH], k, efforts[-1][len(efforts[-1]) // 2])
    held = psutil.Process().memory_info().rss - before
    if peer.package != "lancedb":  # which reads files in part; the others may hold what this process had freed
        held = max(held, sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
    return {"bytes": held, "curve": curve(find, efforts, folder, k)}


if __name__ == "__main__":
    main()
