"""Scope of a check: the models of the publication that is checked, and all files that lay in the store."""

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

    Attributes:
        name: of the model; empty of the main one.
        files: its view of the store.
        current: its part of the publication.
        info: the model of its vectors; None where that is not known.
        listing: files of its view.
        doomed: files of its view that count as deleted.
    """

    name: str
    files: StoreFiles
    current: Current
    info: StoreInfo | None
    listing: Listing
    doomed: frozenset[str]

    def place(self, path: str) -> str:
        """Path of a file of the view, relative to the store."""
        return model_folder(self.name) + path

    def sizes_below(self, folder: str) -> dict[str, int]:
        """Files below a folder of the view: path relative to the folder -> size in bytes."""
        start = f"{folder}/"
        return {path.removeprefix(start): size for path, size in self.listing.items() if path.startswith(start)}


def checked_models(
    files: StoreFiles,
    current: Current,
    infos: Mapping[str, StoreInfo | None],
    listing: Listing,
    doomed: frozenset[str],
) -> list[CheckedModel]:
    """Models of a publication, the main one first."""
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
    """Files of a model's view of the store, relative to it; of the main one, all that no further model has.

    Args:
        listing: all files of the store.
        model: name of the model; empty: the main one.
    """
    if not model:
        return {path: size for path, size in listing.items() if not path.startswith(f"{MODELS_FOLDER}/")}
    folder = model_folder(model)
    return {path.removeprefix(folder): size for path, size in listing.items() if path.startswith(folder)}
