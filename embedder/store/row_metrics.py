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
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from embedder.config_toml.own_code_sections import LABELLED, NUMBERS, SCORES, MetricConfig
from embedder.errors import ConfigError
from embedder.process.child_main import import_file
from embedder.store.layout import Record
from embedder.store.tables.arrow_tensors import unpack_vectors

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

State = dict[str, Any]
"""State of a metric after some rows, as plain JSON."""
Figures = dict[str, Any]
"""Numbers by name; a confusion also has its matrix."""
Floats = np.ndarray[Any, np.dtype[np.float64]]

METRICS_FILE = "metrics.json"
STATE_VERSION = 1  # of kept states; states of another version are not compared
QUERIED = (*NUMBERS, *LABELLED)
"""Kinds that are computed by queries."""
METHODS = ("add", "merge", "figures")
LEAST = 2.0**-53  # of a probability: a certain mistake costs 36.7, not infinity
MAX_CELLS = 10_000
MEMORY = "1GB"  # for the columns that queries read; the rest is in a temporary folder
BUCKET = "coalesce(sign(x) * (floor(256 * log2(abs(nullif(x, 0)))) + 300000), 0)"
"""SQL for the bucket of a finite `x`: 256 buckets per doubling on both sides of zero, so memory is bounded."""
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
            except Exception as error:  # noqa: BLE001 - code of the user's own
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
    with _open_rows(pa.schema([schema.field(name) for name in names])) if names else nullcontext() as rows:
        problem: Figures = {}
        for chunk in chunks:
            for each in seen.values():
                each.add(chunk)
            if rows is not None and not problem:
                problem = _or_error(_insert, rows, chunk.select(names))
        figures = {config.name: problem or _or_error(_query_figures, rows, config) for config in queried}
    states = {digest_of(config): seen[config.name].state for config in configs if config.kind == "drift"}
    return figures | {name: each.figures() for name, each in seen.items()}, states


# Kinds that consume the rows as they are read.


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
        except Exception as error:  # noqa: BLE001 - code of the user's own, which must not cost a run
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


# Kinds that are computed from a table of their columns, which DuckDB spills to disk if it is large.


@contextmanager
def _open_rows(schema: pa.Schema) -> Iterator["DuckDBPyConnection"]:
    import duckdb

    with TemporaryDirectory(prefix="embedder-") as folder:
        settings: dict[str, Any] = {"memory_limit": MEMORY, "temp_directory": folder, "threads": "4"}
        with duckdb.connect(":memory:", config=settings) as rows:
            rows.register("chunk", schema.empty_table())
            rows.execute("CREATE TABLE rows AS SELECT * FROM chunk")
            yield rows


def _or_error(call: Callable[..., Figures], *arguments: Any) -> Figures:
    """Return the figures, or an error if memory and disk didn't suffice, which must not fail a run."""
    import duckdb

    try:
        return call(*arguments)
    except duckdb.Error as error:
        return {"error": str(error).partition("\n")[0]}


def _insert(rows: "DuckDBPyConnection", chunk: pa.Table) -> Figures:
    rows.register("chunk", chunk)
    rows.execute("INSERT INTO rows SELECT * FROM chunk")
    return {}


def _query_figures(rows: "DuckDBPyConnection", config: MetricConfig) -> Figures:
    column, label = (f'"{(name or "").replace(chr(34), chr(34) * 2)}"' for name in (config.column, config.label))
    if config.kind == "confusion":
        return _confusion(rows, column, label)
    if config.kind in SCORES:
        scores = f"SELECT {column}::DOUBLE AS p, {label}::DOUBLE AS y FROM rows"
        return _log_loss(rows, scores) if config.kind == "log_loss" else _auroc(rows, scores)
    finite = f"SELECT {column}::DOUBLE AS x FROM rows WHERE isfinite({column}::DOUBLE)"
    num, low, high = _first(rows, f"SELECT count(*), min(x), max(x) FROM ({finite})")
    num_rows, num_valid = _first(rows, f"SELECT count(*), count({column}) FROM rows")
    found = {"num": num, "num_null": num_rows - num_valid, "num_not_finite": num_valid - num, "min": low, "max": high}
    if not num:
        return found
    if config.kind == "quantiles":
        return found | _quantiles(rows, finite, [Fraction(repr(each)) for each in config.quantiles], num)
    total = _exact_sum(rows, finite)
    found |= {"sum": _nearest(total), "mean": _nearest(total / num)}
    return found | (_moments(rows, finite, total / num, max(abs(low), abs(high))) if config.kind == "moments" else {})


