"""Build of one version of an index from vectors and ids: choose, add, measure, write, publish."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from index.atomic_folder import sweep_leftovers, whole_folder
from index.autotune import GroundTruths, Meter, best_point, find_ground_truths
from index.choose import DesignChoice, DesignRequest, Say, choose
from index.constraints import Constraints
from index.designs import Design
from index.errors import RetrievalError
from index.ids import check_ids
from index.manifest import Manifest
from index.queries import CAPTIONS, split_queries
from index.ranking import point_keeps
from index.step_timer import StepTimer
from index.vectors import Floats, VectorTable, collect_vectors
from index.version_files import TunedIndex, VersionContents, VersionOrigin, write_version

if TYPE_CHECKING:
    import faiss

Fill = Callable[[Design, VectorTable, Floats | None], "faiss.Index"]
"""Builds the index of a design with every vector of a table, in order, and the projection where the design has one."""

_SPOOL_NAME = "vectors.f32"
_MAX_BUILT = 3  # designs that are built on the whole table before the build fails


def build_index(
    vectors: Iterable[Floats] | Floats,
    ids: pa.Table,
    out: str | Path,
    *,
    model_fingerprint: str,
    embeddings_version: int,
    kind: str = "auto",
    constraints: Constraints | None = None,
    queries: Floats | None = None,
    query_kind: str = CAPTIONS,
    measure_all: bool = False,
    num_threads: int | None = None,
    fill: Fill | None = None,
    say: Say | None = None,
) -> Manifest:
    """Build an index and publish it as the folder `out`, whole or not at all.

    Memory is bounded by the index itself, one block of vectors and a sample for training.

    Args:
        vectors: (N, E) float32 of unit norm, or a stream of such blocks, read once; it is kept in a file beside `out`
            while the build runs (N x E x 4 bytes).
        ids: `item_id` and `segment` of each vector, in the same order; `run_id` to make updates possible.
        out: the folder to make; must not exist.
        model_fingerprint: fingerprint of the vectors' model; a search with another is refused.
        embeddings_version: version of the table of the vectors.
        kind: `flat`, `hnsw`, `ivf`, a design as `index.designs` writes it, or `auto` to choose by measuring.
        constraints: limits that the choice must keep; by default a recall@10 of 0.95.
        queries: (Q, E), expected queries: embeddings of captions. Half of them are held out, and recall is measured on
            those alone. Without them, vectors of the table are used.
        query_kind: name of the queries in the manifest.
        measure_all: whether to measure all candidates even where exact search will do.
        num_threads: threads of FAISS; None for all cores; 1 gives the same file every time.
        fill: trains and fills the index of a design; by default in this process.
        say: called with a line of text about the progress.

    Returns:
        The manifest of the version.

    Raises:
        RetrievalError: vectors, ids, queries or constraints break a rule, no design keeps the constraints, or `out`
            exists.
    """
    from index import faiss_build

    timer = StepTimer()
    out, say = Path(out), say or _silent
    constraints = constraints or Constraints()
    sweep_leftovers(out.parent)
    with whole_folder(out) as folder, faiss_build.threads(num_threads):
        spool = folder / _SPOOL_NAME
        with timer.step("collect"):
            table = collect_vectors(vectors, spool)
        ids = check_ids(ids, table.num_vectors)
        sets = split_queries(table, queries, query_kind)
        with timer.step("choose"):
            choice = choose(table, sets, DesignRequest(kind), constraints, measure_all=measure_all, say=say)
        with timer.step("exact answers"):
            ground_truths = find_ground_truths(table, sets.measured)
        built = _build_best(choice, table, ground_truths, constraints, fill or faiss_build.build, say, timer)
        origin = VersionOrigin(
            embeddings_version=embeddings_version,
            model_fingerprint=model_fingerprint,
            num_built=table.num_vectors,
            built_recall_at_10=built.point.recall_at_10,
            target_recall=constraints.recall,
            trials=choice.trials,
            centre=table.mean(),
            timer=timer,
        )
        manifest = write_version(folder, built, VersionContents(ids), origin)
        spool.unlink(missing_ok=True)
    return manifest


def _build_best(
    choice: DesignChoice,
    table: VectorTable,
    ground_truths: GroundTruths,
    constraints: Constraints,
    fill: Fill,
    say: Say,
    timer: StepTimer,
) -> TunedIndex:
    """Build designs, the best first, until one keeps the constraints on the whole table; a requested one always does.

    Raises:
        RetrievalError: none keeps them; the message gives the figures.
    """
    from index import faiss_build

    missed = []
    for design in choice.designs[:_MAX_BUILT]:
        say(f"building {design} of {table.num_vectors:,} vectors")
        with timer.step("build"):
            index = fill(design, table, choice.projection(design))
        meter = Meter(index, design, table.take)
        with timer.step("tune"):
            curve = meter.curve(ground_truths.asked, constraints.recall)
        built = TunedIndex(meter, tuple(curve), best_point(curve, constraints.recall), ground_truths)
        if not choice.trials or point_keeps(built.point, faiss_build.num_bytes(index), constraints):
            return built
        missed.append(f"{design} has recall {built.point.recall_at_10:.3f} at {built.point.latency_ms:.2f} ms")
    raise RetrievalError(
        f"index: of {table.num_vectors:,} vectors {'; '.join(missed)}: none keeps the constraints as on the sample; "
        "loosen recall, latency or memory, or name a design with kind"
    )


def _silent(_text: str) -> None:
    """Discard a line of progress."""
