"""A store's models besides the main one: each has its own folder with tables, index and runs, laid out like a store.

`STORE/models/NAME/` has no CURRENT.json and no lock. What is published of it is in `Current.models` of the store's own
CURRENT.json, so that all models of a publication become visible at once; the store's lock guards them all.
"""

from collections.abc import Mapping
from shlex import quote
from typing import Any

from embedder.errors import StoreError
from embedder.storage.printable import printable
from embedder.store.files import StoreFiles
from embedder.store.layout import MAIN, MODEL_NAME_RULE, Current, is_model_name

MODELS_FOLDER = "models"


class ModelFiles(StoreFiles):
    """View of a model's folder as a store's root; its publication and its lock are the store's."""

    def __init__(self, main: StoreFiles, model: str) -> None:
        super().__init__(f"{main.address}/{MODELS_FOLDER}/{model}")
        self._main, self._model = main, model
        self.backend, self.environment = main.backend.below(f"{MODELS_FOLDER}/{model}"), main.environment

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelFiles, (self._main, self._model)

    @property
    def main(self) -> StoreFiles:
        """Return the store that the model belongs to."""
        return self._main

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._model

    @property
    def option(self) -> str:
        """Command line options that select this model."""
        return f"--store {quote(self._main.address)} --model {self._model}"

    def confirm_lease(self) -> None:
        """Check before a commit that this process still holds any lock that it took; else LeaseLostError."""
        self._main.confirm_lease()


def model_folders(files: StoreFiles) -> list[str]:
    """Return the sorted names of models other than the main one that have files in a store, published or not."""
    return sorted(filter(is_model_name, {info.path.split("/")[1] for info in files.list(MODELS_FOLDER)}))


def model_files(files: StoreFiles, name: str) -> StoreFiles:
    """Return the view of a model's folder; the store itself for an empty name or `main`. StoreError on a bad name."""
    if name in ("", MAIN):
        return files.main
    if not is_model_name(name):
        raise StoreError(f"model {name!r}: no model has such a name; write {MODEL_NAME_RULE}")
    return ModelFiles(files.main, name)


def model_names(current: Current | None) -> tuple[str, ...]:
    """Return the sorted names of a publication's models other than the main one."""
    return tuple(sorted(current.models)) if current is not None else ()


def views(files: StoreFiles, current: Current | None) -> Mapping[str, StoreFiles]:
    """Return the views of all models of a publication by name; the store itself is first and has the empty name."""
    return {"": files.main} | {name: model_files(files, name) for name in model_names(current)}


def find_model(files: StoreFiles, current: Current, name: str) -> tuple[StoreFiles, Current]:
    """Return a model's view and part of a publication (empty or `main`: the main model); StoreError if absent."""
    if name in ("", MAIN):
        return files.main, current
    if name not in current.models:
        raise StoreError(
            f"store {files.main.address}: no model {printable(name, 100)!r} is published in it; it has "
            f"{', '.join([MAIN, *model_names(current)])}"
        )
    return model_files(files, name), current.models[name]


def check_has_vectors(view: StoreFiles, own: Current) -> None:
    """Raise StoreError if a model to search or index by has outputs other than vectors."""
    if own.has_vectors is not False:
        return
    outputs = own.outputs or {}
    listed = ", ".join(f"{view.model}.{name} ({kind})" for name, kind in outputs.items()) or "nothing"
    raise StoreError(
        f"store {view.main.address}: model {view.model} has no vectors to compare, it gives {listed}; "
        "its columns stand in conditions (where) and in Store.to_arrow(), and another model is searched"
    )
