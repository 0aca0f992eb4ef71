"""Patches of torch, timm and transformers, and the switch and the version guard of all patches of this project.

A patch names the versions that it was tested with. Outside of them it is skipped, with one line in the log, and the
library runs as it is. Patches that only save time are switched off together: `fast_start = false` in a configuration,
or EMBEDDER_FAST_START=0 in the environment, which also holds before a configuration is read.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

FAST_START_VARIABLE = "EMBEDDER_FAST_START"

Tested = tuple[tuple[str, str], ...]
"""Packages that a patch reaches into, each with the versions that it was tested with, as a version specifier."""

log = logging.getLogger(__name__)


def is_fast_start() -> bool:
    """Whether this process applies the patches that only save time."""
    return os.environ.get(FAST_START_VARIABLE, "1") != "0"


@contextmanager
def fast_start(enabled: bool) -> Iterator[None]:
    """Switch the patches that only save time off in the block, also in the processes that it starts.

    Args:
        enabled: leaves everything as it is: what the environment has switched off stays off.
    """
    if enabled:
        yield
        return
    before = os.environ.get(FAST_START_VARIABLE)
    os.environ[FAST_START_VARIABLE] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FAST_START_VARIABLE]
        else:
            os.environ[FAST_START_VARIABLE] = before


def saves_time(patch: str, tested: Tested) -> bool:
    """Whether to apply a patch that only saves time: it is switched on, and was tested with the installed versions.

    Args:
        patch: names the patch in the log.
        tested: the versions.
    """
    return is_fast_start() and is_tested(patch, tested)


@lru_cache
def is_tested(patch: str, tested: Tested, consequence: str = "") -> bool:
    """Whether a patch was tested with the installed versions; logs one line in a process where it was not.

    Args:
        patch: names the patch in the log.
        tested: the versions; a package that is not installed is no obstacle.
        consequence: of skipping a patch that is needed for more than speed; the line is a warning then.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    for package, versions in tested:
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        try:
            is_known = installed in SpecifierSet(versions, prereleases=True)
        except InvalidVersion:  # of a private build
            is_known = False
        if not is_known:
            level, then = (logging.WARNING, f"; {consequence}") if consequence else (logging.INFO, "")
            log.log(level, f"{patch} is skipped: tested with {package} {versions}, not with {installed}{then}")
            return False
    return True


COMPILER = "torch._dynamo"
CALLED_LATER = {
    f"{COMPILER}.utils": ("is_compile_supported",),
    f"{COMPILER}._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
}
# Both ends of a range were tried, not each version between them.
TESTED_WITHOUT_COMPILER: Tested = (
    ("torch", ">=2.11,<2.16"),
    ("torchvision", ">=0.26,<0.30"),
    ("timm", ">=1.0.31,<1.1"),
    ("transformers", "==5.23.*"),
)


@contextmanager
def deferred_compiler() -> Iterator[None]:
    """Import timm and transformers in the block without torch's compiler, which is imported when something asks it.

    They import it to mark functions that it must leave alone and to ask it later, timm through torchvision: 1 to 1.5 s
    of the 5 s of CPU that a stage's start takes, and few stages compile anything. During the block, other modules stand
    in its place. Their names look up the real ones when they are called, and any other name imports the real compiler
    at once. Nothing is replaced where the compiler is imported already.

    Source: torch 2.15 `compiler.disable`, torchvision 0.29 `ops/roi_align.py`, transformers 5.23 `masking_utils.py`.
    """
    if COMPILER in sys.modules or not saves_time("the import without torch's compiler", TESTED_WITHOUT_COMPILER):
        yield
        return
    sys.modules.update(_stand_ins())
    try:
        yield
    finally:
        _remove_stand_ins()


class _StandIn(ModuleType):
    """Module in `sys.modules` under a compiler module's name; names that it doesn't hold are the real module's."""

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
    """Mark a function as torch itself does for a compiler that is not imported yet."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(fn, recursive)


def _assume_constant_result(fn: Any) -> Any:
    """Mark a function as `torch._dynamo.assume_constant_result` does."""
    fn._dynamo_marked_constant = True
    return fn


def num_graphs() -> int:
    """Count the graphs that torch's compiler has made in this process; 0 where it is not imported."""
    counters = getattr(sys.modules.get(f"{COMPILER}.utils"), "counters", {})
    return int(counters["stats"]["unique_graphs"]) if "stats" in counters else 0


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Keep what native code prints from the terminal; Python's exceptions pass."""
    sys.stderr.flush()
    terminal = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nowhere)
