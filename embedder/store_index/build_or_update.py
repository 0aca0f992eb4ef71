"""Index of an embeddings version: the last one updated, else a new one, else an exact one.

Only an index that passes the gate (`index.gate`) is published; one that fails is deleted before it can be read.
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from embedder.config_toml.sections import IndexConfig
from embedder.errors import RunFailedError
from embedder.quantities import percent, size_text
from embedder.store.files import StoreFiles
from embedder.store.layout import SEARCHED_NAMES, StoreInfo
from embedder.store.store_errors import local_problem
from embedder.store_index.index_versions import (
    INDEX_FOLDER,
    Build,
    add_version,
    manifest_of,
    open_version,
    version_folder,
)
from embedder.store_index.indexed_rows import IndexRows
from embedder.store_index.recall_queries import recall_queries
from embedder.store_index.sharded_build import cluster_filler
from index.constraints import Constraints
from index.designs import KINDS, parse_design
from index.gate import Gate, check_gate
from index.ids import compare_ids
from index.index_errors import GateRefusedError, RebuildNeededError, RetrievalError
from index.manifest import Manifest
from index.vectors import Floats

LOG = logging.getLogger(__name__)
Made = tuple[int, Manifest]
"""Number and manifest of a new version."""

FEW_VECTORS = 10_000
"""Comparing this many takes under a millisecond: exact search serves any query, and no queries are needed to tune."""


@dataclass(frozen=True)
class IndexJob:
    """Request for an index.

    Attributes:
        files: the store, held by the write lock.
        embeddings_version: version of the rows to index.
        info: model of their vectors.
        previous: number of the published version, if any.
        config: kind, constraints and gate.
        ray_address: of a cluster that fills inverted lists, if the index has any and the store is large.
        load_model: make queries with the model if there are no captions, even for few rows.
    """

    files: StoreFiles
    embeddings_version: int
    info: StoreInfo
    previous: int | None
    config: IndexConfig
    ray_address: str | None = None
    load_model: bool = True

    @cached_property
    def rows(self) -> IndexRows:
        """Rows to index."""
        return IndexRows(self.files, self.embeddings_version, searched=self.info.searched)

    @cached_property
    def queries(self) -> tuple[Floats | None, str]:
        """Queries for tuning and judging it; the same ones if a second design has to be built."""
        config = self.config
        is_free = config.kind in ("auto", "flat") and config.memory_bytes is None and config.latency_ms is None
        is_exact = is_free and self.rows.ids.num_rows <= FEW_VECTORS
        return recall_queries(self.rows, self.info, load_model=self.load_model or not is_exact)

    @cached_property
    def last(self) -> Manifest | None:
        """Manifest of the published version."""
        return manifest_of(self.files, self.previous) if self.previous is not None else None

    def add(self, build: Build) -> Made:
        """Build the next version; GateRefusedError, and no version, if recall is too low or memory too large."""

        def build_and_judge(folder: Path) -> Manifest:
            manifest = build(folder)
            try:
                self._judge(manifest)
            except GateRefusedError:
                shutil.rmtree(folder)
                raise
            return manifest

        try:
            return add_version(self.files, build_and_judge)
        except OSError as error:
            raise local_problem(error, f"{self.files.address}/{INDEX_FOLDER}") from error

    def _judge(self, manifest: Manifest) -> None:
        where, limit = f"store {self.files.address}", self.config.memory_bytes
        check_gate(manifest, self.last, Gate(self.config.min_recall, self.config.max_drop), where)
        if manifest.missed and self._is_better_published(manifest):
            raise GateRefusedError(
                f"{where}: no design keeps the constraints; the nearest, {manifest.design}, misses {manifest.missed}, "
                f"and what is published finds more, recall@10 {self.last.recall_at_10 if self.last else 0:.3f}, and "
                "stays; loosen a constraint"
            )
        if limit is not None and manifest.memory_bytes > limit:
            raise GateRefusedError(
                f"{where}: the new index ({manifest.design}) takes {size_text(manifest.memory_bytes)}, and "
                f"index.memory_bytes = {limit} allows {size_text(limit)}; allow more, or ask for a lower recall"
            )

    def _is_better_published(self, manifest: Manifest) -> bool:
        """Return whether the published index is of the same rows and finds more; with --force that doesn't count."""
        last = self.last
        if last is None or self.config.max_drop == 1 or last.embeddings_version != manifest.embeddings_version:
            return False
        return last.recall_query_kind == manifest.recall_query_kind and last.recall_at_10 > manifest.recall_at_10


