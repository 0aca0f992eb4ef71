"""A run whose engine has ended, before anybody has decided what becomes of it."""

from dataclasses import dataclass

import pyarrow as pa

from embedder.ingest.execute import EngineOutcome
from embedder.ingest.guards import Verdict
from embedder.ingest.work import WorkPlan
from embedder.store.layout import Current


@dataclass(frozen=True)
class Ended:
    """An engine's run, and what it was for.

    Attributes:
        outcome: what the engine measured.
        work: what was to be done.
        current: what is published.
        verdicts: of the guards that were asked before anything was embedded.
        retired: ids that leave the store.
        left_out_before: of `embedder.ingest.known_items.left_out_before`.
    """

    outcome: EngineOutcome
    work: WorkPlan
    current: Current | None
    verdicts: tuple[Verdict, ...]
    retired: pa.ChunkedArray
    left_out_before: pa.Table
