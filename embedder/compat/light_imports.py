"""Imports transformers and timm with half the CPU, for a process that only computes a shard, and Arrow without pandas.

transformers imports torch's tensors on many devices and its flexible attention if available, which a shard never uses:
0.7 s of CPU, half of it for sympy. It reads its 1,600 files of models twice for the names in them, 0.3 s each time.
timm imports Weights & Biases if it is installed: 0.2 to 0.5 s. And Python collects garbage after every few hundred new
objects, although importing creates a million that all stay: another 0.4 s. Arrow imports pandas for the first array
that it makes, to distinguish frames from lists: 0.13 s.

Only for our own processes: the patched functions of transformers stay replaced.
"""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from shards.compat import Private, is_fast_start

UNUSED = ("is_torch_distributed_available", "is_torch_flex_attn_available")
QUESTIONS = Private(
    "the import of transformers without distributed tensors",
    tuple(f"transformers.utils.import_utils:{name}" for name in UNUSED),
    "transformers 5.23.0",
)
MODEL_NAMES = Private(
    "the import of transformers that reads its models' files once",
    ("transformers.utils.import_utils:create_import_structure_from_path(module_path)",),
    "transformers 5.19.0 to 5.23.0",
)
TRACKER, FRAMES = "wandb", "pandas"


def is_command() -> bool:
    """Whether this process is the command `embedder`, where nobody else's code uses transformers."""
    main = sys.modules["__main__"]
    return "embedder" in (getattr(main, "__package__", None), Path(getattr(main, "__file__", None) or "-").stem)


def spare_pandas() -> None:
    """Make Arrow's first array without pandas, if this process is a command; what reads or makes frames imports it."""
    if is_fast_start() and is_command() and FRAMES not in sys.modules:
        import pyarrow as pa

        with _without(FRAMES):
            pa.array([])


@contextmanager
def sparing_imports(*, with_text: bool) -> Iterator[None]:
    """Import in the block only what a shard needs; transformers only if `with_text`."""
    if not is_fast_start():
        yield
        return
    gc.disable()
    try:
        if with_text and QUESTIONS.saves_time():
            _spare_transformers()
        with nullcontext() if TRACKER in sys.modules else _without(TRACKER):
            yield
    finally:
        gc.freeze()
        gc.enable()


def _spare_transformers() -> None:
    from transformers import utils
    from transformers.utils import import_utils

    for module in (utils, import_utils):  # both have the function
        vars(module).update(dict.fromkeys(UNUSED, _no))
    if "transformers.models" not in sys.modules and MODEL_NAMES.saves_time():
        _read_models_once(import_utils)


def _no() -> bool:
    return False


def _read_models_once(import_utils: ModuleType) -> None:
    """Let `transformers.models` take what `transformers` has read of the same folder, which is cached by its path."""
    read = import_utils.create_import_structure_from_path
    models = Path(sys.modules["transformers"].__file__ or "").parent / "models"

    def read_once(module_path: str | Path) -> object:
        return read(models if Path(module_path) == models / "__init__.py" else module_path)

    import_utils.create_import_structure_from_path = read_once  # type: ignore[attr-defined]


@contextmanager
def _without(package: str) -> Iterator[None]:
    """Let imports of a package by this thread fail in the block; other threads may import it meanwhile.

    `find_spec` answers as ever: accelerate asks so at its import whether the package is installed, and catches nothing.
    """
    finder = _Hiding(package)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Hiding(MetaPathFinder, Loader):
    """Finds nothing but one package for one thread, and refuses to load it."""

    def __init__(self, package: str) -> None:
        self._package, self._thread = package, threading.get_ident()

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._package or threading.get_ident() != self._thread:
            return None
        if (spec := PathFinder.find_spec(fullname)) is not None:
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Never called, but wanted by `import`."""