def make_index(job: IndexJob, *, may_update: bool = True) -> int | None:
    """Make an index that may be published, by the first of several ways that succeeds; return its number.

    That is the published version's number if no vector changed, and None if there is no vector. An exact index is the
    last way, unless `on_missed` is `fail`. `may_update` allows building on the published version; a purge may not, as
    masked vectors stay in the file, and takes the exact index in any case. Raises RunFailedError if not even an exact
    index may be published or memory is too small for any, and StoreError if the disk is full.
    """
    if job.rows.ids.num_rows == 0:
        LOG.info(f"no index: no {SEARCHED_NAMES[job.info.searched]} is among what is published")
        return None
    reasons: list[str] = []
    attempts: list[Callable[[IndexJob], tuple[int, str]]] = [_rebuilt]
    if job.config.on_missed != "fail" or not may_update:  # a purge is carried out
        attempts.append(_exact)
    if may_update and job.previous is not None:
        attempts.insert(0, _update)
    for attempt in attempts:
        try:
            number, description = attempt(job)
        except RetrievalError as error:
            reasons.append(str(error))
            continue
        except MemoryError as error:
            reasons.append(f"this machine's memory is too small for it{f' ({error})' if str(error) else ''}")
            break
        LOG.info(f"index {number}: {description}" + (f"; {reasons[-1]}" if reasons else ""))
        return number
    raise _not_made(job, reasons)


def _not_made(job: IndexJob, reasons: list[str]) -> RunFailedError:
    cure = (
        "loosen index.memory_bytes, index.latency_ms, index.recall or index.min_recall, or give it more memory where "
        "that ran out"
    )
    if job.previous is None:
        cure += ", or publish without an index (--set index.build=false: search compares with every vector)"
    failure = RunFailedError(
        f"store {job.files.address}: no index of the new version may be published: {'; '.join(reasons)}; what was "
        f"published stays: {cure}; then run the same command again"
    )
    failure.is_resumable = True
    return failure


def build_anew(job: IndexJob, kind: str | None = None, *, measure_all: bool = False) -> Made:
    """Build an index of all rows, of which there is at least one.

    `kind` overrides the configured one; `measure_all` measures all designs even if exact search suffices. Raises
    ConstraintsMissedError if no design keeps the constraints and `on_missed` isn't `publish`, and GateRefusedError if
    recall is too low.
    """
    from index.build import build_index  # which loads FAISS

    config = job.config
    queries, query_kind = job.queries

    def build(folder: Path) -> Manifest:
        with cluster_filler(job.ray_address, job.files, job.rows) as fill:
            return build_index(
                job.rows.vectors(),
                job.rows.ids,
                folder,
                kind=kind or config.kind,
                constraints=Constraints(config.memory_bytes, config.latency_ms, config.recall),
                model_fingerprint=job.info.model_fingerprint,
                embeddings_version=job.embeddings_version,
                queries=queries,
                query_kind=query_kind,
                measure_all=measure_all,
                fill=fill,
                on_missed=config.on_missed,
            )

    return job.add(build)


def _update(job: IndexJob) -> tuple[int, str]:
    """Update the published version with the changes since; only vectors of added rows are read."""
    if job.previous is None or job.last is None:
        raise RebuildNeededError("there is no index to continue from")
    if job.last.model_fingerprint != job.info.model_fingerprint:
        raise RebuildNeededError("the vectors are of another model")
    if not _is_kind(job.last, job.config.kind):
        raise RebuildNeededError(f"the last is {job.last.design}, and index.kind = {job.config.kind} is asked for")
    before = open_version(job.files, job.previous, job.info.model_fingerprint)
    ids = job.rows.ids
    changes = compare_ids(before.ids, before.is_live, ids)
    del before  # the update opens it again, and one copy in memory is enough
    if not changes:
        return job.previous, "kept, as no vector changed"
    from index.update import update_index  # which loads FAISS

    previous = version_folder(job.files, job.previous)

    def update(folder: Path) -> Manifest:
        return update_index(
            previous,
            folder,
            job.rows.vectors_at(changes.added),
            ids.take(pa.array(changes.added)),
            changes.removed,
            embeddings_version=job.embeddings_version,
        )

    number, manifest = job.add(update)
    return number, (
        f"updated, {len(changes.added):,} added, {changes.num_removed:,} masked "
        f"({percent(manifest.num_masked / manifest.num_rows)} of its rows are)"
    )


def _is_kind(manifest: Manifest, kind: str) -> bool:
    if kind in ("auto", *KINDS):
        return kind in ("auto", manifest.kind)
    return str(parse_design(kind)) == manifest.design


def _rebuilt(job: IndexJob) -> tuple[int, str]:
    number, manifest = build_anew(job)
    did = "built" if job.previous is None else "rebuilt"
    missed = f"; no design keeps the constraints, and this one misses {manifest.missed}" if manifest.missed else ""
    return number, f"{did} as {manifest.design}, recall@10 {manifest.recall_at_10:.3f}{missed}"


def _exact(job: IndexJob) -> tuple[int, str]:
    """Build an exact index, which compares with every vector: slow for many vectors, but never wrong."""
    return build_anew(job, "flat")[0], "exact"
