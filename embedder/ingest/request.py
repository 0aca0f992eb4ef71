"""What one call of `embed` or `refresh` carries through the flow."""

from dataclasses import dataclass

from embedder.ingest.inputs import Inputs
from embedder.ingest.work import IngestOptions
from embedder.observability.run_observer import RunObserver


@dataclass(frozen=True)
class Request:
    """What is asked, by whom, and since when (Unix time)."""

    inputs: Inputs
    options: IngestOptions
    watcher: RunObserver
    started_s: float

    @property
    def stop_at_s(self) -> float | None:
        """Unix time after which no further items are begun."""
        hours = self.options.max_hours
        return None if hours is None else self.started_s + 3600 * hours
