"""A model of a run, as its table in the store knows it; the main model is the first of a run's models."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import NO_COLUMNS
from embedder.store.layout import StoreInfo
from embedder.store.tables.models import model_files


@dataclass(frozen=True)
class RunModel:
    """Model of a run.

    `name` is empty for the main model. `info` is what determines its rows, as stored with them. `outputs` are the
    columns of its table besides its vectors and carried ones: what a further model returns, or what the user's steps
    add to the main model's rows. `columns` are those of a further model's table by the outputs of its servable.
    """

    name: str
    info: StoreInfo
    outputs: pa.Schema = NO_COLUMNS
    columns: Mapping[str, str] = field(default_factory=dict)

    def files(self, store: StoreFiles) -> StoreFiles:
        """Return the view of a store that has the model's tables."""
        return model_files(store, self.name)