def _moments(rows: "DuckDBPyConnection", finite: str, mean: Fraction, largest: float) -> Figures:
    """Return variance, deviation, skewness and excess kurtosis of the whole population."""
    exponent = max(math.frexp(largest)[1], -1000)  # values are scaled to 1, beyond which fourth powers would overflow
    centre = float(mean / Fraction(2) ** exponent)
    centred = f"SELECT x * {math.ldexp(1.0, -exponent)!r} - {centre!r}::DOUBLE AS d FROM ({finite})"
    (num,) = _first(rows, f"SELECT count(*) FROM ({finite})")
    powers = ("d", "d * d", "d * d * d", "d * d * d * d")
    first, second, third, fourth = (_exact_sum(rows, f"SELECT {each} AS x FROM ({centred})") / num for each in powers)
    variance = second - first**2  # the first is the rounding error of the centre
    found: Figures = {
        "variance": _nearest(variance * Fraction(4) ** exponent),
        "std": math.ldexp(math.sqrt(variance), exponent),
    }
    if variance:
        skewed = third - 3 * first * second + 2 * first**3
        tailed = fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4
        found |= {"skewness": float(skewed) / float(variance) ** 1.5, "kurtosis": float(tailed / variance**2) - 3}
    return found


def _quantiles(rows: "DuckDBPyConnection", finite: str, quantiles: list[Fraction], num: int) -> Figures:
    """Return each quantile under a name such as `p50`, accurate to 0.2 %."""
    ranks = [max(1, math.ceil(each * num)) for each in quantiles]
    picked = ", ".join(f"min(low + (high - low) / 2) FILTER (upto >= {rank})" for rank in ranks)
    counted = f"SELECT min(x) AS low, max(x) AS high, sum(count(*)) OVER (ORDER BY {BUCKET}) AS upto FROM ({finite})"
    values = _first(rows, f"SELECT {picked} FROM ({counted} GROUP BY {BUCKET})")
    return {f"p{100 * float(each):g}": value for each, value in zip(quantiles, values, strict=True)}


def _log_loss(rows: "DuckDBPyConnection", scores: str) -> Figures:
    """Return the mean negative log of the probability assigned to the true label."""
    judged = f"SELECT * FROM ({scores}) WHERE y IN (0, 1) AND p BETWEEN 0 AND 1"
    counts = _count_scores(rows, scores, judged)
    given = f"greatest(least(CASE WHEN y = 1 THEN p ELSE 1 - p END, 1), {LEAST!r}::DOUBLE)"
    total = _exact_sum(rows, f"SELECT -ln({given}) AS x FROM ({judged})")
    return counts | {"log_loss": _nearest(total / counts["num"]) if counts["num"] else None}


def _auroc(rows: "DuckDBPyConnection", scores: str) -> Figures:
    """Return the area under the ROC curve, and the error bound due to buckets: pairs within a bucket count half."""
    judged = f"SELECT * FROM ({scores}) WHERE y IN (0, 1) AND isfinite(p)"
    counts = _count_scores(rows, scores, judged)
    scored = f"SELECT p AS x, y::BIGINT AS one FROM ({judged})"
    by_score = f"SELECT {BUCKET} AS bucket, sum(one) AS ones, sum(1 - one) AS zeros FROM ({scored}) GROUP BY bucket"
    num_ones, twice_won, tied = _first(
        rows,
        "SELECT coalesce(sum(ones), 0), sum(ones * (2 * upto - zeros)), sum(ones * zeros) "
        f"FROM (SELECT ones, zeros, sum(zeros) OVER (ORDER BY bucket) AS upto FROM ({by_score}))",
    )
    num_pairs = int(num_ones) * (counts["num"] - int(num_ones))
    area, within = (int(each) / (2 * num_pairs) for each in (twice_won, tied)) if num_pairs else (None, None)
    return counts | {"num_ones": int(num_ones), "auroc": area, "auroc_within": within}


