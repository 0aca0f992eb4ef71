"""Ranges of layers of a tower."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict

from shards.model_errors import ModelError

# Plan files are parsed strictly into these classes.
STRICT = ConfigDict(extra="forbid", strict=True, defer_build=True)


@dataclass(frozen=True)
class LayerRange:
    """Layers `start` up to, not including, `stop` of one tower; empty if the two are equal."""

    __pydantic_config__ = STRICT

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ModelError(
                f"layers [{self.start}, {self.stop}): a range starts at 0 or later and ends at its start or later"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def count(self, shares: tuple[float, ...] = ()) -> float:
        """Count the layers by their shares of the mean; all count 1 without shares."""
        return sum(shares[self.start : self.stop]) if shares else float(len(self))

    def holds_front(self) -> bool:
        """Whether the range holds the embeddings, because it includes the first layer."""
        return len(self) > 0 and self.start == 0

    def holds_head(self, depth: int) -> bool:
        """Whether the range holds norm, pooling and projection, because it includes the last layer."""
        return len(self) > 0 and self.stop == depth
