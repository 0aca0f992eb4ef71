"""Section `[index]` of a configuration: what an index must keep, and how captions are cut into words."""

from typing import Literal

from pydantic import Field, field_validator

from embedder.config_toml.section import ConfigSection

MIN_RECALL = 0.9

Analysis = Literal[
    "unicode", "none", "arabic", "armenian", "basque", "catalan", "czech", "danish", "dutch", "english", "estonian",
    "finnish", "french", "german", "greek", "hindi", "hungarian", "indonesian", "irish", "italian", "lithuanian",
    "nepali", "norwegian", "persian", "polish", "portuguese", "romanian", "russian", "serbian", "spanish", "swedish",
    "tamil", "turkish", "yiddish",
]  # fmt: skip
"""Analyser of captions; the languages are those of the Snowball stemmers."""


class IndexConfig(ConfigSection):
    """Constraints of the index, and the recall that a new one must reach to be published."""

    build: bool = Field(True, description="make the first index of a store; an existing one is kept current either way")
    kind: str = Field("auto", description="auto to choose by measuring, or flat, hnsw, ivf, or one design")
    memory_bytes: int | None = Field(None, ge=1, description="most memory, without its ids")
    latency_ms: float | None = Field(None, gt=0, description="most milliseconds of one query on one thread")
    recall: float = Field(0.95, gt=0, le=1, description="share of the exact ten nearest that it should find")
    min_recall: float = Field(
        default_factory=lambda known: min(MIN_RECALL, known.get("recall", 1.0)),
        ge=0,
        le=1,
        description="recall@10 below which no index is published; left out: 0.9, or `recall` where that is less",
        json_schema_extra={"default": "0.9, at most recall"},
    )
    max_drop: float = Field(0.02, ge=0, le=1, description="recall@10 that may be lost to the last published index")
    words: Analysis = Field(
        "unicode",
        description="captions in hybrid search: unicode cuts them into words, a language, as english, compares stems; "
        "none makes no word index",
    )

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        from index.designs import KINDS, parse_design

        if kind not in ("auto", *KINDS):
            parse_design(kind)
        return kind
