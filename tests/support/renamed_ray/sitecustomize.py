"""A Ray that has renamed `ray.data._internal` and `Dataset.map_batches_internal`, in each process that finds this file.

To be put first in PYTHONPATH. The project's own code can't import or call the two; Ray itself continues.
"""

import builtins
import importlib
import sys

RENAMED = "ray.data._internal"
METHOD = "map_batches_internal"
OWN = ("embedder", "shards", "index")

_import, _import_module = builtins.__import__, importlib.import_module


def _refuse(name, importer):
    if name.startswith(RENAMED) and importer.partition(".")[0] in OWN:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _rename_method():
    """Rename the method in its class, and in the code that calls it."""
    dataset = getattr(sys.modules.get("ray.data.dataset"), "Dataset", None)
    if dataset is None or METHOD not in vars(dataset):
        return
    setattr(dataset, f"{METHOD}_renamed", getattr(dataset, METHOD))
    delattr(dataset, METHOD)
    names = {METHOD: f"{METHOD}_renamed"}
    for module, kind, caller in (("dataset", "Dataset", "map_batches"), ("grouped_data", "GroupedData", "map_groups")):
        function = getattr(getattr(sys.modules.get(f"ray.data.{module}"), kind, None), caller, None)
        if function is not None:
            function.__code__ = function.__code__.replace(
                co_names=tuple(names.get(name, name) for name in function.__code__.co_names)
            )


def _checked_import(name, globals=None, locals=None, fromlist=(), level=0):
    _refuse(name, (globals or {}).get("__name__") or "")
    module = _import(name, globals, locals, fromlist, level)
    _rename_method()
    return module


def _checked_import_module(name, package=None):
    _refuse(name, sys._getframe(1).f_globals.get("__name__", ""))
    module = _import_module(name, package)
    _rename_method()
    return module


builtins.__import__, importlib.import_module = _checked_import, _checked_import_module
