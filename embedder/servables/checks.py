"""Checks what a servable returns against its declaration: rows, columns, types, shapes, values.

A problem of the whole call raises; problems of single rows are reported per row, and the other rows keep their outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from embedder.servables.servable_columns import OutputColumn, Shape
from embedder.servables.servable_errors import ServableError

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class CheckedOutputs:
    """Outputs of a call, of the declared types; rows with a problem are null."""

    columns: dict[str, pa.Array]
    problems: list[str | None]
    """The problem of each row; None if there is none."""


def check_outputs(
    where: str, returned: pa.Table, declared: Mapping[str, OutputColumn], expected: Mapping[str, Bools]
) -> CheckedOutputs:
    """Check what one call returned; raises `ServableError` if it has other rows, columns or types than declared.

    `expected` has for each output a bool (B,): whether a row has the inputs that it is computed from.
    """
    num_rows = len(next(iter(expected.values())))
    _check_whole(where, returned, declared, num_rows)
    columns: dict[str, pa.Array] = {}
    problems: list[str | None] = [None] * num_rows
    for name, output in declared.items():
        columns[name] = _convert(where, name, returned[name].combine_chunks(), output)
        for row, problem in _row_problems(columns[name], output, expected[name]).items():
            problems[row] = problems[row] or f"{where}: {name}: {problem}"
    if any(problems):
        keep = pa.array([None if problem else row for row, problem in enumerate(problems)], pa.int64())
        columns = {name: column.take(keep) for name, column in columns.items()}
    return CheckedOutputs(columns, problems)


def _check_whole(where: str, returned: pa.Table, declared: Mapping[str, OutputColumn], num_rows: int) -> None:
    names = returned.column_names
    if missing := [name for name in declared if name not in names]:
        found = ", ".join(names) or "no column"
        raise ServableError(f"{where}: it returned {found}, and declares {missing[0]!r}; return each declared output")
    if extra := [name for name in names if name not in declared]:
        raise ServableError(
            f"{where}: it returned a column {extra[0]!r} that it doesn't declare; declare it, or drop it"
        )
    if twice := [name for name in declared if names.count(name) > 1]:
        raise ServableError(f"{where}: it returned {names.count(twice[0])} columns {twice[0]!r}; return one")
    if returned.num_rows != num_rows:
        raise ServableError(
            f"{where}: it returned {returned.num_rows} rows for {num_rows}; return one row for each, in their order"
        )


def _convert(where: str, name: str, column: pa.Array, output: OutputColumn) -> pa.Array:
    """Convert lists, strings and binaries of any layout to the declared one; no value changes."""
    expected = output.arrow_type()
    if column.type == expected:
        return column
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if not _same_values(column.type, expected):
        raise ServableError(
            f"{where}: {name}: it returned {column.type}, and declares {output.type} of shape "
            f"{format_shape(output.shape)}; return that type, or declare what it returns"
        )
    return column.cast(expected)


def _same_values(found: pa.DataType, expected: pa.DataType) -> bool:
    if kinds.is_null(found):  # only nulls, or empty lists
        return True
    if kinds.is_list(expected):
        is_list = kinds.is_list(found) or kinds.is_large_list(found) or kinds.is_fixed_size_list(found)
        return is_list and _same_values(found.value_type, expected.value_type)
    if kinds.is_string(expected):
        return bool(kinds.is_string(found) or kinds.is_large_string(found) or kinds.is_string_view(found))
    if kinds.is_large_binary(expected):
        return bool(kinds.is_binary(found) or kinds.is_large_binary(found) or kinds.is_binary_view(found))
    return bool(found == expected)


def _row_problems(column: pa.Array, output: OutputColumn, expected: Bools) -> dict[int, str]:
    is_null = column.is_null().to_numpy(zero_copy_only=False)
    problems = {
        int(row): "there is a value, and an input that it needs is missing"
        for row in np.nonzero(~is_null & ~expected)[0]
    }
    if not output.nullable:
        problems |= {
            int(row): "found nothing (null); return a value, or declare nullable"
            for row in np.nonzero(is_null & expected)[0]
        }
    values, rows = column, np.arange(len(column))
    for size in output.shape:
        kept = values.is_valid().to_numpy(zero_copy_only=False)
        values, rows = values.filter(pa.array(kept)), rows[kept]
        lengths: Ints = np.diff(values.offsets.to_numpy().astype(np.int64))
        if size != "any":
            for number in np.nonzero(lengths != size)[0]:
                found = f"found {lengths[number]} values in a list of {size}"
                problems.setdefault(
                    int(rows[number]), f"{found} (shape {format_shape(output.shape)}); return that shape"
                )
        values, rows = values.flatten(), np.repeat(rows, lengths)
        for row in rows[values.is_null().to_numpy(zero_copy_only=False)]:
            problems.setdefault(int(row), "found a null inside; return a value")
    if kinds.is_floating(values.type):
        finite = pc.fill_null(pc.is_finite(values), True).to_numpy(zero_copy_only=False)
        for row in np.unique(rows[~finite]):
            problems.setdefault(int(row), "found NaN or infinity; return finite numbers")
    return problems


def format_shape(shape: Shape) -> str:
    """Format a shape as in the configuration."""
    return f"[{', '.join(str(size) for size in shape)}]"
