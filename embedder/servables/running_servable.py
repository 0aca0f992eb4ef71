"""Running servable: takes a table, and returns it with the servable's columns even if rows or calls fail.

Columns of a table, besides the dataset's own (`embedder.batch_schema.CARRIED`): `input:KEY`, made by decode; and for
each servable that ran NAME.OUTPUT, and NAME.error, which says why a row has no outputs.
"""

import queue
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from embedder.batch_schema import CARRIED, HUNG
from embedder.errors import RunFailedError
from embedder.media.limits import DecodeLimits
from embedder.servables.checks import Bools, CheckedOutputs, check_outputs
from embedder.servables.interpreter import CALL_S, LOAD_S
from embedder.servables.order import ERROR
from embedder.servables.prepare import GRID, InputPreparer, PreparedInput, bind
from embedder.servables.servable import Servable
from embedder.servables.servable_columns import ColumnInput, InputColumn
from embedder.servables.servable_errors import ServableError, one_line

DECODED = "input:"
"""Prefix of columns that decode makes for servables."""
T = TypeVar("T")


def decoded_name(declared: InputColumn) -> str:
    """Return the column that decode makes for an input from the item itself or from a column of the dataset."""
    return f"{DECODED}{declared.of or ''}:{declared.decode_key()}"


def comes_from_servable(declared: InputColumn) -> bool:
    """Return whether an input is made from another servable's output."""
    return "." in (declared.of or "")


