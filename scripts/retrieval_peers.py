"""Another library's index of a folder's images: built, saved, opened in a fresh process and measured on one thread.

    PYTHON scripts/retrieval_peers.py PEER FOLDER K     # PYTHON: an interpreter that has the library

Imports nothing of this project. The folder has `images.npy` and `held_out.npy`, which is asked; `exact.npy`, the rows
nearest to each of these; and `captions.npy`, to learn from. An index that is there is not built again. Prints one
JSON document: a curve over search efforts, memory, seconds to build, and the library's version.
"""

import importlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

Find = Callable[[np.ndarray, int, Any], np.ndarray]
"""Queries (Q, E), k and an effort -> rows (Q, k); a row of -1 for none."""
Opened = tuple[Callable[[Any], Any], Find]
"""Sets an effort, before the clock starts (`str` does nothing), and finds with it."""
EFFORTS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
PROBES = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CANDIDATES = (40, 160, 640)  # to re-rank
BATCH, NUM_SINGLE = 64, 128
ENOUGH, LEAST_GAIN, LEAST_TIMED, LONGEST_MS = 0.995, 1e-4, 0.85, 30.0
LINKS, EF_CONSTRUCTION = 32, 200


@dataclass(frozen=True)
class Peer:
    """Kind of index of another library, in its own folder."""

    module: str
    design: str
    build: Callable[[Any, np.ndarray, np.ndarray, Path], None]  # with the module, of images and captions
    open: Callable[[Any, Path], Opened]
    efforts: Callable[[int], Sequence[Sequence[Any]]]  # by k: lists, each from the least to the most
    package: str = ""  # where it isn't named as the module is


def curve(opened: Opened, efforts: Sequence[Sequence[Any]], folder: Path, k: int) -> list[dict]:
    """Recall by score, milliseconds of CPU of a single query, and of one in a batch, by rising efforts."""
    images, queries = np.load(folder / "images.npy", mmap_mode="r"), np.load(folder / "held_out.npy")
    last = np.einsum("qe,qe->q", images[np.load(folder / "exact.npy")[:, k - 1]], queries)
    points, (set_effort, find) = [], opened
    for rising in efforts:
        before = -1.0
        for effort in rising:
            set_effort(effort)
            first = find(queries[:BATCH], k, effort)
            if recall_by_score(first, images, queries[:BATCH], last[:BATCH]) < LEAST_TIMED - 0.1:
                continue
            rows, seconds = timed(find, queries, k, effort, BATCH)
            found = recall_by_score(rows, images, queries, last)
            if found >= LEAST_TIMED:
                ms = median(timed(find, queries[:NUM_SINGLE], k, effort, 1)[1]) * 1000
                batch_ms = median(seconds) * 1000 / BATCH
                points.append({"effort": effort, "recall": found, "ms": ms, "batch_ms": batch_ms})
            if found >= ENOUGH or found - before < LEAST_GAIN or median(seconds) * 1000 > BATCH * LONGEST_MS:
                break
            before = found
    return points


def timed(find: Find, queries: np.ndarray, k: int, effort: Any, size: int) -> tuple[np.ndarray, list[float]]:
    """Rows that are found, and the seconds of CPU of each batch of a size, which no other job lengthens."""
    rows, seconds = [], []
    for start in range(0, len(queries), size):
        started = time.process_time()
        found = find(queries[start : start + size], k, effort)
        seconds.append(time.process_time() - started)
        rows.append(found)
    return np.concatenate(rows), seconds


def recall_by_score(rows: np.ndarray, images: np.ndarray, queries: np.ndarray, last: np.ndarray) -> float:
    """Share of the k that are at least as near as the exact k-th (with a score of `last`), each row counted once."""
    rows = np.sort(np.asarray(rows).astype(np.int64), axis=1)
    is_found = (rows >= 0) & (np.diff(rows, axis=1, prepend=-1) != 0)
    scores = np.einsum("qke,qe->qk", images[np.maximum(rows, 0)], queries)
    return float(np.mean(is_found & (scores >= last[:, None] - 1e-6)))


def count_lists(num_images: int) -> int:
    """Four times the root, as a power of two; at most one for every eight images."""
    return int(2 ** round(np.log2(min(4 * num_images**0.5, num_images / 8))))


