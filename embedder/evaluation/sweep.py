"""Recall and latency of one index at several search settings."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from embedder.evaluation.intervals import ConfidenceInterval
from index.designs import Parameters, parse_design
from index.manifest import Manifest
from index.vectors import Floats

if TYPE_CHECKING:
    from index.search import Index, Neighbours

RERANKING = "k_factor"


class CurvePoint(BaseModel):
    """One setting, measured."""

    model_config = ConfigDict(frozen=True)

    parameters: dict[str, int] = Field(description="of the search; what was built stays the same")
    is_published: bool = Field(description="searches use this setting")
    recall_at_10: ConfidenceInterval = Field(description="share of the exact top ten found")
    p50_ms: float = Field(description="of one query, one thread")
    p99_ms: float
    queries_per_s: float


@dataclass(frozen=True)
class SearchSetting:
    """Search parameters of an index."""

    parameters: Parameters
    is_published: bool

    def search(self, index: "Index", queries: Floats, k: int, num_threads: int | None = None) -> "Neighbours":
        """Search with this setting.

        Args:
            index: to search.
            queries: float32 (Q, E).
            k: hits of each query.
            num_threads: None takes all cores.
        """
        return index.search(queries, k, parameters=self.parameters, num_threads=num_threads)


def settings(manifest: Manifest) -> list[SearchSetting]:
    """Settings worth comparing, the least effort first; only the published one where there is no choice.

    Re-ranking is as published; the efforts of graph or lists are those that the design can be built with, and the
    published one.
    """
    published = manifest.parameters
    search_params = [
        effort for search_params in parse_design(manifest.design).search_params() for effort in search_params
    ]
    others = [
        effort for effort in search_params if effort != published and effort.get(RERANKING) == published.get(RERANKING)
    ]
    every = sorted([published, *others], key=lambda effort: [effort[name] for name in sorted(effort)])
    return [SearchSetting(effort, effort == published) for effort in every]
