"""Calls a step's function in a child process; a row that it can't take fails without affecting others.

A batch that raises, hangs, kills the process or returns something undeclared is computed again row by row.
"""

import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.types as kinds

from embedder.batch_schema import step_type
from embedder.process.child import ChildDiedError, ChildError, ChildHungError
from embedder.servables.interpreter import ChildProgram, InterpreterLimits, start_program
from embedder.servables.program import FILE_SUFFIX, ServableProgram
from embedder.steps.item_decoder import ItemProblem
from embedder.user_steps.declared_steps import BOX, IMAGE, StepError, UserStep, digest_of

LOAD_S = 600.0
MAX_DEATHS = 20
"""Consecutive deaths of its process after which a step is given up; a hang costs `timeout_s` each time."""
MAX_ERROR_CHARACTERS = 300

Values = dict[str, Any]
"""What a function returned for one row, by column."""


class StepCalls:
    """A step's function in a child process, started with the first call; one thread calls it at a time."""

    def __init__(self, step: UserStep) -> None:
        self.step = step
        self._child: ChildProgram | None = None
        own = {"image": IMAGE, "region": BOX}
        self._types = {name: own.get(kind) or step_type(kind) for name, kind in step.config.outputs.items()}

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def start(self) -> ChildProgram:
        """Start the process, which imports the function, unless it is running.

        Raises:
            StepError: its source has changed since the run began.
            ServableError: it can't be imported.
        """
        step = self.step
        if self._child is not None:
            return self._child
        if digest_of(step.where, step.files) != step.digest:
            raise StepError(
                f"{step.where}: its source on {platform.node()} is not what the run began with; give all nodes the "
                "same files, and begin again if you changed them"
            )
        is_file = step.place.endswith(FILE_SUFFIX)  # neighbouring files can be imported by name
        limits = InterpreterLimits(
            load_s=LOAD_S,
            call_s=step.config.timeout_s,
            max_deaths=MAX_DEATHS - 1,
            calls=MAX_DEATHS,
            memory_bytes=step.config.memory_bytes,
        )
        self._child = start_program(
            sys.executable,
            ServableProgram(step.place, step.function, step.config.settings),
            where=step.where,
            device="cpu",
            num_threads=max(1, int(step.config.num_cpus)),
            limits=limits,
            search_path=[str(Path(step.place).parent)] if is_file else (),
        )
        return self._child

    def each(self, batch: pa.RecordBatch) -> list[Values | ItemProblem]:
        """Call a one-to-one function; return for each row its result, or why there is none.

        Raises a ServableError if the function can't be called any more.
        """
        found = self._call(batch, batch.num_rows)
        if not isinstance(found, ItemProblem):
            return list(found)
        if batch.num_rows == 1:
            return [found]
        return [result for number in range(batch.num_rows) for result in self.each(batch.slice(number, 1))]

    def many(self, batch: pa.RecordBatch) -> list[Values] | ItemProblem:
        """Call a one-to-many function on one row; return the rows, or why there are none. Raises like `each`."""
        return self._call(batch, None)

    def _call(self, batch: pa.RecordBatch, num_rows: int | None) -> list[Values] | ItemProblem:
        child = self.start()
        try:
            return self._check(child(batch), num_rows)
        except ChildDiedError as error:
            hung = isinstance(error, ChildHungError)
            return self._problem("StepTimeout" if hung else "StepDied", str(error), transient=hung)
        except ChildError as error:
            error_type, _, message = str(error).partition(":")
            return self._problem(error_type, message)
        except pa.ArrowException as error:  # about what it sent
            return self._problem(type(error).__name__, str(error))
        except _WrongOutputError as error:
            return self._problem("WrongOutput", str(error))

    def _problem(self, error_type: str, message: str, *, transient: bool = False) -> ItemProblem:
        text = " ".join(f"{message}".split()) or error_type
        return ItemProblem(self.step.config.name, error_type, text[:MAX_ERROR_CHARACTERS], transient)

    def _check(self, table: pa.Table, num_rows: int | None) -> list[Values]:
        """Check the returned table against the declaration, and convert it to the declared types.

        Raises a _WrongOutputError if it differs.
        """
        names = table.column_names
        if missing := [name for name in self._types if name not in names]:
            raise _WrongOutputError(f"it returned {', '.join(names) or 'no column'}, and declares {missing[0]!r}")
        if extra := [name for name in names if name not in self._types]:
            raise _WrongOutputError(f"it returned a column {extra[0]!r} that it doesn't declare; add it to outputs")
        if twice := [name for name in names if names.count(name) > 1]:
            raise _WrongOutputError(f"it returned {names.count(twice[0])} columns {twice[0]!r}; return one")
        if num_rows is not None and table.num_rows != num_rows:
            raise _WrongOutputError(
                f"it returned {table.num_rows} rows for {num_rows}; return one for each, or declare one_to_many = true"
            )
        most = self.step.config.max_rows
        if num_rows is None and table.num_rows > most:
            raise _WrongOutputError(f"it returned {table.num_rows} rows for one, max_rows is {most}")
        columns = {name: _convert(name, table[name], kind) for name, kind in self._types.items()}
        if not columns:
            return [{} for _ in range(table.num_rows)]
        rows: list[Values] = pa.table(columns).to_pylist()
        return rows


class _WrongOutputError(Exception):
    """The function returned something undeclared."""


def _convert(name: str, column: pa.ChunkedArray, expected: pa.DataType) -> pa.Array:
    """Convert a column to the declared type if the kind of value stays the same: numbers to numbers, texts to texts."""
    if not _is_alike(column.type, expected):
        raise _WrongOutputError(f"{name}: it returned {column.type}, and declares {expected}")
    values = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    try:
        if not kinds.is_struct(expected) or kinds.is_null(values.type):
            return values.cast(expected)
        parts = [values.field(each.name).cast(each.type) for each in expected]
        return pa.StructArray.from_arrays(parts, fields=list(expected), mask=values.is_null())
    except pa.ArrowException as error:
        raise _WrongOutputError(f"{name}: {error}") from None


FAMILIES = (
    (kinds.is_integer, (kinds.is_integer,)),
    (kinds.is_floating, (kinds.is_floating, kinds.is_integer)),
    (kinds.is_string, (kinds.is_large_string, kinds.is_string_view)),
    (kinds.is_binary, (kinds.is_large_binary, kinds.is_binary_view)),
    (kinds.is_large_binary, (kinds.is_binary, kinds.is_binary_view)),
)
"""Maps a declared type's test to the tests for types that may be returned instead."""


def _is_alike(found: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether values of the found type may replace those of the expected one."""
    if kinds.is_null(found) or found == expected:
        return True
    if kinds.is_struct(expected):
        names = {field.name: field.type for field in found} if kinds.is_struct(found) else {}
        return all(field.name in names and _is_alike(names[field.name], field.type) for field in expected)
    if kinds.is_list(expected):
        is_list = kinds.is_list(found) or kinds.is_large_list(found) or kinds.is_fixed_size_list(found)
        return bool(is_list and _is_alike(found.value_type, expected.value_type))
    return any(is_kind(expected) and any(fits(found) for fits in fitting) for is_kind, fitting in FAMILIES)


def check_steps_load(steps: Iterable[UserStep]) -> None:
    """Start and end each step's process, so that one that can't be imported is reported before any work.

    Raises:
        ServableError: a function can't be imported.
        StepError: a source has changed meanwhile.
    """
    for step in steps:
        calls = StepCalls(step)
        try:
            calls.start()
        finally:
            calls.close()