def of_graph(k: int) -> list[list[int]]:
    return [[effort for effort in EFFORTS if effort >= k]]


def of_lists(k: int) -> list[list[tuple[int, int]]]:
    """Lists to search and candidates to re-rank."""
    return [[(probes, count) for probes in PROBES] for count in CANDIDATES if count >= k]


def faiss_peer(design: str) -> Peer:
    """FAISS by its factory string, in which the number of lists and half that of dimensions are filled in."""

    def build(faiss: Any, images: np.ndarray, _: np.ndarray, path: Path) -> None:
        dim = images.shape[1]
        factory = design.format(lists=count_lists(len(images)), half=dim // 2)
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        if "HNSW" in design:
            index.hnsw.efConstruction = EF_CONSTRUCTION
        index.train(images)
        index.add(images)
        faiss.write_index(index, str(path / "index"))

    def efforts(k: int) -> list[list[str]]:
        if "HNSW" in design:
            return [[f"efSearch={effort}" for effort in of_graph(k)[0]]]
        return [[f"nprobe={probes},k_factor_rf={count / k:g}" for probes, count in each] for each in of_lists(k)]

    return Peer("faiss", design, build, open_faiss, efforts, "faiss-cpu")


def open_faiss(faiss: Any, path: Path) -> Opened:
    index = faiss.read_index(str(path / "index"))
    return partial(faiss.ParameterSpace().set_index_parameters, index), lambda asked, k, _: index.search(asked, k)[1]


def build_autofaiss(_: Any, images: np.ndarray, _captions: np.ndarray, path: Path) -> None:
    from autofaiss import build_index

    build_index(
        images, index_path=str(path / "index"), index_infos_path=str(path / "infos.json"), metric_type="ip",
        max_index_memory_usage="4GB", current_memory_available="8GB", max_index_query_time_ms=10.0, nb_cores=1,
    )  # fmt: skip


def svs_peer(kind: str) -> Peer:
    """Vamana graph of Intel's SVS: over half floats, LVQ codes, or projections that were learnt with captions."""

    def build(svs: Any, images: np.ndarray, captions: np.ndarray, path: Path) -> None:
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

    def open_index(svs: Any, path: Path) -> Opened:
        loaders = {"LVQ4x8": svs.LVQLoader, "LeanVec OOD": svs.LeanVecLoader}
        loader = loaders.get(kind, lambda name: svs.VectorDataLoader(name, svs.DataType.float16))
        graph, data = svs.GraphLoader(str(path / "graph")), loader(str(path / "data"))
        index = svs.Vamana(str(path / "config"), graph, data, svs.DistanceType.MIP, num_threads=1)
        return partial(setattr, index, "search_window_size"), lambda queries, k, _: index.search(queries, k)[0]

    return Peer("svs", f"Vamana{2 * LINKS}, {kind}", build, open_index, of_graph, "scalable-vs")


def usearch_peer(dtype: str) -> Peer:
    def build(usearch: Any, images: np.ndarray, _: np.ndarray, path: Path) -> None:
        dim, options = images.shape[1], {"dtype": dtype, "connectivity": LINKS, "expansion_add": EF_CONSTRUCTION}
        index = usearch.Index(ndim=dim, metric="cos", **options)
        index.add(np.arange(len(images)), images, threads=1)
        index.save(str(path / "index"))

    def open_index(usearch: Any, path: Path) -> Opened:
        index = usearch.Index.restore(str(path / "index"))
        search = partial(index.search, threads=1)
        return partial(setattr, index, "expansion_search"), lambda queries, k, _: search(queries, k).keys.reshape(-1, k)

    return Peer("usearch.index", f"HNSW{LINKS}, {dtype}", build, open_index, of_graph, "usearch")


def build_hnswlib(hnswlib: Any, images: np.ndarray, _: np.ndarray, path: Path) -> None:
    index = hnswlib.Index("ip", images.shape[1])
    index.init_index(len(images), EF_CONSTRUCTION, LINKS)
    index.add_items(images, num_threads=1)
    index.save_index(str(path / f"{images.shape[1]}.hnsw"))


def open_hnswlib(hnswlib: Any, path: Path) -> Opened:
    file = next(path.glob("*.hnsw"))
    index = hnswlib.Index("ip", int(file.stem))
    index.load_index(str(file))
    return index.set_ef, lambda queries, k, _: index.knn_query(queries, k, num_threads=1)[0]


def scann_peer(kept: str) -> Peer:
    def build(scann: Any, images: np.ndarray, _: np.ndarray, path: Path) -> None:
        lists = count_lists(len(images))
        builder = scann.scann_ops_pybind.builder(images, 10, "dot_product")
        builder = builder.tree(lists, lists // 10, training_sample_size=min(len(images), 250_000))
        builder = builder.score_ah(2, anisotropic_quantization_threshold=0.2)
        builder.reorder(100, quantize=scann.ReorderType[kept]).build().serialize(str(path))

    def open_index(scann: Any, path: Path) -> Opened:
        index = scann.scann_ops_pybind.load_searcher(str(path))

        def find(queries: np.ndarray, k: int, effort: tuple[int, int]) -> np.ndarray:
            if len(queries) == 1:
                return index.search(queries[0], k, effort[1], effort[0])[0][None]
            return index.search_batched(queries, k, effort[1], effort[0])[0]

        return str, find

    return Peer("scann", f"tree, AH2, reorder {kept.lower()}", build, open_index, of_lists)


def rabitq_peer(bits: int) -> Peer:
    def build(rabitqlib: Any, images: np.ndarray, _: np.ndarray, path: Path) -> None:
        import faiss

        lists, dim = count_lists(len(images)), images.shape[1]
        means = faiss.Kmeans(dim, lists, niter=10, seed=1)
        means.train(images)
        nearest = means.index.search(images, 1)[1][:, 0].astype(np.uint32)
        index = rabitqlib.IvfIndex(dim, len(images), lists, bits, "ip")
        index.build(images, means.centroids, nearest, 1)
        index.save(str(path / "index"))

    def open_index(rabitqlib: Any, path: Path) -> Opened:
        index = rabitqlib.IvfIndex.load(str(path / "index"))
        return str, lambda queries, k, effort: index.search(queries, k, effort)[0]

    return Peer("rabitqlib", f"IVF, {bits} bits", build, open_index, lambda _: [PROBES])


def build_symphony(rabitqlib: Any, images: np.ndarray, _: np.ndarray, path: Path) -> None:
    index = rabitqlib.SymqgIndex(images.shape[1], LINKS, "ip")
    index.build(images, EF_CONSTRUCTION, 1)
    index.save(str(path / "index"))


def open_symphony(rabitqlib: Any, path: Path) -> Opened:
    index = rabitqlib.SymqgIndex.load(str(path / "index"))
    return str, lambda queries, k, effort: index.search_batch(queries, k, effort)[0]


def lorann_peer(share: float) -> Peer:
    """Lists with learnt scoring; clusters of all dimensions (advised below 200), or of a share of these."""

    def build(lorann: Any, images: np.ndarray, captions: np.ndarray, path: Path) -> None:
        width = None if share == 1 else max(1, round(share * images.shape[1] / 32)) * 32
        index = lorann.LorannIndex(images, count_lists(len(images)), width, 8, distance=lorann.IP)
        index.build(n_threads=1, training_queries=captions)
        index.save(str(path / "index"))

    def open_index(lorann: Any, path: Path) -> Opened:
        index = lorann.LorannIndex.load(str(path / "index"))
        return str, lambda queries, k, effort: index.search(queries, k, *effort, n_threads=1).reshape(-1, k)

    return Peer("lorann", f"8 bits, {share:.0%} of the dimensions", build, open_index, of_lists)


def build_lance(lancedb: Any, images: np.ndarray, _: np.ndarray, path: Path) -> None:
    import pyarrow as pa

    lists, dim = count_lists(len(images)), images.shape[1]
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(images.ravel()), dim)
    table = lancedb.connect(path).create_table("images", pa.table({"row": np.arange(len(images)), "vector": vectors}))
    table.create_index("dot", num_partitions=lists, num_sub_vectors=dim // 4, vector_column_name="vector")


def open_lance(lancedb: Any, path: Path) -> Opened:
    table = lancedb.connect(path).open_table("images")

    def find_one(query: np.ndarray, k: int, effort: tuple[int, int]) -> np.ndarray:
        asked = table.search(query).distance_type("dot").nprobes(effort[0]).refine_factor(effort[1] // k)
        rows = asked.limit(k).select(["row", "_distance"]).to_arrow()["row"].to_numpy()
        return np.pad(rows, (0, k - len(rows)), constant_values=-1)

    return str, lambda queries, k, effort: np.stack([find_one(query, k, effort) for query in queries])


PEERS = {
    "faiss-pq-fast-scan": faiss_peer("IVF{lists},PQ{half}x4fs,RFlat"),
    "faiss-pq-fast-scan-sq8": faiss_peer("IVF{lists},PQ{half}x4fs,Refine(SQ8)"),
    "faiss-rabitq-fast-scan": faiss_peer("IVF{lists},RaBitQfs,Refine(SQ8)"),
    "faiss-rabitq-4-bits": faiss_peer("IVF{lists},RaBitQfs4,Refine(SQ8)"),
    "faiss-sq-fast-scan": faiss_peer("IVF{lists},SQ8fs"),
    "faiss-hnsw": faiss_peer(f"HNSW{LINKS}"),
    "scann": scann_peer("FLOAT32"),
    "scann-int8": scann_peer("INT8"),
    "lorann": lorann_peer(1),
    "lorann-half": lorann_peer(0.5),
    "rabitqlib-5-bits": rabitq_peer(5),
    "rabitqlib-8-bits": rabitq_peer(8),
    "svs-leanvec": svs_peer("LeanVec OOD"),
    "svs-lvq": svs_peer("LVQ4x8"),
    "svs-float16": svs_peer("float16"),
    "symphony-qg": Peer("rabitqlib", f"SymphonyQG{LINKS}", build_symphony, open_symphony, of_graph),
    "usearch-f16": usearch_peer("f16"),
    "usearch-i8": usearch_peer("i8"),
    "hnswlib": Peer("hnswlib", f"HNSW{LINKS}", build_hnswlib, open_hnswlib, of_graph),
    "autofaiss": Peer("faiss", "its pick", build_autofaiss, open_faiss, faiss_peer("HNSW").efforts, "autofaiss"),
    "lancedb": Peer(
        "lancedb", "IVF_PQ, refined", build_lance, open_lance, lambda k: [each[2::4] for each in of_lists(k)]
    ),
}


def main() -> None:
    peer, folder, k = PEERS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3])
    path = folder / sys.argv[1]
    if sys.argv[4:] == ["opened"]:
        print(json.dumps(measure(peer, path, folder, k)))
        return
    package = peer.package or peer.module
    found = {"version": f"{package} {version(package)}", "design": peer.design}
    if not (path / "built.json").exists():
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        images, captions = np.load(folder / "images.npy"), np.load(folder / "captions.npy")
        started = time.perf_counter()
        peer.build(importlib.import_module(peer.module), images, captions, path)
        (path / "built.json").write_text(json.dumps({"build_s": time.perf_counter() - started}))
    found |= json.loads((path / "built.json").read_text())
    done = subprocess.run([sys.executable, *sys.argv, "opened"], check=True, stdout=subprocess.PIPE, text=True)
    print(json.dumps(found | json.loads(done.stdout.splitlines()[-1])))


def measure(peer: Peer, path: Path, folder: Path, k: int) -> dict:
    """Open an index in this fresh process, and measure; its memory is what that and a batch of searches take."""
    queries = np.load(folder / "held_out.npy")
    module = importlib.import_module(peer.module)
    efforts = peer.efforts(k)
    before = psutil.Process().memory_info().rss
    opened, effort = peer.open(module, path), efforts[-1][len(efforts[-1]) // 2]
    opened[0](effort)
    opened[1](queries[:BATCH], k, effort)
    held = psutil.Process().memory_info().rss - before
    if peer.module != "lancedb":  # which reads files in part; the others may hold what this process had freed
        held = max(held, sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
    return {"bytes": held, "curve": curve(opened, efforts, folder, k)}


if __name__ == "__main__":
    main()
