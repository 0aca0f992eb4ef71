"""Servables: models of any framework behind one contract, each kind in its own file.

`make_servable` reads one from a section of a configuration; no framework is imported before `Servable.load`.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from embedder.entry_points import RUNNERS, find_plugins, load_point
from embedder.servables.servable_errors import ServableError

if TYPE_CHECKING:
    from embedder.servables.servable import Servable

KINDS = {
    "towers": "embedder.servables.towers:TowersServable",
    "python": "embedder.servables.python:PythonServable",
}
"""Class of each built-in kind; plug-ins add more (`embedder.entry_points.RUNNERS`)."""


def find_kinds() -> dict[str, EntryPoint]:
    """Return the kinds of this installation by name, without importing them."""
    own = {name: EntryPoint(name, value, RUNNERS) for name, value in KINDS.items()}
    return {"towers": own["towers"], **find_plugins(RUNNERS), **own}


def make_servable(settings: "Mapping[str, Any] | Servable") -> "Servable":
    """Read a servable from a section of a configuration, such as a `[[model]]`.

    Raises a ServableError if the kind is unknown or can't be imported, or a key is unknown, missing, or breaks its
    rule.
    """
    from embedder.servables.servable import Servable

    if isinstance(settings, Servable):
        return settings
    where = f"servable {settings.get('name', '(without a name)')}"
    kind = settings.get("kind", "towers")
    kinds = find_kinds()
    if kind not in kinds:
        raise ServableError(f"{where}: kind = {kind!r}: found no such kind; write one of {', '.join(kinds)}")
    servable_kind = load_point(kinds[kind], f"{where}: kind = {kind!r}", ServableError)
    try:
        found: Servable = servable_kind.model_validate(settings)
    except ValidationError as error:
        raise ServableError(f"{where}: {_describe_rules(error)}") from None
    return found


def _describe_rules(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or 'section'} = {_short(item['input'])}: "
        f"{item['msg'].removeprefix('Value error, ')}"
        for item in error.errors()
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
