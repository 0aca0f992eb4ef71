"""Metrics of a run's rows, one for each `[[metric]]`: DuckDB queries, sums of vectors, or a class of the user's own.

    class Brightness:
        def add(self, rows):              # pyarrow.Table of the inputs -> plain JSON
        def merge(self, first, second):   # two of these -> one; in any order, and cut anywhere
        def figures(self, state):         # one of these -> {"mean": 0.4}

The order of the rows changes no figure: counts are integers, sums are exact, and rounding is done row by row.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from embedder.config_toml.own_code_sections import LABELLED, NUMBERS, SCORES, MetricConfig
from embedder.errors import ConfigError
from embedder.process.child_main import import_file
from embedder.store.layout import Record
from embedder.store.metric_queries import Figures, insert_rows, open_rows, or_error, query_figures
from embedder.store.tables.arrow_tensors import unpack_vectors

State = dict[str, Any]
"""State of a metric after some rows, as plain JSON."""
Floats = np.ndarray[Any, np.dtype[np.float64]]

METRICS_FILE = "metrics.json"
STATE_VERSION = 1  # of kept states; states of another version are not compared
QUERIED = (*NUMBERS, *LABELLED)
"""Kinds that are computed by queries."""
METHODS = ("add", "merge", "figures")
ROWS_IN_CACHE = 256  # of vectors in float64: 1 MiB of those with 512 numbers
SCALE = 2.0**30  # sums of vectors of length 1 are exact in these steps up to 2**33 rows


class RunMetrics(Record):
    """`runs/RUN_ID/metrics.json`: a run's figures, and the states that the next run compares its vectors with."""

    model_fingerprint: str
    states: dict[str, Any] = Field({}, description="of each drift, by its digest")
    figures: dict[str, Any] = Field({}, description="by the metric's name")


def check_columns(configs: Iterable[MetricConfig], schema: pa.Schema) -> None:
    """Raise ConfigError if a column is missing or has another type, or a class can't be imported."""
    for config in configs:
        for name in config.columns:
            if name not in schema.names:
                raise ConfigError(
                    f'metric "{config.name}": no column {name!r} in the embeddings table, which has '
                    f"{', '.join(schema.names)}; carry it by `columns` of the source, or name one of these"
                )
        numbers = {config.column: (*NUMBERS, *SCORES), config.label: SCORES}
        for key, kinds in numbers.items():
            if key is not None and config.kind in kinds and not _is_number(schema.field(key).type):
                raise ConfigError(
                    f'metric "{config.name}": {config.kind} is of numbers, and column {key!r} is '
                    f"{schema.field(key).type}; name another"
                )
        if config.kind in LABELLED and config.column == config.label:
            raise ConfigError(f'metric "{config.name}": column and label are both {config.column!r}; name two')
        if config.kind == "own":
            try:
                load_own(config)
            except ConfigError:
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user's own
                raise ConfigError(
                    f'metric "{config.name}": {config.callable} can\'t be imported '
                    f"({type(error).__name__}: {error}); correct it, or leave the metric out"
                ) from None


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind))


def digest_of(config: MetricConfig) -> str:
    """Hash a metric's definition without its name; states with the same digest can be compared."""
    definition = config.model_dump_json(exclude={"name", "quantiles"})
    return hashlib.blake2b(f"{STATE_VERSION}{definition}".encode(), digest_size=8).hexdigest()


def compute_figures(
    configs: Sequence[MetricConfig], schema: pa.Schema, chunks: Iterable[pa.Table]
) -> tuple[dict[str, Figures], dict[str, State]]:
    """Compute all metrics except `recall`, which is measured on a sample.

    `chunks` holds the rows in any order, with the columns that the metrics name; there is at least one chunk, which may
    be empty. Returns the figures by metric name, and the state of each drift by digest.
    """
    seen = {config.name: SEEN[config.kind](config) for config in configs if config.kind in SEEN}
    queried = [config for config in configs if config.kind in QUERIED]
    names = sorted({name for config in queried for name in config.columns})
    with open_rows(pa.schema([schema.field(name) for name in names])) if names else nullcontext() as rows:
        problem: Figures = {}
        for chunk in chunks:
            for each in seen.values():
                each.add(chunk)
            if rows is not None and not problem:
                problem = or_error(insert_rows, rows, chunk.select(names))
        figures = {config.name: problem or or_error(query_figures, rows, config) for config in queried}
    states = {digest_of(config): seen[config.name].state for config in configs if config.kind == "drift"}
    return figures | {name: each.figures() for name, each in seen.items()}, states


