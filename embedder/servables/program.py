"""Programs: classes and functions of Python files that compute servables and steps, here or in another interpreter.

This file is executed by its path in interpreters that have pyarrow but none of this package's other dependencies.
Therefore it imports nothing of the package, and is written for Python 3.9.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import platform
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

FILE_SUFFIX = ".py"
METHODS = ("load", "__call__")
HELLO, READY, BATCH, TABLE = b"H", b"R", b"B", b"T"
"""Message types of a child besides errors: versions, the end of loading; a batch and its table as Arrow IPC."""


@dataclass(frozen=True)
class ServableProgram:
    """Class or function that computes rows, described for a process that has only pyarrow and a framework.

    Attributes:
        place: absolute path of a Python file, or name of a module.
        name: a class there, `embedder.Stage` or one with `__init__(**settings)`, `load(device)` or
            `load(device, num_threads)`, `__call__(RecordBatch)`, and optionally `close()`; or a function of a
            RecordBatch and the settings.
        settings: keyword arguments of the class or function; JSON values.
    """

    place: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


class LoadedProgram:
    """Instance of a program's class after its `load`, or its function; only one thread calls it at a time."""

    def __init__(self, program: ServableProgram, device: str, num_threads: int) -> None:
        """Import the class, make an instance, and load it; AttributeError if it or a method is missing."""
        found = find_program(program.place, program.name)
        if not isinstance(found, type):
            self._compute: Any = functools.partial(found, **program.settings)
            return
        self._compute = found(**program.settings)
        takes_threads = "num_threads" in inspect.signature(self._compute.load).parameters
        self._compute.load(device, **({"num_threads": num_threads} if takes_threads else {}))

    def __call__(self, batch: pa.RecordBatch) -> pa.Table:
        """Compute a batch; raises `TypeError` if no table was returned, and whatever the user's code raises."""
        return as_table(self._compute(batch))

    def close(self) -> None:
        """Call the `close` of the class, if it has one."""
        close = getattr(self._compute, "close", None)
        if close is not None:
            close()


def serve(channel: Any, program: Mapping[str, Any], device: str, num_threads: int, search_path: Sequence[str]) -> None:
    """Send a greeting, load a program, and answer batches until the end: main loop of a child of `embedder.process`.

    `channel` is an `embedder.process.child_main.Channel` to the parent, `program` has the fields of
    `ServableProgram`, and `search_path` lists folders for modules, after those of this interpreter.
    """
    channel.send(HELLO, {"python": platform.python_version(), "pyarrow": pa.__version__})
    sys.path.extend(path for path in search_path if path not in sys.path)
    try:
        loaded = LoadedProgram(ServableProgram(**program), device, num_threads)
    except Exception as error:  # noqa: BLE001 - of any framework, or of the user's own code
        channel.send_error(error)
        return
    channel.send(READY, {})
    while (payload := channel.receive()) is not None:
        try:
            (batch,) = pa.ipc.open_stream(payload)
            table = loaded(batch)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        except Exception as error:  # noqa: BLE001 - likewise
            channel.send_error(error)
        else:
            channel.send(TABLE, sink.getvalue())
    loaded.close()


def find_program(place: str, name: str) -> Any:
    """Import the class or function `name` of a module or of a Python file (absolute path).

    A file is imported as the module of its own package, so that it may import its neighbours relatively (`from .boxes
    import crop`), and none of its names hides an installed module. Raises an AttributeError if it or a method is
    missing.
    """
    module = _import_file(Path(place)) if place.endswith(FILE_SUFFIX) else importlib.import_module(place)
    found = getattr(module, name, None)
    if not callable(found):
        known = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise AttributeError(f"{place} has no class or function {name!r}; it has {', '.join(sorted(known)) or 'none'}")
    missing = [each for each in METHODS if isinstance(found, type) and not callable(getattr(found, each, None))]
    if missing:
        raise AttributeError(
            f"class {name} of {place} has no {missing[0]!r}; it is an embedder.Stage, or has load(device) and "
            "__call__(batch)"
        )
    return found


def _import_file(path: Path) -> types.ModuleType:
    package = "servable_" + "".join(letter if letter.isalnum() else "_" for letter in str(path.parent))
    if package not in sys.modules:
        folder = types.ModuleType(package)
        folder.__path__ = [str(path.parent)]
        sys.modules[package] = folder
    name = package + "." + path.stem
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def as_table(returned: Any) -> pa.Table:
    """Make a table from what a class returned: a table, a batch, or columns by name (lists, or NumPy arrays).

    Raises `TypeError` for anything else.
    """
    if isinstance(returned, pa.Table):
        return returned
    if isinstance(returned, pa.RecordBatch):
        return pa.Table.from_batches([returned])
    if isinstance(returned, Mapping):
        return pa.table({name: _column(values) for name, values in returned.items()})
    raise TypeError(f"it returned {type(returned).__name__}; return a pyarrow.Table, a RecordBatch, or columns by name")


def _column(values: Any) -> Any:
    """Return the Arrow array of a column; an array with several axes becomes nested lists."""
    shape = getattr(values, "shape", None)
    if shape is None or len(shape) < 2:
        return values if isinstance(values, (pa.Array, pa.ChunkedArray)) else pa.array(values)
    column = pa.array(values.reshape(-1))
    for size in reversed(shape[1:]):
        if size == 0:
            return pa.array(values.tolist())
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column
