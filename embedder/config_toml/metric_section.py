"""Section `[[metric]]`: a figure of the rows that a run writes."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from embedder.config_toml.section import ConfigSection
from embedder.config_toml.step_section import COLUMN_NAME, STEP_NAME, Setting

MetricKind = Literal["count", "sum", "moments", "quantiles", "log_loss", "auroc", "confusion", "recall", "drift", "own"]
NUMBERS = ("sum", "moments", "quantiles")
SCORES = ("log_loss", "auroc")
LABELLED = (*SCORES, "confusion")
VECTOR_NAMES = ("image_embedding", "text_embedding")


class MetricConfig(ConfigSection):
    """Figure of the rows that a run has written."""

    name: str = Field(
        pattern=STEP_NAME,
        description="stands in the report, runs.jsonl and the metrics file",
        json_schema_extra={"rule": "lower-case letters, digits and _, at most 32, the first one a letter"},
    )
    kind: MetricKind = Field(
        "moments",
        description="count, sum, moments, quantiles of `column`; log_loss, auroc, confusion of `column` against "
        "`label`; recall of captions for their own images; drift of vectors since the last run; own: `callable`",
    )
    column: str | None = Field(
        None, min_length=1, description="of the embeddings table: its own, a carried one, or a step's"
    )
    label: str | None = Field(None, min_length=1, description="column with what is true: 0 or 1, or a class")
    quantiles: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (0.05, 0.25, 0.5, 0.75, 0.95), min_length=1, description="quantiles that are told"
    )
    sample: int = Field(1000, ge=64, le=10_000, description="pairs that R@k is measured on, drawn by the hashes of ids")
    callable: str | None = Field(
        None,
        pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$",
        description="FILE.py:Class or package.module:Class, with the methods add, merge and figures",
        json_schema_extra={"rule": "FILE.py:Class or package.module:Class"},
    )
    inputs: tuple[Annotated[str, Field(pattern=COLUMN_NAME)], ...] = Field(
        (), description="columns that a class of your own is given"
    )
    settings: dict[str, Setting] = Field({}, description="keyword arguments of the class, plain values")

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the metric names."""
        return (*(name for name in (self.column, self.label) if name is not None), *self.inputs)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        needs = {
            "column": self.kind not in ("count", "recall", "own"),
            "label": self.kind in LABELLED,
            "callable": self.kind == "own",
            "inputs": self.kind == "own",
        }
        takes = needs | {"column": self.kind not in ("recall", "own"), "settings": self.kind == "own"}
        for key in takes:
            if needs.get(key) and not getattr(self, key):
                raise ValueError(f'metric "{self.name}" of the kind {self.kind} needs {key}; write it')
            if getattr(self, key) and not takes[key]:
                raise ValueError(f'metric "{self.name}" of the kind {self.kind} takes no {key}; leave it out')
        if self.kind == "drift" and self.column not in VECTOR_NAMES:
            raise ValueError(
                f'metric "{self.name}": drift is of vectors, {self.column} has none; write {" or ".join(VECTOR_NAMES)}'
            )
        return self


def check_metrics(metrics: tuple[MetricConfig, ...]) -> None:
    """Raise ValueError where two entries of [[metric]] have one name."""
    names = [metric.name for metric in metrics]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f'two metrics have the name "{twice[0]}"; write another')
