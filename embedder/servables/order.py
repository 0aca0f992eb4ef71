"""Order of the servables of a run: each after those whose outputs it needs."""

from collections.abc import Collection, Sequence
from graphlib import CycleError, TopologicalSorter

from embedder.servables.checks import format_shape
from embedder.servables.servable import Servable
from embedder.servables.servable_columns import ColumnInput, InputColumn, OutputColumn
from embedder.servables.servable_errors import ServableError

ERROR = "error"
"""Name of the output column, NAME.error, that says why a row has no outputs."""


def order_servables(servables: Sequence[Servable], columns: Collection[str] | None = None) -> list[Servable]:
    """Order the servables of a run so that each follows those it needs; independent ones keep their order.

    `columns` are those of the dataset; None where they aren't known yet. Raises `ServableError` if names collide, a
    needed column is missing, an output's name is taken, or servables need each other.
    """
    by_name: dict[str, Servable] = {}
    for servable in servables:
        if servable.name in by_name:
            raise ServableError(
                f"{servable.where()}: there is {by_name[servable.name].where()} already; give each its own name"
            )
        by_name[servable.name] = servable
    outputs = {name: servable.output_columns() for name, servable in by_name.items()}
    needs = {name: _needs(servable, by_name, columns) for name, servable in by_name.items()}
    for name, servable in by_name.items():
        _check_outputs(servable, outputs[name], columns)
        for input_name, column in servable.input_columns().items():
            giver, _, output = (column.of or "").rpartition(".")
            if giver:
                _check_fits(servable, input_name, column, outputs[giver].get(output), [*outputs[giver]])
    try:
        return [by_name[name] for name in TopologicalSorter(needs).static_order()]
    except CycleError as error:
        ring = " -> ".join(reversed(error.args[1]))
        raise ServableError(f"servables need each other's outputs in a ring ({ring}); let one need none") from None


def _needs(servable: Servable, by_name: Collection[str], columns: Collection[str] | None) -> list[str]:
    found = []
    for name, column in servable.input_columns().items():
        giver, _, output = (column.of or "").rpartition(".")
        if giver and giver not in by_name:
            raise ServableError(
                f"{servable.where()}: input {name}: of = {column.of!r}: there is no servable {giver!r}; "
                f"there are {', '.join(by_name)}"
            )
        if column.of and not giver and columns is not None and output not in columns:
            raise ServableError(
                f"{servable.where()}: input {name}: of = {column.of!r}: the dataset has no such column; "
                f"it has {', '.join(columns)}"
            )
        if giver:
            found.append(giver)
    return found


def _check_outputs(servable: Servable, outputs: Collection[str], columns: Collection[str] | None) -> None:
    for output in (*outputs, ERROR):
        if output == ERROR and ERROR in outputs:
            raise ServableError(
                f"{servable.where()}: output {ERROR!r}: that column says why a row has none; give it another name"
            )
        if f"{servable.name}.{output}" in (columns or ()):
            raise ServableError(
                f"{servable.where()}: output {output}: the dataset has a column '{servable.name}.{output}' already; "
                "rename one of the two"
            )


def _check_fits(
    servable: Servable, name: str, column: InputColumn, output: OutputColumn | None, given: Sequence[str]
) -> None:
    """Check that an input can be made from another servable's output."""
    where = f"{servable.where()}: input {name}: of = {column.of!r}"
    if output is None:
        raise ServableError(f"{where}: that servable has no such output; it has {', '.join(given)}")
    if output.arrow_type() != column.arrow_type():
        raise ServableError(
            f"{where}: it is {output.type} of shape {format_shape(output.shape)}, and the input takes "
            f"{column.arrow_type()}; change one of the two"
        )
    if isinstance(column, ColumnInput):
        pairs = zip(column.shape, output.shape, strict=True)
        if any(wanted not in ("any", found) for wanted, found in pairs):
            raise ServableError(
                f"{where}: its shape is {format_shape(output.shape)}, and the input takes "
                f"{format_shape(column.shape)}; change one of the two"
            )
