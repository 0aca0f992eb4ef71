"""One index at several settings of its search: what recall costs in latency."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from embedder.evaluation.exact import Floats
from embedder.evaluation.intervals import Estimate

if TYPE_CHECKING:
    from index.search import Hits, Index

EF_SEARCH = (16, 32, 64, 128, 256, 512, 1024)
LIST_SHARES = (128, 64, 32, 16, 8, 4, 2, 1)  # one part in so many of an IVF's lists is read


class CurvePoint(BaseModel):
    """One setting, measured."""

    model_config = ConfigDict(frozen=True)

    parameters: dict[str, int] = Field(description="of the search; what was built stays the same")
    is_published: bool = Field(description="searches use this setting")
    recall_at_10: Estimate = Field(description="share of the exact top ten found")
    p50_ms: float = Field(description="of one query, one thread")
    p99_ms: float
    queries_per_s: float


@dataclass(frozen=True)
class Setting:
    """An index as it would search with some parameters."""

    parameters: dict[str, int]
    is_published: bool
    index: "Index"

    def search(self, queries: Floats, k: int, num_threads: int | None = None) -> "Hits":
        """Search; None takes all cores."""
        return self.index.search(queries, k, num_threads=num_threads)


def settings(index: "Index") -> list[Setting]:
    """The settings worth comparing, the fastest first; only the published one where there is no choice."""
    published = {name: value for name, value in index.manifest.parameters.items() if name in ("ef_search", "nprobe")}
    others = [{name: value} for name, each in published.items() for value in _values(index, name) if value != each]
    every = sorted([published, *others], key=lambda parameters: list(parameters.values()))
    return [Setting(parameters, parameters == published, _at(index, parameters)) for parameters in every]


def _values(index: "Index", name: str) -> list[int]:
    if name == "ef_search":
        return list(EF_SEARCH)
    num_lists = index.manifest.parameters["num_lists"]
    return sorted({max(1, num_lists // share) for share in LIST_SHARES})


def _at(index: "Index", parameters: dict[str, int]) -> "Index":
    """The same vectors, searched with other parameters."""
    from index.search import Index

    changed = index.manifest.model_copy(update={"parameters": {**index.manifest.parameters, **parameters}})
    return Index(changed, index.ids, index._index)