class RowCount:
    """Number of rows, and of rows with a value."""

    def __init__(self, config: MetricConfig) -> None:
        self._column, self._num_rows, self._num_null = config.column, 0, 0

    def add(self, rows: pa.Table) -> None:
        """Count the values of the column, or the rows if no column is given."""
        self._num_rows += rows.num_rows
        self._num_null += rows[self._column].null_count if self._column else 0

    def figures(self) -> Figures:
        """Return the counts."""
        return {"num": self._num_rows - self._num_null, "num_null": self._num_null}


class Drift:
    """Mean and spread of vectors.

    `state` holds counts, and sums of vectors and of their squares in steps of 1 / `SCALE`.
    """

    def __init__(self, config: MetricConfig) -> None:
        self._column = config.column
        self.state: State = {"num": 0, "num_null": 0, "sums": [], "squares": []}

    def add(self, rows: pa.Table) -> None:
        """Add the vectors and their squares, each value first rounded to a multiple of 2**-30."""
        column, state = rows[self._column].drop_null(), self.state
        state["num"] += len(column)
        state["num_null"] += rows.num_rows - len(column)
        vectors = unpack_vectors(column)
        for start in range(0, len(vectors), ROWS_IN_CACHE):
            values = vectors[start : start + ROWS_IN_CACHE].astype(np.float64)
            for name, each in (("squares", values * values), ("sums", values)):
                steps = np.rint(np.multiply(each, SCALE, out=each), out=each)
                found = steps.sum(0).astype(np.int64)  # whole numbers below 2**53: no sum is rounded
                state[name] = (found + state[name] if state[name] else found).tolist()

    def figures(self) -> Figures:
        """Return the counts and the spread: the mean square distance from the mean vector, 0 to 1 for unit vectors."""
        found: Figures = {name: self.state[name] for name in ("num", "num_null")}
        return found | ({"spread": float(_variances(self.state).sum())} if self.state["num"] else {})


def drift_between(state: State, before: State) -> Figures:
    """Compare two states of `Drift` from the same model and vector size; empty if either has no vectors."""
    if not state["num"] or not before["num"] or len(state["sums"]) != len(before["sums"]):
        return {}
    means, earlier = _means(state), _means(before)
    deviations, others = (np.sqrt(np.maximum(_variances(each), 0)) for each in (state, before))
    distance = float(np.square(means - earlier).sum())
    lengths = float(np.linalg.norm(means) * np.linalg.norm(earlier))
    return {
        "mean_distance": distance**0.5,
        "cosine_of_means": float(means @ earlier) / lengths if lengths else None,
        # Between two normal distributions with independent dimensions. Source: Dowson and Landau 1982.
        "frechet_distance": distance + float(np.square(deviations - others).sum()),
    }


def _means(state: State) -> Floats:
    return np.asarray(np.array(state["sums"], np.float64) / (SCALE * state["num"]), np.float64)


def _variances(state: State) -> Floats:
    return np.asarray(np.array(state["squares"], np.float64) / (SCALE * state["num"]) - _means(state) ** 2, np.float64)


class OwnMetric:
    """Metric computed by the user's class; if the class raises, the error is reported in place of the figures."""

    def __init__(self, config: MetricConfig) -> None:
        self._config = config
        self._state: State = {}

    def add(self, rows: pa.Table) -> None:
        """Pass the class the columns that it takes, and merge what it returns."""
        if "error" in self._state:
            return
        before = self._state
        self._state = self._attempt(lambda own: {"state": own.add(rows.select(list(self._config.columns)))})
        if before and "error" not in self._state:
            added = self._state["state"]
            self._state = self._attempt(lambda own: {"state": own.merge(before["state"], added)})

    def figures(self) -> Figures:
        """Compute the figures, or report the error."""
        return self._state if "error" in self._state else self._attempt(lambda own: own.figures(self._state["state"]))

    @cached_property
    def _own(self) -> Any:
        return load_own(self._config)

    def _attempt(self, call: Callable[[Any], State]) -> State:
        try:
            return dict(json.loads(json.dumps(call(self._own), allow_nan=False)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user's own, which must not cost a run
            return {"error": f"{self._config.callable}: {type(error).__name__}: {error}"}


SEEN: dict[str, Any] = {"count": RowCount, "drift": Drift, "own": OwnMetric}


def load_own(config: MetricConfig) -> Any:
    """Import a metric's class and create its object.

    Raises ConfigError if the class doesn't exist or lacks a method; other exceptions of the import or the class pass
    through.
    """
    place, _, name = (config.callable or "").rpartition(":")
    is_file = place.endswith(".py")
    module = import_file(str(Path(place).expanduser())) if is_file else importlib.import_module(place)
    found = getattr(module, name, None)
    if found is None or not all(callable(getattr(found, method, None)) for method in METHODS):
        raise ConfigError(
            f"metric {config.callable}: no class of that name with the methods {', '.join(METHODS)}; write it"
        )
    return found(**config.settings)
