"""Figures of a run's metrics: the states of its journal, each row counted once.

A part's states count as they are where all of its rows do. A kill can leave rows that are done again, an item may have
changed between two sessions, and a row's item may have left the sources since: of such a part, and of one whose states
are of another definition, the rows that count are read and described again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.ingest.run_result import RunResult
from embedder.retrieval.rank_metrics import best_ranks, recall_at
from embedder.store.files import StoreFiles
from embedder.store.journal.accumulators.base import Figures, State
from embedder.store.journal.accumulators.run_states import METRICS_FILE, Metric, RunMetrics, StateSum, states_of
from embedder.store.journal.accumulators.vectors import PAIR, drift_between, pairs_of
from embedder.store.journal.finished import KEYS, count_rows, hash_rows, ids_in, of_whole
from embedder.store.journal.hash_sample import hash_of
from embedder.store.journal.journal import key_schema, stream_entries, stream_keys
from embedder.store.layout import read_record, run_file, write_record
from embedder.store.publish.history import latest_publications
from embedder.store.schema import EMBEDDINGS, with_nulls
from embedder.store.tables.arrow_tensors import unpack_vectors

KS = (1, 5, 10)
MAX_EARLIER = 1000  # publications that are looked at for one to compare with


def merge_run_metrics(result: RunResult, metrics: Sequence[Metric]) -> dict[str, Figures]:
    """Sum up the metrics of all sessions of a run, and keep them beside its report.

    Args:
        result: what the run has finished.
        metrics: of the configuration.

    Returns:
        Figures by the metric's name.
    """
    if not metrics:
        return {}
    files, run_id = result.run.files, result.run.run_id
    counted = _CountedRows(result)
    states = _states(result, metrics, counted)
    fingerprint = result.run.info.model_fingerprint
    figures = {}
    for metric in metrics:
        state = states[metric.digest]
        figures[metric.config.name] = metric.accumulator.figures(state)
        if metric.config.kind == "recall":
            figures[metric.config.name] |= _recall(files, counted, state)
        elif metric.config.kind == "drift":
            figures[metric.config.name] |= _drift(metric, state, _earlier(files, run_id, fingerprint))
    record = RunMetrics(model_fingerprint=fingerprint, states=states, figures=figures)
    write_record(files, run_file(run_id, METRICS_FILE), record)
    return figures


class _CountedRows:
    """Rows of a run that count: those of whole items, in the session that finished them."""

    def __init__(self, result: RunResult) -> None:
        self.files = tuple(part for entry in result.entries for part in entry.parts)
        schema = key_schema("embeddings", ["item_id"])
        self._rows = hash_rows(stream_keys(result.run.files, self.files, "embeddings", ["item_id"]), schema)
        self._whole = result.whole
        self.num_counted, self._partial = count_rows(self.files, self._rows, result.whole)

    def keys(self) -> Iterator[pa.Table]:
        """Yield `item_id` and `file` of the rows, part by part."""
        return (rows.select(KEYS.names) for rows in of_whole(self._rows, self._whole))

    def select_keys(self, is_meant: Callable[[pa.Table], Any]) -> pa.Table:
        """Collect the keys for which a function gives true."""
        return pa.concat_tables([rows.filter(is_meant(rows)) for rows in self.keys()])

    def read(self, files: StoreFiles, number: int, columns: Sequence[str]) -> pa.Table:
        """Read the rows of a part file that count.

        Args:
            files: the store.
            number: of the part file.
            columns: of its rows, `item_id` among them.
        """
        part = self.files[number]
        rows = files.read_table(f"{part.table}/{part.path}", list(columns))
        if self.num_counted[number] == part.num_rows:
            return rows
        return rows.filter(pc.is_in(rows["item_id"], value_set=ids_in(self._partial, number)))


def _states(result: RunResult, metrics: Sequence[Metric], counted: _CountedRows) -> dict[str, State]:
    """State of each metric over all rows that count, by its digest."""
    numbers = {part.path: number for number, part in enumerate(counted.files) if counted.num_counted[number]}
    sums = {metric.digest: StateSum(metric) for metric in metrics}
    files, run_id, counting = result.run.files, result.run.run_id, {entry.name for entry in result.entries}
    for entry in stream_entries(files, run_id):
        if entry.name not in counting:
            continue
        parts = [part for part in entry.parts if part.table == "embeddings" and part.path in numbers]
        if not parts:
            continue
        is_whole = sum(part.num_rows for part in parts) == sum(
            counted.num_counted[numbers[part.path]] for part in parts
        )
        again = [metric for metric in metrics if not is_whole or metric.digest not in entry.metrics]
        states = entry.metrics
        if again:
            columns = sorted({name for metric in again for name in metric.accumulator.columns} | {"item_id"})
            rows = [counted.read(files, numbers[part.path], columns) for part in parts]
            states = states | states_of(again, pa.concat_tables(rows))
        for digest, own in sums.items():
            own.add(states[digest])
    empty = EMBEDDINGS.empty_table()
    states = {}
    for metric in metrics:
        total = sums[metric.digest].total()
        if total is None:
            nothing = with_nulls(empty, pa.schema([(name, pa.float64()) for name in metric.accumulator.columns]))
            total = metric.accumulator.add(nothing)
        states[metric.digest] = total
    return states


def _recall(files: StoreFiles, counted: _CountedRows, state: State) -> Figures:
    """R@k of the sample's captions for their own images."""
    hashes = set(state["hashes"])

    def is_sampled(rows: pa.Table) -> pa.Array:
        return pa.array([hash_of(each).hex() in hashes for each in rows["item_id"].to_pylist()], pa.bool_())

    keys = counted.select_keys(is_sampled)
    images, texts, order = [], [], []
    for number in keys["file"].unique().sort().to_pylist():
        rows = counted.read(files, number, ["item_id", "segment", *PAIR])
        rows = pairs_of(rows.filter(pc.is_in(rows["item_id"], value_set=ids_in(keys, number))))
        order += rows["item_id"].to_pylist()
        images += list(unpack_vectors(rows[PAIR[0]]))
        texts += list(unpack_vectors(rows[PAIR[1]]))
    if not order:
        return {}
    places = sorted(range(len(order)), key=lambda place: hash_of(order[place]))
    numbers = np.arange(len(places))
    stacked = (np.stack([column[place] for place in places]) for column in (texts, images))
    text_QE, image_QE = stacked
    ranks = best_ranks(text_QE, numbers, image_QE, numbers)
    return {f"recall_at_{k}": recall_at(ranks, k) for k in KS}


def _earlier(files: StoreFiles, run_id: str, fingerprint: str) -> Iterator[tuple[str, RunMetrics]]:
    """Metrics of earlier publications by the same model, the newest first, each read when it is asked for."""
    for record in islice(latest_publications(files), MAX_EARLIER):
        own_id = record.interim_of or record.run_id
        kept = read_record(files, run_file(own_id, METRICS_FILE), RunMetrics) if own_id != run_id else None
        if kept is not None and kept.model_fingerprint == fingerprint:
            yield own_id, kept


def _drift(metric: Metric, state: State, earlier: Iterable[tuple[str, RunMetrics]]) -> Figures:
    """Difference to the last publication that has vectors of this metric; empty where there is none."""
    for run_id, kept in earlier:
        before = kept.states.get(metric.digest)
        if before is not None and (found := drift_between(state, before)):
            return {**found, "since": run_id}
    return {}
