"""Metrics of a run's rows that DuckDB computes from a table of their columns, which it spills to disk if large."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from embedder.config_toml.own_code_sections import SCORES, MetricConfig

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


Figures = dict[str, Any]
"""Numbers by name; a confusion also has its matrix."""


LEAST = 2.0**-53  # of a probability: a certain mistake costs 36.7, not infinity


MAX_CELLS = 10_000


MEMORY = "1GB"  # for the columns that queries read; the rest is in a temporary folder


BUCKET = "coalesce(sign(x) * (floor(256 * log2(abs(nullif(x, 0)))) + 300000), 0)"
"""SQL for the bucket of a finite `x`: 256 buckets per doubling on both sides of zero, so memory is bounded."""


@contextmanager
def open_rows(schema: pa.Schema) -> Iterator["DuckDBPyConnection"]:
    """Open a database with an empty table `rows`, for the block."""
    import duckdb

    with TemporaryDirectory(prefix="embedder-") as folder:
        settings: dict[str, Any] = {"memory_limit": MEMORY, "temp_directory": folder, "threads": "4"}
        with duckdb.connect(":memory:", config=settings) as rows:
            rows.register("chunk", schema.empty_table())
            rows.execute("CREATE TABLE rows AS SELECT * FROM chunk")
            yield rows


def or_error(call: Callable[..., Figures], *arguments: Any) -> Figures:
    """Return the figures, or an error if memory and disk didn't suffice, which must not fail a run."""
    import duckdb

    try:
        return call(*arguments)
    except duckdb.Error as error:
        return {"error": str(error).partition("\n")[0]}


def insert_rows(rows: "DuckDBPyConnection", chunk: pa.Table) -> Figures:
    """Add rows to the table; return no figures, for `or_error`."""
    rows.register("chunk", chunk)
    rows.execute("INSERT INTO rows SELECT * FROM chunk")
    return {}


def query_figures(rows: "DuckDBPyConnection", config: MetricConfig) -> Figures:
    """Compute the figures of a metric from the table."""
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
