"""Program of a step: imports the user's class or function and calls it with batches, in a process of its own.

Executed by its path in the child of `embedder.servables.interpreter`; it imports nothing of this package.
"""

import importlib
import importlib.util
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa


class StepFunction:
    """Class (`embedder.Stage`) or function of the user's own, as a program of a servable has it."""

    def __init__(self, place: str, function: str, settings: dict[str, Any]) -> None:
        """Keep what to import.

        Args:
            place: absolute path of a Python file, or name of a module.
            function: name of the class or function there.
            settings: its keyword arguments.
        """
        self._place, self._name, self._settings = place, function, settings
        self._stage: Any = None

    def load(self, device: str) -> None:
        """Import it; make an instance of a class, and set it up.

        Raises:
            AttributeError: there is no such class or function.
            Exception: as the import, or the class, raises it.
        """
        is_file = self._place.endswith(".py")
        module = _import_file(Path(self._place)) if is_file else importlib.import_module(self._place)
        found = getattr(module, self._name, None)
        if isinstance(found, type) and hasattr(found, "process"):
            self._stage = found(**self._settings)
            self._stage.load(device)
            self._call = self._stage.process
        elif callable(found):
            self._call = partial(found, **self._settings)
        else:
            functions = sorted(name for name, value in vars(module).items() if isinstance(value, types.FunctionType))
            raise AttributeError(
                f"{self._place} has no function {self._name!r}; it has {', '.join(functions) or 'none'}"
            )

    def __call__(self, batch: pa.RecordBatch) -> Any:
        """Call it.

        Raises:
            Exception: as the user's code raises it.
        """
        return self._call(batch)

    def close(self) -> None:
        """Close the instance of a class."""
        if self._stage is not None:
            self._stage.close()


def _import_file(path: Path) -> types.ModuleType:
    """Import a file under a name that hides no installed module; it may import its neighbours by their names."""
    sys.path.append(str(path.parent))
    name = "own_step_" + path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
