"""Metric of the user's own: a class that is imported where rows are written.

    class Brightness:
        def add(self, rows):              # pyarrow.Table of the inputs -> plain JSON
        def merge(self, first, second):   # two of these -> one; in any order, and cut anywhere
        def figures(self, state):         # one of these -> {"mean": 0.4}

What it raises is told in the report in the place of its figures; rows are written all the same.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from embedder.config_toml.metric_section import MetricConfig
from embedder.errors import ConfigError
from embedder.store.journal.accumulators.base import Accumulator, Figures, State

METHODS = ("add", "merge", "figures")
FILE_SUFFIX = ".py"


class Own(Accumulator):
    """Metric of a class of the user's own."""

    def add(self, rows: pa.Table) -> State:
        """Give the class the columns that it takes."""
        return self._attempt(lambda own: {"state": own.add(rows.select(list(self.columns)))})

    def merge(self, first: State, second: State) -> State:
        """Merge two states; an error stays, of two the one that sorts first."""
        if errors := sorted(each["error"] for each in (first, second) if "error" in each):
            return {"error": errors[0]}
        return self._attempt(lambda own: {"state": own.merge(first["state"], second["state"])})

    def figures(self, state: State) -> Figures:
        """Compute the figures, or tell the error."""
        if "error" in state:
            return dict(state)
        return self._attempt(lambda own: dict(own.figures(state["state"])))

    def _attempt(self, call: Callable[[Any], State]) -> State:
        """Call a method; what it returns is what JSON makes of it, here as after a restart."""
        try:
            return json.loads(json.dumps(call(load_own(self.config)), allow_nan=False))  # type: ignore[no-any-return]
        except Exception as error:  # noqa: BLE001 - code of the user's own, which must not cost a row
            return {"error": f"{self.config.callable}: {type(error).__name__}: {error}"}


def load_own(config: MetricConfig) -> Any:
    """Import a metric's class and make its object, once a process.

    Raises:
        ConfigError: there is no such class, or it lacks a method.
        Exception: as the import or the class raises it.
    """
    address = config.callable or ""
    path = Path(address.rpartition(":")[0])
    changed_ns = path.stat().st_mtime_ns if path.suffix == FILE_SUFFIX else 0
    return _load(address, json.dumps(config.settings, sort_keys=True), changed_ns)


@lru_cache(maxsize=64)
def _load(address: str, settings: str, changed_ns: int) -> Any:
    """Import a class and make its object; a file that has changed since is imported again."""
    del changed_ns
    place, _, name = address.rpartition(":")
    module = _import_file(Path(place)) if place.endswith(FILE_SUFFIX) else importlib.import_module(place)
    found = getattr(module, name, None)
    if found is None or not all(callable(getattr(found, method, None)) for method in METHODS):
        raise ConfigError(f"metric {address}: no class of that name with the methods {', '.join(METHODS)}; write it")
    return found(**json.loads(settings))


def _import_file(path: Path) -> Any:
    name = f"own_metric_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
