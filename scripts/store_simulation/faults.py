"""Faults that can be planted in the store's protocol, one at a time: a simulator that finds none proves nothing.

Each replaces some text of a function of the store, as a programmer might have written it.
"""

import importlib
import inspect
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any, NamedTuple


class PlantedFault(NamedTuple):
    """Fault in one function."""

    name: str  # for `--plant`
    description: str  # what the store does wrong
    place: str  # `module:function` or `module:Class.method`, below `embedder.store`
    old: str  # text of the function
    new: str  # what stands in its place


FAULTS = tuple(
    PlantedFault(name, **each)
    for name, each in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
)


def plant(name: str) -> None:
    fault = next((each for each in FAULTS if each.name == name), None)
    if fault is None:
        raise LookupError(f"fault {name!r}: there is none of that name; --list-faults shows them")
    module_name, _, path = fault.place.partition(":")
    module_name = (
        f"embedder.{module_name[3:].replace('/', '.')}"
        if module_name.startswith("../")
        else f"embedder.store.{module_name}"
    )
    module = importlib.import_module(module_name)
    owner: Any = module
    *outer, last = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    function = getattr(owner, last)
    source = textwrap.dedent(inspect.getsource(function))
    old, new = (textwrap.dedent(each) if outer else each for each in (fault.old, fault.new))
    if old not in source:
        raise LookupError(f"fault {name}: {fault.place} has no text {fault.old!r} any more")
    changed: dict[str, Any] = {}
    exec(compile(source.replace(old, new), module.__file__ or "", "exec"), module.__dict__, changed)
    setattr(owner, last, changed[last])
    for other in list(sys.modules.values()):
        if not outer and getattr(other, last, None) is function:
            setattr(other, last, changed[last])
