"""How an embeddings version comes to its index: the last one updated, else one built anew or first, else an exact one.

Nothing is published that does not pass the gate (`index.gate`); what fails is deleted before anybody saw it.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from embedder.config import IndexConfig
from embedder.errors import RunFailedError
from embedder.store.errors import local_problem
from embedder.store.files import StoreFiles
from embedder.store.layout import StoreInfo
from embedder.store_index.recall_queries import recall_queries
from embedder.store_index.rows import Floats, IndexRows
from embedder.store_index.sharded_build import cluster_filler
from embedder.store_index.versions import (
    INDEX_FOLDER,
    Build,
    add_version,
    manifest_of,
    open_version,
    version_folder,
)
from index.build import build_index
from index.changes import compare_ids
from index.constraints import Constraints
from index.designs import KINDS, parse_design
from index.errors import GateRefusedError, RebuildNeededError, RetrievalError
from index.gate import Gate, check_gate
from index.manifest import Manifest
from index.update import update_index

Say = Callable[[str], None]
Made = tuple[int, Manifest]
"""Number and manifest of a new version."""

FEW_VECTORS = 10_000
"""So many are compared in under a millisecond: exact search is chosen whatever people ask, and no query is needed."""


@dataclass(frozen=True)
class IndexJob:
    """An index that is wanted.

    Attributes:
        files: the store, held by the write lock.
        embeddings_version: whose rows it shall hold.
        info: whose vectors those are.
        previous: number of the version that is published, if any.
        wishes: kind, constraints and gate.
        say: is told how it came about.
        ray_address: of a cluster that fills inverted lists, where there are such and many rows.
        load_model: make queries with the model where there are no captions, however few the rows are.
    """

    files: StoreFiles
    embeddings_version: int
    info: StoreInfo
    previous: int | None
    wishes: IndexConfig
    say: Say
    ray_address: str | None = None
    load_model: bool = True

    @cached_property
    def rows(self) -> IndexRows:
        """What it shall hold."""
        return IndexRows(self.files, self.embeddings_version)

    @cached_property
    def queries(self) -> tuple[Floats | None, str]:
        """What it is tuned and judged with; the same where a second design has to be built."""
        wishes = self.wishes
        is_free = wishes.kind in ("auto", "flat") and wishes.memory_bytes is None and wishes.latency_ms is None
        is_exact = is_free and self.rows.ids.num_rows <= FEW_VECTORS
        return recall_queries(self.rows, self.info, load_model=self.load_model or not is_exact)

    @cached_property
    def last(self) -> Manifest | None:
        """What the published version says of itself."""
        return manifest_of(self.files, self.previous) if self.previous is not None else None

    def add(self, build: Build) -> Made:
        """Make the next version; one that may not be published is deleted.

        Raises:
            GateRefusedError: it finds too little, or takes too much memory.
        """

        def build_and_judge(folder: Path) -> Manifest:
            manifest = build(folder)
            try:
                self._judge(manifest)
            except GateRefusedError:
                shutil.rmtree(folder)
                raise
            return manifest

        return add_version(self.files, build_and_judge)

    def _judge(self, manifest: Manifest) -> None:
        where, limit = f"store {self.files.address}", self.wishes.memory_bytes
        check_gate(manifest, self.last, Gate(self.wishes.min_recall, self.wishes.max_drop), where)
        if limit is not None and manifest.memory_bytes > limit:
            raise GateRefusedError(
                f"{where}: the new index ({manifest.design}) takes {manifest.memory_bytes:,} bytes, and "
                f"index.memory_bytes = {limit:,} is the most that is allowed; allow more, or ask for a lower recall"
            )


def make_index(making: IndexJob, *, may_update: bool = True) -> int | None:
    """Make an index that may be published, in whichever way succeeds.

    Args:
        making: what is wanted.
        may_update: go on from the published version; a purge may not, for masked vectors stay in the file.

    Returns:
        Its number, that of the published version where no vector changed; None where there is no vector.

    Raises:
        RunFailedError: not even an exact index keeps the constraints, or memory is too small for any.
        StoreError: the disk is full.
    """
    if making.rows.ids.num_rows == 0:
        making.say("no index: no picture or video is among what is published")
        return None
    reasons: list[str] = []
    attempts: list[Callable[[IndexJob], tuple[int, str]]] = [_rebuilt, _exact]
    if may_update and making.previous is not None:
        attempts.insert(0, _updated)
    for attempt in attempts:
        try:
            number, told = attempt(making)
        except RetrievalError as error:
            reasons.append(str(error))
            continue
        except MemoryError as error:
            reasons.append(f"this machine's memory is too small for it ({error or 'MemoryError'})")
            break
        except OSError as error:
            raise local_problem(error, f"{making.files.address}/{INDEX_FOLDER}") from error
        making.say(f"index {number}: {told}" + (f"; {reasons[-1]}" if reasons else ""))
        return number
    raise _not_made(making, reasons)


def _not_made(making: IndexJob, reasons: list[str]) -> RunFailedError:
    cure = (
        "loosen index.memory_bytes, index.latency_ms, index.recall or index.min_recall, or give it more memory where "
        "that ran out"
    )
    if making.previous is None:
        cure += ", or publish without an index (--set index.build=false: search compares with every vector)"
    return RunFailedError(
        f"store {making.files.address}: no index of the new version may be published: {'; '.join(reasons)}; what was "
        f"published stays, and what was embedded is kept: {cure}; then run the same command again"
    )


def build_anew(making: IndexJob, kind: str | None = None, *, measure_all: bool = False) -> Made:
    """Build an index of all rows.

    Args:
        making: what is wanted; at least one row.
        kind: instead of the wished one.
        measure_all: measure all designs, even where exact search will do.

    Raises:
        RetrievalError: no design keeps the constraints.
        GateRefusedError: it is not good enough.
    """
    wishes = making.wishes
    queries, query_kind = making.queries

    def build(folder: Path) -> Manifest:
        with cluster_filler(making.ray_address, making.files, making.rows, making.say) as fill:
            return build_index(
                making.rows.vectors(),
                making.rows.ids,
                folder,
                kind=kind or wishes.kind,
                constraints=Constraints(wishes.memory_bytes, wishes.latency_ms, wishes.recall),
                model_fingerprint=making.info.model_fingerprint,
                embeddings_version=making.embeddings_version,
                queries=queries,
                query_kind=query_kind,
                measure_all=measure_all,
                fill=fill,
                say=making.say,
            )

    return making.add(build)


def _updated(making: IndexJob) -> tuple[int, str]:
    """The published version, with what changed since: only the added rows' vectors are read."""
    if making.previous is None or making.last is None:
        raise RebuildNeededError("there is no index to go on from")
    if making.last.model_fingerprint != making.info.model_fingerprint:
        raise RebuildNeededError("the vectors are of another model")
    if not _is_kind(making.last, making.wishes.kind):
        raise RebuildNeededError(
            f"the last is {making.last.design}, and index.kind = {making.wishes.kind} is asked for"
        )
    before = open_version(making.files, making.previous, making.info.model_fingerprint)
    ids = making.rows.ids
    changes = compare_ids(before.ids, before.is_live, ids)
    del before  # the update opens it again, and one of the two is enough in memory
    if not changes:
        return making.previous, "kept, as no vector changed"
    previous = version_folder(making.files, making.previous)

    def update(folder: Path) -> Manifest:
        return update_index(
            previous,
            folder,
            making.rows.vectors_at(changes.added),
            ids.take(pa.array(changes.added)),
            changes.removed,
            embeddings_version=making.embeddings_version,
        )

    number, manifest = making.add(update)
    return number, (
        f"updated, {len(changes.added):,} added, {changes.num_removed:,} masked "
        f"({manifest.num_masked / manifest.num_rows:.1%} of its rows are)"
    )


def _is_kind(manifest: Manifest, wish: str) -> bool:
    if wish in ("auto", *KINDS):
        return wish in ("auto", manifest.kind)
    return str(parse_design(wish)) == manifest.design


def _rebuilt(making: IndexJob) -> tuple[int, str]:
    number, manifest = build_anew(making)
    did = "built" if making.previous is None else "rebuilt"
    return number, f"{did} as {manifest.design}, recall@10 {manifest.recall_at_10:.3f}"


def _exact(making: IndexJob) -> tuple[int, str]:
    """Compare with every vector: slow where there are many, and never wrong."""
    return build_anew(making, "flat")[0], "exact"