class OwnThread:
    """Thread that loads and calls a servable in this process, so that the waiting caller can give up.

    A thread can't be killed: a hanging call ends the run. torch uses as many threads in it as in the caller.
    """

    def __init__(self, where: str) -> None:
        self.hung: str | None = None
        """Why it was given up."""
        self._where = where
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._calls,), name=f"servable {where}", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def call(self, what: str, limit_s: float, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the thread; RunFailedError if it exceeds `limit_s` seconds, now or earlier."""
        answer: Future[T] = Future()
        if self.hung is None:
            self._calls.put((answer, function, arguments, _torch_threads()))
            try:
                return answer.result(limit_s)
            except TimeoutError:
                if answer.done():  # the function itself raised it
                    raise
            self.hung = (
                f"{self._where}: {what} {HUNG} {limit_s:g} s in this process, where it can't be ended alone; write "
                "timeout_s and load_timeout_s, and it computes in its own process: the rows that hang are "
                "reported, and the others continue"
            )
        raise RunFailedError(self.hung)


def _work(calls: "queue.SimpleQueue[Any]") -> None:
    while (call := calls.get()) is not None:
        answer, function, arguments, num_threads = call
        try:
            if num_threads is not None and num_threads != _torch_threads():
                sys.modules["torch"].set_num_threads(num_threads)
            answer.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            answer.set_exception(error)
        del call, answer, function, arguments  # release these and what they hold before waiting for the next call


def _torch_threads() -> int | None:
    """Return torch's number of threads in the calling thread; None if it is not imported."""
    get = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return None if get is None else int(get())


class RunningServable:
    """Loaded servable with its input preparation and output checks; only one thread calls it at a time."""

    def __init__(
        self, servable: Servable, device: str = "cpu", num_threads: int = 1, limits: DecodeLimits | None = None
    ) -> None:
        """Load it; raises `ServableError` if that fails, and `RunFailedError` if it hangs in this process."""
        self.servable = servable
        self.inputs, self.outputs = servable.input_columns(), servable.output_columns()
        self._preparer = InputPreparer(limits)
        self._here = None if servable.has_own_process else OwnThread(servable.where())
        self._computation = self._in_time("loading it", LOAD_S, servable.load, device, num_threads)
        self._lost: str | None = None

    def close(self) -> None:
        """Release what it holds."""
        if self._here is None or self._here.hung is None:
            self._computation.close()
        self._preparer.close()

    def _in_time(self, what: str, limit_s: float, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of the servable with a time limit; a child process has its own limits."""
        if self._here is None:
            return function(*arguments)
        return self._here.call(what, limit_s, function, *arguments)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Append the servable's columns; rows that it can't compute are null there, with the reason in NAME.error."""
        problems: list[str | None] = [None] * table.num_rows
        prepared = {name: self._input(table, declared, problems) for name, declared in self.inputs.items()}
        present = {name: _is_there(each.column) for name, each in prepared.items()}
        has_input = self._usable(present)
        (rows,) = np.nonzero(has_input & np.array([each is None for each in problems], bool))
        self._tell_lacking(table, problems, has_input)
        found = self._compute(prepared, present, rows)
        for row, problem in zip(rows.tolist(), found.problems, strict=True):
            problems[row] = problem
        places = np.full(table.num_rows, -1)
        places[rows] = np.arange(len(rows))
        take = pa.array(places, mask=places < 0)
        for name, column in found.columns.items():
            table = table.append_column(f"{self.servable.name}.{name}", column.take(take))
        table = table.append_column(f"{self.servable.name}.{ERROR}", pa.array(problems, pa.string()))
        return table.drop_columns(list(self.servable.ended_columns()))

    def _tell_lacking(self, table: pa.Table, problems: list[str | None], has_input: Bools) -> None:
        """Report, for rows without any of the optional inputs, which servable failed to make one."""
        for declared in self.inputs.values():
            if not (declared.optional and comes_from_servable(declared)):
                continue
            giver = (declared.of or "").partition(".")[0]
            for row, failed in enumerate(table[f"{giver}.{ERROR}"].to_pylist()):
                if failed and not has_input[row]:
                    problems[row] = problems[row] or self._no_input(giver, failed)

    def _no_input(self, giver: str, failed: str) -> str:
        what = f"{HUNG} it may" if HUNG in failed else "failed"
        return f"{self.servable.where()}: no input, as {giver} {what} on this row"

    def _input(self, table: pa.Table, declared: InputColumn, problems: list[str | None]) -> PreparedInput:
        """Take an input from decode's columns or from the dataset, or make it from another servable's column."""
        address = declared.of or ""
        if comes_from_servable(declared):
            giver = address.partition(".")[0]
            for row, failed in enumerate(table[f"{giver}.{ERROR}"].to_pylist()):
                if failed and self.servable.is_part:
                    problems[row] = failed
                elif failed and not declared.optional:
                    problems[row] = self._no_input(giver, failed)
            column = _to_array(table, address)
            if isinstance(declared, ColumnInput):
                return PreparedInput(column)
            made = self._preparer.make(declared, column.to_pylist())
            for row, problem in made.problems.items():
                problems[row] = f"{self.servable.where()}: {address}: {problem}"
            return made
        if isinstance(declared, ColumnInput):
            return PreparedInput(self._as_declared(_to_array(table, CARRIED + address), declared))
        name = decoded_name(declared)
        return PreparedInput(
            _to_array(table, name), _to_array(table, name + GRID) if name + GRID in table.column_names else None
        )

    def _as_declared(self, column: pa.Array, declared: ColumnInput) -> pa.Array:
        """Convert a dataset's column to the declared type; raises `ServableError` if it has another one."""
        expected = declared.arrow_type()
        try:
            return column.cast(expected)
        except pa.ArrowException as error:
            raise ServableError(
                f"{self.servable.where()}: column {declared.of!r} of the dataset is {column.type}, and the input takes "
                f"{expected} ({one_line(error)}); declare the type that it has"
            ) from None

    def _usable(self, present: Mapping[str, Bools]) -> Bools:
        required = [present[name] for name, declared in self.inputs.items() if not declared.optional]
        optional = [present[name] for name, declared in self.inputs.items() if declared.optional]
        usable: Bools = np.logical_and.reduce(required) if required else np.logical_or.reduce(optional)
        return usable

    def _compute(
        self, prepared: Mapping[str, PreparedInput], present: Mapping[str, Bools], rows: Any
    ) -> CheckedOutputs:
        size, parts = self.servable.batch_size, []
        for start in range(0, len(rows), size):
            chosen = rows[start : start + size]
            columns: dict[str, pa.Array] = {}
            for name, each in prepared.items():
                grid = each.grid.take(pa.array(chosen)) if each.grid is not None else None
                columns |= bind(name, self.inputs[name], each.column.take(pa.array(chosen)), grid)
            batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
            parts.append(self._check(batch, {name: there[chosen] for name, there in present.items()}))
        return _join([*parts, self._nothing(0, [])])

    def _check(self, batch: pa.RecordBatch, present: Mapping[str, Bools]) -> CheckedOutputs:
        """Compute a batch; if that raises, bisect it until the failing rows are isolated."""
        if self._lost is not None:
            return self._nothing(batch.num_rows, [self._lost] * batch.num_rows)
        returned, problem = self._try(batch)
        if returned is not None:
            try:
                return check_outputs(self.servable.where(), returned, self.outputs, self._expect(present))
            except ServableError as error:
                problem = str(error)
        elif self._lost is None and batch.num_rows > 1:
            half = batch.num_rows // 2
            pieces = (slice(0, half), slice(half, batch.num_rows))
            return _join(
                [
                    self._check(
                        batch.slice(piece.start, piece.stop - piece.start),
                        {name: there[piece] for name, there in present.items()},
                    )
                    for piece in pieces
                ]
            )
        return self._nothing(batch.num_rows, [problem] * batch.num_rows)

    def _try(self, batch: pa.RecordBatch) -> tuple[pa.Table | None, str | None]:
        """Compute, or return why not. The error and what it holds are freed before its rows are retried."""
        try:
            rows = f"a call of {batch.num_rows} rows"
            return self._in_time(rows, CALL_S, self._computation, batch), None
        except RunFailedError:
            raise
        except ServableError as error:
            self._lost = str(error)
            return None, self._lost
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of a framework or the user's own code, about rows
            return None, f"{self.servable.where()}: {one_line(error)}"

    def _expect(self, present: Mapping[str, Bools]) -> dict[str, Bools]:
        """Return which rows must have each output: those with the inputs that it is made of."""
        required = [name for name, declared in self.inputs.items() if not declared.optional]
        everywhere = np.ones(len(next(iter(present.values()))), bool)
        return {
            name: np.logical_and.reduce([everywhere, *(present[each] for each in output.of or required)])
            for name, output in self.outputs.items()
        }

    def _nothing(self, num_rows: int, problems: list[str | None]) -> CheckedOutputs:
        return CheckedOutputs(
            {name: pa.nulls(num_rows, output.arrow_type()) for name, output in self.outputs.items()}, problems
        )


def _join(parts: list[CheckedOutputs]) -> CheckedOutputs:
    columns = {name: pa.concat_arrays([part.columns[name] for part in parts]) for name in parts[0].columns}
    return CheckedOutputs(columns, [problem for part in parts for problem in part.problems])


def _to_array(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    return column if isinstance(column, pa.Array) else pa.concat_arrays(column.chunks)


def _is_there(column: pa.Array) -> Bools:
    there: Bools = column.is_valid().to_numpy(zero_copy_only=False)
    return there
