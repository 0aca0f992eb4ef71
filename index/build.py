"""Build one version of an index from vectors and ids: choose, add, measure, write, publish."""

import hashlib
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from index.choose import NUM_SKIPPED_WITHOUT_QUERIES, IndexChoice, KindWish, choose_kind
from index.ids import check_ids
from index.manifest import IDS_NAME, INDEX_NAME, Manifest, write_manifest
from index.recall import SAMPLED, RecallMeter, RecallQueries, choose_queries
from index.vectors import Floats, Rows, VectorTable, collect_vectors
from index.workspace import sweep_leftovers, whole_folder

if TYPE_CHECKING:
    import faiss

_SPOOL_NAME = "vectors.f32"


def build_index(
    vectors: Iterable[Floats] | Floats,
    ids: pa.Table,
    out: str | Path,
    *,
    model_fingerprint: str,
    embeddings_version: int,
    kind: KindWish = "auto",
    queries: Floats | None = None,
    query_kind: str = "text",
    target_recall: float = 0.95,
    num_threads: int | None = None,
) -> Manifest:
    """Build an index and publish it as the folder `out`, whole or not at all.

    The search parameter is the fastest of a few whose recall@10 reaches the target, or the last of them.

    Args:
        vectors: (N, E) float32 of unit norm, or a stream of such blocks, read once; it is kept in a file beside `out`
            while the build runs (N x E x 4 bytes).
        ids: `item_id` and `segment` of each vector, in the same order.
        out: the folder to make; must not exist.
        model_fingerprint: of the model that made the vectors; search refuses any other.
        embeddings_version: of the table the vectors come from.
        kind: `flat`, `hnsw`, `ivf`, or `auto` to choose by size.
        queries: (Q, E) that people may ask: embeddings of captions; without them, vectors of the table are used.
        query_kind: what the queries are, for the manifest.
        target_recall: of the exact top ten, the share to find.
        num_threads: None takes all cores; 1 gives the same file every time.

    Returns:
        The manifest that stands in the folder.

    Raises:
        RetrievalError: vectors, ids or queries break a rule, or `out` exists.
    """
    from index import engine

    started = time.perf_counter()
    out = Path(out)
    sweep_leftovers(out.parent)
    with whole_folder(out) as folder, engine.threads(num_threads):
        spool = folder / _SPOOL_NAME
        table = collect_vectors(vectors, spool)
        ids = check_ids(ids, table.num_vectors)
        asked = choose_queries(table, queries, query_kind)
        choice = choose_kind(table.num_vectors, table.dim, kind=kind)
        built = engine.build(choice, table)
        found, recall = _tune(built, choice, table, asked, target_recall)
        spool.unlink(missing_ok=True)
        engine.write(built, folder / INDEX_NAME)
        pq.write_table(ids, folder / IDS_NAME)
        manifest = Manifest(
            kind=choice.kind,
            dim=table.dim,
            num_vectors=table.num_vectors,
            parameters=choice.build | found,
            embeddings_version=embeddings_version,
            model_fingerprint=model_fingerprint,
            sha256={name: _hash_file(folder / name) for name in (INDEX_NAME, IDS_NAME)},
            size_bytes=sum((folder / name).stat().st_size for name in (INDEX_NAME, IDS_NAME)),
            recall_at_10=recall,
            num_recall_queries=len(asked.vectors),
            recall_query_kind=asked.kind,
            built_at=datetime.now(UTC).isoformat(timespec="seconds"),
            build_s=round(time.perf_counter() - started, 3),
            faiss_version=engine.VERSION,
        )
        write_manifest(folder, manifest)
    return manifest


def _tune(
    built: "faiss.Index", choice: IndexChoice, table: VectorTable, asked: RecallQueries, target_recall: float
) -> tuple[dict[str, int], float]:
    """Give the first of the candidates whose recall reaches the target, or the last, and its recall."""
    from index import engine

    meter = RecallMeter(table, asked, engine.nearest_in_table)
    candidates = choice.candidates
    if asked.kind == SAMPLED:
        candidates = candidates[NUM_SKIPPED_WITHOUT_QUERIES:] or candidates[-1:]
    parameters, recall = candidates[-1], 0.0
    for parameters in candidates:

        def find(queries: Floats, k: int, parameters: dict[str, int] = parameters) -> Rows:
            return engine.search(built, queries, k, parameters)[1]

        recall = meter.measure(find)
        if recall >= target_recall:
            break
    return parameters, recall


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
