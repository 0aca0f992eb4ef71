"""Private names of torch, timm and transformers; the switch and the check for all patches of this project.

A patch names what it reaches into (`Private`). If the installed library lacks such a name, the patch is left out, its
fallback does the work, and one log line says what that costs. Patches that only save time are switched off together: by
`fast_start = false` in a configuration, or by EMBEDDER_FAST_START=0 in the environment, which also applies before a
configuration is read.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FAST_START_VARIABLE = "EMBEDDER_FAST_START"

log = logging.getLogger(__name__)


def is_fast_start() -> bool:
    """Whether this process applies the patches that only save time."""
    return os.environ.get(FAST_START_VARIABLE, "1") != "0"


@contextmanager
def fast_start(enabled: bool) -> Iterator[None]:
    """Switch off the patches that only save time, in the block and in the processes that it starts.

    With `enabled` true nothing changes: what the environment has switched off stays off.
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


@dataclass(frozen=True)
class Private:
    """Private names of a library that one patch reaches into, and what is lost without them.

    Attributes:
        purpose: of the patch, for the log.
        names: `module:attribute.attribute`, `module:function(parameter, parameter)`, or `package/file.py:text`,
            which is searched in the file, because importing it would cost what the patch saves.
        seen_in: versions in which the names have the assumed meaning; only informative.
        loss: what the user loses without the patch, and how much; empty: only time.
    """

    purpose: str
    names: tuple[str, ...]
    seen_in: str
    loss: str = ""

    def is_there(self) -> bool:
        """Whether the installed libraries have all names; logs a missing one once per process."""
        fallback = self.describe_fallback()
        if fallback is not None:
            _log_once(self, fallback)
        return fallback is None

    def describe_fallback(self) -> str | None:
        """Name what the installed library lacks, and what that costs; None if nothing is missing."""
        missing = next((name for name in self.names if not has_name(name)), None)
        if missing is None:
            return None
        package = re.split(r"[.:/]", missing)[0]
        try:
            installed = version(package)
        except PackageNotFoundError:
            installed = "(not installed)"
        return f"{self.purpose}: off, as {package} {installed} has no {missing}; {self.loss or 'it only saves time'}"

    def saves_time(self) -> bool:
        """Whether to apply a patch that only saves time: it is switched on, and its names exist."""
        return is_fast_start() and self.is_there()


@cache
def _log_once(private: Private, fallback: str) -> None:
    log.log(logging.WARNING if private.loss else logging.INFO, fallback)


@cache
def has_name(name: str) -> bool:
    """Whether the installed libraries have a name, written as in `Private.names`."""
    place, _, path = name.partition(":")
    if "/" in place:
        return _has_text(place, path)
    try:
        found: Any = import_module(place)
    except ImportError:
        return False
    path, _, parameters = path.partition("(")
    for attribute in filter(None, path.split(".")):
        if not hasattr(found, attribute):
            return isinstance(found, type) and attribute in _names_in(found)
        found = getattr(found, attribute)
    return set(re.findall(r"\w+", parameters)) <= (set(signature(found).parameters) if parameters else set())


def _has_text(place: str, text: str) -> bool:
    package, _, file = place.partition("/")
    spec = find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    return any(text in path.read_text() for folder in folders if (path := Path(folder, file)).exists())


def _names_in(kind: type) -> set[str]:
    """Return the names that the methods of a class use, including the attributes that they set."""
    methods = [each for base in kind.__mro__ for each in vars(base).values() if isinstance(each, FunctionType)]
    annotated = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}
    return annotated.union(*(method.__code__.co_names for method in methods))


COMPILER = "torch._dynamo"
CALLED_LATER = {
    f"{COMPILER}.utils": ("is_compile_supported",),
    f"{COMPILER}._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
}
DEFERRED_COMPILER = Private(
    "the import without torch's compiler",
    (
        "torch._compile:_disable_dynamo(fn, recursive)",
        "torch/_dynamo/decorators.py:_dynamo_marked_constant",
        "torch/_dynamo/utils.py:def is_compile_supported",
        "torch/_dynamo/_trace_wrapped_higher_order_op.py:class TransformGetItemToIndex",
    ),
    "torch 2.8.0 to 2.15.0",
)


