"""Metrics of a run: what is decided before it, the states of one part's rows, and their sum."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field

from embedder.config_toml.metric_section import LABELLED, NUMBERS, SCORES, MetricConfig
from embedder.errors import ConfigError
from embedder.store.journal.accumulators.base import Accumulator, State
from embedder.store.journal.accumulators.labels import Auroc, Confusion, LogLoss
from embedder.store.journal.accumulators.numbers import Count, Moments, Quantiles
from embedder.store.journal.accumulators.own import FILE_SUFFIX, Own, load_own
from embedder.store.journal.accumulators.vectors import Drift, RecallSample
from embedder.store.layout import Record

KINDS: Mapping[str, type[Accumulator]] = {
    "count": Count,
    "sum": Moments,
    "moments": Moments,
    "quantiles": Quantiles,
    "log_loss": LogLoss,
    "auroc": Auroc,
    "confusion": Confusion,
    "recall": RecallSample,
    "drift": Drift,
    "own": Own,
}
METRICS_FILE = "metrics.json"
STATE_VERSION = 1  # of all kinds; states of another one are computed again


@dataclass(frozen=True)
class Metric:
    """Metric of a run.

    Attributes:
        config: as the configuration has it.
        digest: of all that decides its states; those of another digest don't count.
    """

    config: MetricConfig
    digest: str

    @cached_property
    def accumulator(self) -> Accumulator:
        """What computes it."""
        return KINDS[self.config.kind](self.config)


class RunMetrics(Record):
    """`runs/RUN_ID/metrics.json`: states and figures of a run."""

    model_fingerprint: str
    states: dict[str, Any] = Field({}, description="by the metric's digest")
    figures: dict[str, Any] = Field({}, description="by the metric's name")


def open_metrics(configs: Iterable[MetricConfig], schema: pa.Schema, *, may_load: bool = True) -> tuple[Metric, ...]:
    """Find what metrics need.

    Args:
        configs: entries of [[metric]].
        schema: columns of the embeddings table.
        may_load: whether classes of the user's own are imported, to find mistakes early.

    Raises:
        ConfigError: a column is missing or of another type, or a class can't be imported.
    """
    found = tuple(map(_with_whole_path, configs))
    metrics = tuple(Metric(config, _digest(config)) for config in found)
    for metric in metrics:
        _check_columns(metric, schema)
        if metric.config.kind == "own" and may_load:
            try:
                load_own(metric.config)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - code of the user's own
                raise ConfigError(
                    f'metric "{metric.config.name}": {metric.config.callable} can\'t be imported '
                    f"({type(error).__name__}: {error}); correct it, or leave the metric out"
                ) from None
    return metrics


def states_of(metrics: Iterable[Metric], rows: pa.Table) -> dict[str, Any]:
    """State of each metric, by its digest.

    Args:
        metrics: of the run.
        rows: of the embeddings table.
    """
    return {metric.digest: metric.accumulator.add(rows) for metric in metrics}


class StateSum:
    """Sum of a metric's states, pair by pair: large ones are copied seldom, and of a million twenty are in memory."""

    def __init__(self, metric: Metric) -> None:
        self._merge = metric.accumulator.merge
        self._parts: list[tuple[int, State]] = []  # sums of 2^n states, each n smaller than the one before

    def add(self, state: State) -> None:
        """Add a state."""
        power = 0
        while self._parts and self._parts[-1][0] == power:
            state, power = self._merge(self._parts.pop()[1], state), power + 1
        self._parts.append((power, state))

    def total(self) -> State | None:
        """Sum of all states; None where there was none."""
        if not self._parts:
            return None
        *others, (_, total) = self._parts
        for _, part in reversed(others):
            total = self._merge(part, total)
        return total


def _with_whole_path(config: MetricConfig) -> MetricConfig:
    """The metric with the absolute path of its file, as processes that write have a working directory of their own."""
    place, _, name = (config.callable or "").rpartition(":")
    if not place.endswith(FILE_SUFFIX):
        return config
    return config.model_copy(update={"callable": f"{Path(place).expanduser().absolute()}:{name}"})


def _digest(config: MetricConfig) -> str:
    """Hash a metric's definition, without its name; a file of the user's own counts by its content."""
    place = (config.callable or "").rpartition(":")[0]
    path = Path(place)
    content = path.read_bytes() if place.endswith(FILE_SUFFIX) and path.is_file() else b""
    definition = config.model_dump_json(exclude={"name", "quantiles"})  # quantiles are computed of any histogram
    return hashlib.blake2b(f"{STATE_VERSION}{definition}".encode() + content, digest_size=8).hexdigest()


def _check_columns(metric: Metric, schema: pa.Schema) -> None:
    config = metric.config
    for name in metric.accumulator.columns:
        if name not in schema.names:
            raise ConfigError(
                f'metric "{config.name}": no column {name!r} in the embeddings table, which has '
                f"{', '.join(schema.names)}; carry it by `columns` of the source, or name one of these"
            )
    numbers = {config.column: (*NUMBERS, *SCORES), config.label: SCORES}
    for key, kinds in numbers.items():
        if key is not None and config.kind in kinds and not _is_number(schema.field(key).type):
            raise ConfigError(
                f'metric "{config.name}": {config.kind} is of numbers, and column {key!r} is {schema.field(key).type}; '
                "name another"
            )
    if config.kind in LABELLED and config.column == config.label:
        raise ConfigError(f'metric "{config.name}": column and label are both {config.column!r}; name two')


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind))
