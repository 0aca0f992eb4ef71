"""Figures of a run's metrics: the states of its journal, each row counted once.

A part's states count as they are where all of its rows do. A kill can leave rows that are done again, an item may have
changed between two sessions, and a row's item may have left the sources since: of such a part, and of one whose states
are of another definition, the rows that count are read and described again.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.ingest.run_result import RunResult
from embedder.store.accumulators.base import Figures, State
from embedder.store.accumulators.run_states import METRICS_FILE, Metric, RunMetrics, StateSum, states_of
from embedder.store.accumulators.vectors import PAIR, drift_between, pairs_of
from embedder.store.arrow_tensors import unpack_vectors
from embedder.store.files import StoreFiles
from embedder.store.hash_sample import hash_of
from embedder.store.history import latest_publications
from embedder.store.journal import JournalEntry, parts_of, read_keys, stream_entries
from embedder.store.layout import read_record, run_file, write_record
from embedder.store.schema import EMBEDDINGS, with_nulls
from shards.training.metrics import best_ranks, recall_at

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
    keys = _counted_keys(result)
    states = _states(result, metrics, keys)
    fingerprint = result.run.info.model_fingerprint
    figures = {}
    for metric in metrics:
        state = states[metric.digest]
        figures[metric.config.name] = metric.accumulator.figures(state)
        if metric.config.kind == "recall":
            figures[metric.config.name] |= _recall(files, result.entries, keys, state)
        elif metric.config.kind == "drift":
            figures[metric.config.name] |= _drift(metric, state, _earlier(files, run_id, fingerprint))
    record = RunMetrics(model_fingerprint=fingerprint, states=states, figures=figures)
    write_record(files, run_file(run_id, METRICS_FILE), record)
    return figures


def _counted_keys(result: RunResult) -> pa.Table:
    """`item_id`, `session`, `path` of the rows that count."""
    keys = read_keys(result.run.files, result.entries, "embeddings", ["item_id"]).drop_columns(["kept"])
    return keys.join(result.whole.select(["item_id", "session"]), ["item_id", "session"], join_type="left semi")


def _states(result: RunResult, metrics: Sequence[Metric], keys: pa.Table) -> dict[str, State]:
    """State of each metric over all rows that count, by its digest."""
    counts = keys.group_by("path").aggregate([("item_id", "count")])
    num_counted = dict(zip(counts["path"].to_pylist(), counts["item_id_count"].to_pylist(), strict=True))
    sums = {metric.digest: StateSum(metric) for metric in metrics}
    files, run_id, counting = result.run.files, result.run.run_id, {entry.name for entry in result.entries}
    for entry in stream_entries(files, run_id):
        if entry.name not in counting:
            continue
        parts = [part for part in entry.parts if part.table == "embeddings" and part.path in num_counted]
        if not parts:
            continue
        is_whole = sum(part.num_rows for part in parts) == sum(num_counted[part.path] for part in parts)
        again = [metric for metric in metrics if not is_whole or metric.digest not in entry.metrics]
        states = entry.metrics | (states_of(again, _rows(files, entry, keys, again)) if again else {})
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


def _rows(files: StoreFiles, entry: JournalEntry, keys: pa.Table, metrics: Iterable[Metric]) -> pa.Table:
    """Rows of a part that count, with the columns of some metrics."""
    columns = {name for metric in metrics for name in metric.accumulator.columns} | {"item_id"}
    tables = []
    for part in entry.parts:
        if part.table == "embeddings":
            ids = keys.filter(pc.equal(keys["path"], part.path))["item_id"]
            rows = files.read_table(f"{part.table}/{part.path}", sorted(columns))
            tables.append(rows.filter(pc.is_in(rows["item_id"], value_set=ids.combine_chunks())))
    return pa.concat_tables(tables)


def _recall(files: StoreFiles, entries: Sequence[JournalEntry], keys: pa.Table, state: State) -> Figures:
    """R@k of the sample's captions for their own images."""
    hashes = set(state["hashes"])
    chosen = [hash_of(item_id).hex() in hashes for item_id in keys["item_id"].to_pylist()]
    keys = keys.filter(pa.array(chosen, pa.bool_()))
    paths, ids = set(keys["path"].to_pylist()), keys["item_id"].combine_chunks()
    images, texts, order = [], [], []
    for part in (part for part in parts_of(entries, "embeddings") if part.path in paths):
        rows = files.read_table(f"{part.table}/{part.path}", ["item_id", "segment", *PAIR])
        own = keys.filter(pc.equal(keys["path"], part.path))["item_id"].combine_chunks()
        rows = pairs_of(rows.filter(pc.is_in(rows["item_id"], value_set=own)))
        order += rows["item_id"].to_pylist()
        images += list(unpack_vectors(rows[PAIR[0]]))
        texts += list(unpack_vectors(rows[PAIR[1]]))
    if not len(ids) or not order:
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