@contextmanager
def deferred_compiler() -> Iterator[None]:
    """Import timm and transformers in the block without torch's compiler, which is imported on first use.

    They import it to mark functions that it must skip and to query it later, timm through torchvision: 1 to 1.5 s of
    the 5 s of CPU that a stage's start takes, and few stages compile anything. During the block, stand-in modules
    replace it: their names look up the real ones when called, and any other name imports the real compiler at once.
    Nothing is replaced if the compiler is already imported.

    Source: torch 2.15 `compiler.disable`, torchvision 0.29 `ops/roi_align.py`, transformers 5.23 `masking_utils.py`.
    """
    if COMPILER in sys.modules or not DEFERRED_COMPILER.saves_time():
        yield
        return
    sys.modules.update(_stand_ins())
    try:
        yield
    finally:
        _remove_stand_ins()


class _StandIn(ModuleType):
    """Module in `sys.modules` under a compiler module's name; names that it lacks are looked up in the real module."""

    def __getattr__(self, name: str) -> Any:
        is_package = self.__name__ == COMPILER
        if name.startswith("__") and not (is_package and name == "__path__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


def _stand_ins() -> dict[str, ModuleType]:
    compiler = _StandIn(COMPILER)
    # What may be put whole into a graph is skipped instead: transformers marks FP8 kernels so.
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
    """Mark a function as torch itself does before its compiler is imported."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(fn, recursive)


def _assume_constant_result(fn: Any) -> Any:
    """Mark a function as `torch._dynamo.assume_constant_result` does."""
    fn._dynamo_marked_constant = True
    return fn


def num_graphs() -> int:
    """Count the graphs that torch's compiler has made in this process; 0 if it is not imported."""
    counters = getattr(sys.modules.get(f"{COMPILER}.utils"), "counters", {})
    return int(counters["stats"]["unique_graphs"]) if "stats" in counters else 0


INT8_PRODUCT = Private(
    "products of int8 matrices",
    ("torch:_int_mm",),
    "torch 2.8.0 to 2.15.0",
    "int8 layers compute in float64: the same values, ten times slower and more",
)


def int8_product(x_RI: "torch.Tensor", weight_OI: "torch.Tensor") -> "torch.Tensor":
    """Multiply int8 (R, I) by the transposed int8 (O, I); int32 (R, O)."""
    import torch

    if INT8_PRODUCT.is_there():
        return torch._int_mm(x_RI, weight_OI.t())
    return (x_RI.double() @ weight_OI.t().double()).to(torch.int32)  # exact up to 2^53, half a million million columns


def with_positions(tower: Any, patches_FLD: "torch.Tensor") -> "torch.Tensor":
    """Append class and register tokens and add absolute positions, as timm's ViT and EVA do: (F, L, D) to (F, L, D).

    Seen in timm 1.0.22 to 1.0.31. The fallback is the same sum, without patch dropout, which only training uses.
    """
    if hasattr(tower, "_pos_embed"):
        found = tower._pos_embed(patches_FLD)
        tokens: torch.Tensor = found[0] if isinstance(found, tuple) else found  # EVA's come with rotary positions
        return tokens
    return _sum_positions(tower, patches_FLD)


def _sum_positions(tower: Any, x_FLD: "torch.Tensor") -> "torch.Tensor":
    import torch

    tokens = [each.expand(len(x_FLD), -1, -1) for each in (tower.cls_token, tower.reg_token) if each is not None]
    if tower.pos_embed is None:
        return torch.cat([*tokens, x_FLD], dim=1)
    if tower.no_embed_class:
        x_FLD = torch.cat([*tokens, x_FLD + tower.pos_embed], dim=1)
    else:
        x_FLD = torch.cat([*tokens, x_FLD], dim=1) + tower.pos_embed
    dropped: torch.Tensor = tower.pos_drop(x_FLD)
    return dropped


def silence_onnx_graphs() -> None:
    """Keep torch's tracing exporter from printing the whole graph when it doesn't know an operator.

    Seen in torch 2.8.0 to 2.15.0. Without the name, the graph is printed; the export ends the same way.
    """
    import torch

    show_graphs = getattr(torch._C, "_jit_set_onnx_log_enabled", None)
    if show_graphs is not None:
        show_graphs(False)


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Hide what native code prints to the terminal; Python's exceptions pass."""
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


def mark_any_rows(x: "torch.Tensor") -> None:
    """Tell torch's compiler that the first dimension has any size, also where it equals another one by chance.

    Else such a batch has its own graph, as the compiler takes equal sizes for one.
    """
    import torch._dynamo

    torch._dynamo.maybe_mark_dynamic(x, 0)
