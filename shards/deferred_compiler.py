"""timm and transformers without torch's compiler: it is imported when something asks it, and here nothing does.

They import it to mark what it must leave alone and to ask it later, timm through torchvision: 1 to 1.5 s of the 5 s of
CPU that a stage's start takes. While they are imported, other modules stand in its place. Their names look up the real
ones when they are called, and any other name brings the real compiler at once.

Source: torch 2.15 `compiler.disable`, torchvision 0.29 `ops/roi_align.py`, transformers 5.23 `masking_utils.py`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from torch._compile import _disable_dynamo

COMPILER = "torch._dynamo"
CALLED_LATER = {
    f"{COMPILER}.utils": ("is_compile_supported",),
    f"{COMPILER}._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
}


@contextmanager
def deferred_compiler() -> Iterator[None]:
    """Import libraries in the block as if the compiler were there; nothing happens where it is."""
    if COMPILER in sys.modules:
        yield
        return
    sys.modules.update(_stand_ins())
    try:
        yield
    finally:
        _remove_stand_ins()


class _StandIn(ModuleType):
    """In `sys.modules` under a compiler module's name; every name that it doesn't hold is the real module's."""

    def __getattr__(self, name: str) -> Any:
        is_package = self.__name__ == COMPILER
        if name.startswith("__") and not (is_package and name == "__path__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


def _stand_ins() -> dict[str, ModuleType]:
    compiler = _StandIn(COMPILER)
    # What may be taken into a graph whole is left alone instead: transformers marks FP8 kernels so.
    marks = {"disable": _disable, "allow_in_graph": _disable, "assume_constant_result": _assume_constant_result}
    vars(compiler).update(marks)
    found: dict[str, ModuleType] = {COMPILER: compiler}
    for module, names in CALLED_LATER.items():
        found[module] = _StandIn(module)
        vars(found[module]).update({name: _later(module, name) for name in names})
        setattr(compiler, module.rpartition(".")[2], found[module])
    return found


def _remove_stand_ins() -> None:
    for name in (COMPILER, *CALLED_LATER):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]


def _real(module: str) -> ModuleType:
    _remove_stand_ins()
    return import_module(module)


def _later(module: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(_real(module), name)(*arguments, **options)

    return call


def _disable(fn: Any = None, recursive: bool = True, **_: Any) -> Any:
    """Torch's own way to mark a function for a compiler that is not there yet."""
    return _disable_dynamo(fn, recursive)


def _assume_constant_result(fn: Any) -> Any:
    """As `torch._dynamo.assume_constant_result` does."""
    fn._dynamo_marked_constant = True
    return fn
