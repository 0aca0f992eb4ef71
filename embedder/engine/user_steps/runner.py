"""Program of a step: imports the user's function and calls it with batches, in a process of its own.

Executed by its path in the child of `embedder.servables.interpreter`; it imports nothing of this package.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa


class StepFunction:
    """Function of the user's own, as a program of a servable has it."""

    def __init__(self, place: str, function: str, settings: dict[str, Any]) -> None:
        """Keep what to import.

        Args:
            place: absolute path of a Python file, or name of a module.
            function: its name there.
            settings: its keyword arguments.
        """
        self._place, self._function_name, self._settings = place, function, settings

    def load(self, device: str) -> None:
        """Import the function.

        Raises:
            AttributeError: there is no such function.
            Exception: as the import raises it.
        """
        del device
        is_file = self._place.endswith(".py")
        module = _import_file(Path(self._place)) if is_file else importlib.import_module(self._place)
        self._function = getattr(module, self._function_name, None)
        if not callable(self._function):
            functions = sorted(name for name, value in vars(module).items() if isinstance(value, types.FunctionType))
            raise AttributeError(
                f"{self._place} has no function {self._function_name!r}; it has {', '.join(functions) or 'none'}"
            )

    def __call__(self, batch: pa.RecordBatch) -> Any:
        """Call the function.

        Raises:
            Exception: as the function raises it.
        """
        return self._function(batch, **self._settings)  # type: ignore[misc]  # it is callable since `load`


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