def _count_scores(rows: "DuckDBPyConnection", scores: str, judged: str) -> dict[str, int]:
    """Count rows that can be judged, rows with null, and rows whose label or score is out of range."""
    (num,) = _first(rows, f"SELECT count(*) FROM ({judged})")
    num_rows, num_valid = _first(rows, f"SELECT count(*), count(p + y) FROM ({scores})")
    return {"num": num, "num_null": num_rows - num_valid, "num_invalid": num_valid - num}


def _confusion(rows: "DuckDBPyConnection", predicted: str, truth: str) -> Figures:
    """Return accuracy, mean F1 of the classes, and the matrix: counts by true class, then by predicted class."""
    both = f"FROM rows WHERE {truth} IS NOT NULL AND {predicted} IS NOT NULL"
    num, num_rows = _first(rows, f"SELECT (SELECT count(*) {both}), count(*) FROM rows")
    found: Figures = {"num": num, "num_null": num_rows - num}
    cells = f"SELECT {truth} AS truth, {predicted} AS predicted, count(*) AS num {both} GROUP BY 1, 2"
    columns = rows.sql(f"{cells} LIMIT {MAX_CELLS + 1}").to_arrow_table().to_pydict()
    if len(columns["num"]) > MAX_CELLS:
        return found | {"error": f"more than {MAX_CELLS:,} pairs of classes; are these columns of classes?"}
    matrix: dict[str, dict[str, int]] = {}
    true, given, right = Counter[str](), Counter[str](), Counter[str]()
    # Classes are identified by their text.
    named = zip(map(str, columns["truth"]), map(str, columns["predicted"]), columns["num"], strict=True)
    for actual, guess, count in sorted(named):
        row = matrix.setdefault(actual, {})
        row[guess] = row.get(guess, 0) + count
        true[actual] += count
        given[guess] += count
        right[actual] += count if actual == guess else 0
    classes = sorted({*true, *given})
    mean_f1 = math.fsum(2 * right[each] / (true[each] + given[each]) for each in classes) / max(len(classes), 1)
    accuracy = right.total() / num if num else None
    return found | {"accuracy": accuracy, "mean_f1": mean_f1 if classes else None, "matrix": matrix}


def _exact_sum(rows: "DuckDBPyConnection", query: str) -> Fraction:
    """Sum column `x` of a query without rounding: finite float64 values are integers times a power of two.

    Values of similar size are added as 128-bit integers. A wrong last bit of the logarithm does no harm, since only 55
    of 64 bits are used.
    """
    shifted = (
        f"SELECT k, x * pow(2, (54 - k) // 2) * pow(2, 54 - k - (54 - k) // 2) AS whole FROM "
        f"(SELECT x, floor(log2(abs(x)))::INTEGER AS k FROM ({query}) WHERE x <> 0)"
    )
    sums = rows.execute(f"SELECT k, sum(whole::BIGINT) FROM ({shifted}) GROUP BY k").fetchall()
    return sum((Fraction(int(whole)) * Fraction(2) ** (k - 54) for k, whole in sums), Fraction())


def _first(rows: "DuckDBPyConnection", query: str) -> tuple[Any, ...]:
    (found,) = rows.execute(query).fetchall()
    return tuple(each + 0.0 if isinstance(each, float) else each for each in found)  # -0.0, which equals 0, becomes 0


def _nearest(value: Fraction) -> float | None:
    """Return the nearest float64; None if the number is too large, as JSON has no infinity."""
    try:
        return float(value)
    except OverflowError:
        return None
