"""Figures of a run's metrics, over the rows of its part files that count, each once.

A kill can leave rows that are repeated, an item may have changed between two sessions, and an item may have left the
sources since: from a part with such rows, only the others are read.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.config_toml.own_code_sections import MetricConfig
from embedder.ingest.run_result import RunResult
from embedder.retrieval.rank_metrics import best_ranks, recall_at
from embedder.store.files import StoreFiles
from embedder.store.journal.finished import count_rows, ids_in
from embedder.store.journal.hash_sample import lowest_keys
from embedder.store.journal.part_writer import gather_rows
from embedder.store.layout import read_record, run_file, write_record
from embedder.store.metric_queries import Figures
from embedder.store.publish.history import latest_publications
from embedder.store.row_metrics import METRICS_FILE, RunMetrics, State, compute_figures, digest_of, drift_between
from embedder.store.schema import VECTOR_COLUMNS, with_nulls
from embedder.store.tables.arrow_tensors import unpack_vectors

KS = (1, 5, 10)
MAX_EARLIER = 1000  # publications searched for one to compare with
NUM_AHEAD = 16  # part files read from a bucket at once
ROWS_AT_ONCE = 8192  # 16 MiB of vectors with 512 numbers


def compute_metrics(result: RunResult, configs: Sequence[MetricConfig], schema: pa.Schema) -> dict[str, Figures]:
    """Compute the metrics of all sessions of a run by name, and keep them next to its report."""
    if not configs:
        return {}
    files, run_id, fingerprint = result.run.files, result.run.run_id, result.run.info.model_fingerprint
    counted = _CountedRows(result, schema)
    columns = sorted({name for config in configs for name in config.columns})
    is_read = any(config.kind != "recall" for config in configs)
    found, states = compute_figures(configs, schema, counted.chunks(columns) if is_read else ())
    figures: dict[str, Figures] = {}
    for config in configs:
        figures[config.name] = _recall(counted, config) if config.kind == "recall" else found[config.name]
        if config.kind == "drift":
            digest = digest_of(config)
            figures[config.name] |= _drift(digest, states[digest], _earlier(files, run_id, fingerprint))
    record = RunMetrics(model_fingerprint=fingerprint, states=states, figures=figures)
    write_record(files, run_file(run_id, METRICS_FILE), record)
    return figures


class _CountedRows:
    """Rows of a run that count: those of complete items, in the session that finished them."""

    def __init__(self, result: RunResult, schema: pa.Schema) -> None:
        self._files, self._schema = result.run.files, schema
        self._parts = tuple(part for entry in result.entries for part in entry.parts)
        self._num_counted, self._partial = count_rows(self._parts, result.vectors, result.whole)
        self.numbers = np.flatnonzero(self._num_counted).tolist()

    def chunks(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read columns of the rows, some thousand rows at a time; at least one chunk, which may be empty."""
        parts = self._files.stream(lambda number: self.read(number, columns), self.numbers, NUM_AHEAD)
        chunks = gather_rows(parts, ROWS_AT_ONCE)
        yield from [self._schema.empty_table()] if not self.numbers else chunks

    def read(self, number: int, columns: Sequence[str]) -> pa.Table:
        part, names = self._parts[number], list(dict.fromkeys([*columns, "item_id"]))
        schema = pa.schema([self._schema.field(name) for name in names])
        rows = with_nulls(self._files.read_table(f"{part.table}/{part.path}", names), schema).select(names)
        if self._num_counted[number] == part.num_rows:
            return rows
        return rows.filter(pc.is_in(rows["item_id"], value_set=ids_in(self._partial, number)))

    def pairs(self, number: int, *columns: str) -> pa.Table:
        """Read columns of the first rows of items in a part file that have both vectors."""
        unsure = [name for name in VECTOR_COLUMNS if self._parts[number].num_null(name) != 0]
        rows = self.read(number, ["segment", *unsure, *columns])
        is_pair = pc.equal(rows["segment"], 0)
        for name in unsure:
            is_pair = pc.and_(is_pair, pc.is_valid(rows[name]))
        return rows.filter(is_pair).select(["item_id", *columns])


def _recall(counted: _CountedRows, config: MetricConfig) -> Figures:
    """Compute R@k of captions for their own images, over the items with the lowest hashes of their ids."""
    num = 0

    def ids_of(number: int) -> list[str]:
        nonlocal num
        ids: list[str] = counted.pairs(number)["item_id"].to_pylist()
        num += len(ids)
        return ids

    keys = lowest_keys(map(ids_of, counted.numbers), config.sample)
    found: Figures = {"num": num, "num_pairs": len(keys)}
    if not keys:
        return found
    order, wanted = {key: place for place, key in enumerate(keys)}, pa.array(keys, pa.string())
    sampled = []
    for place in sorted(set().union(*keys.values())):
        rows = counted.pairs(counted.numbers[place], *VECTOR_COLUMNS)
        sampled.append(rows.filter(pc.is_in(rows["item_id"], value_set=wanted)))
    rows = pa.concat_tables(sampled)
    places = np.argsort([order[key] for key in rows["item_id"].to_pylist()])
    image_QE, text_QE = (unpack_vectors(rows[name])[places] for name in VECTOR_COLUMNS)
    numbers = np.arange(len(places))
    ranks = best_ranks(text_QE, numbers, image_QE, numbers)
    return found | {f"recall_at_{k}": recall_at(ranks, k) for k in KS}


def _earlier(files: StoreFiles, run_id: str, fingerprint: str) -> Iterator[tuple[str, RunMetrics]]:
    """Yield the metrics of earlier publications by the same model, newest first, each read on demand."""
    for record in islice(latest_publications(files), MAX_EARLIER):
        own_id = record.interim_of or record.run_id
        kept = read_record(files, run_file(own_id, METRICS_FILE), RunMetrics) if own_id != run_id else None
        if kept is not None and kept.model_fingerprint == fingerprint:
            yield own_id, kept


def _drift(digest: str, state: State, earlier: Iterable[tuple[str, RunMetrics]]) -> Figures:
    """Return the difference to the last publication with vectors of this metric; empty if there is none."""
    for run_id, kept in earlier:
        before = kept.states.get(digest)
        if before is not None and (found := drift_between(state, before)):
            return {**found, "since": run_id}
    return {}
