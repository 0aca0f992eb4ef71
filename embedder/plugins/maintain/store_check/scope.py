"""Scope of a check: the models of the checked publication, and all files of the store."""

from collections.abc import Mapping
from dataclasses import dataclass

from embedder.store.files import StoreFiles
from embedder.store.layout import Current, StoreInfo
from embedder.store.publish.current import model_folder, versions_of
from embedder.store.tables.models import MODELS_FOLDER

Listing = Mapping[str, int]
"""Path of each file -> its size in bytes."""


@dataclass(frozen=True)
class CheckedModel:
    """Model of a publication.

    `name` is empty for the main one; `files` is its view of the store; `current` is its part of the publication. `info`
    is the model of its vectors, None if unknown. `listing` are the files of its view, and `doomed` those that count as
    deleted.
    """

    name: str
    files: StoreFiles
    current: Current
    info: StoreInfo | None
    listing: Listing
    doomed: frozenset[str]

    def place(self, path: str) -> str:
        """Return the path of a file of the view, relative to the store."""
        return model_folder(self.name) + path

    def sizes_below(self, folder: str) -> dict[str, int]:
        """Return the files below a folder of the view: path relative to the folder -> size in bytes."""
        start = f"{folder}/"
        return {path.removeprefix(start): size for path, size in self.listing.items() if path.startswith(start)}


def checked_models(
    files: StoreFiles, current: Current, infos: Mapping[str, StoreInfo | None], listing: Listing, doomed: frozenset[str]
) -> list[CheckedModel]:
    """Return the models of a publication, the main one first."""
    return [
        CheckedModel(
            name=name,
            files=view,
            current=own,
            info=infos.get(name),
            listing=own_files(listing, name),
            doomed=frozenset(own_files(dict.fromkeys(doomed, 0), name)),
        )
        for name, (view, own) in versions_of(files, current).items()
    ]


def own_files(listing: Listing, model: str) -> dict[str, int]:
    """Return the files of a model's view, relative to it; for the main model (empty name), those of no other model."""
    if not model:
        return {path: size for path, size in listing.items() if not path.startswith(f"{MODELS_FOLDER}/")}
    folder = model_folder(model)
    return {path.removeprefix(folder): size for path, size in listing.items() if path.startswith(folder)}
