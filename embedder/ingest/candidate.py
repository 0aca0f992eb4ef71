"""What a run would publish, for the guards to judge."""

from dataclasses import dataclass, field

import pyarrow as pa

from embedder.store.journal import JournalEntry
from embedder.store.layout import Current
from embedder.store.runs import Run


@dataclass(frozen=True)
class Candidate:
    """What a run would publish.

    Attributes:
        run: the run, all of whose tasks have ended.
        entries: its journal.
        whole: items that it finished whole: `item_id`, `session`, `num_vectors`.
        num_items: items that it finished, and `num_rejected` of them could not be embedded.
        published: what is published now.
        retired: ids that leave the store.
        keeps_published: whether the published vectors of other items stay; not after a change of the model.
    """

    run: Run
    entries: list[JournalEntry]
    whole: pa.Table
    num_items: int
    num_rejected: int
    published: Current | None = None
    retired: pa.Array = field(default_factory=lambda: pa.array([], pa.string()))
    keeps_published: bool = True
