"""Sections `[[step]]` and `[[metric]]`, which may name code of the user's own."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from embedder.config_toml.sections import ConfigSection
from embedder.entry_points import STEPS, find_plugins
from embedder.errors import ConfigError

StepPlace = Literal["after_decode", "before_write"]


STEP_NAME = r"^[a-z][a-z0-9_]{0,31}$"


COLUMN_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"


OUTPUT_TYPE = r"^(bool|int32|int64|float32|float64|string|binary)(\[\])?$|^(image|region)$"


Setting = bool | int | float | str


OWN_STEPS = ("read", "decode", "tokenise", "embed", "write")
"""Step names in rejects of the pipeline's own steps."""


REPLACED = {"image": "image", "region": "region", "caption": "string"}
"""Outputs of steps after decoding that have a meaning, with their types."""


IMAGE_TYPES = ("image", "region")


DECLARED = {
    "columns_in": "inputs",
    "columns_optional": "optional",
    "columns_out": "outputs",
    "where": "where",
    "one_to_many": "one_to_many",
    "resources": "resources",
}
"""Attributes of a class, and the keys that they set; those of `resources` are keys themselves."""


class StepConfig(ConfigSection):
    """Class or function of the user's own, which is given rows and returns what it made of them."""

    name: str = Field(
        pattern=STEP_NAME,
        description="stands in the rejects of the step, and in the reasons of a refresh",
        json_schema_extra={"rule": "lower-case letters, digits and _, at most 32, the first one a letter"},
    )
    callable: str = Field(
        min_length=1,
        description="FILE.py:Class, package.module:Class, or the name of an entry point of the group "
        "`embedder.steps`; a function in the place of a class has no keys of its own",
    )
    where: StepPlace = Field(
        "after_decode", description="after_decode: before the model sees a row; before_write: with its embeddings"
    )
    inputs: tuple[str, ...] = Field(
        min_length=1,
        description="columns that it gets; a row that lacks one skips the step; left out: `columns_in` of the class",
    )
    optional: tuple[str, ...] = Field((), description="further columns, which may be null")
    outputs: dict[Annotated[str, Field(pattern=COLUMN_NAME)], Annotated[str, Field(pattern=OUTPUT_TYPE)]] = Field(
        {},
        description="columns that it returns, with their types: new ones of the embeddings table; after decoding also "
        "`image`, `caption`, which take the place of the row's own, and `region`, which cuts the image",
        json_schema_extra={
            "rule": "a name of letters, digits and _, with its type: bool, int32, int64, float32, float64, string or "
            "binary, with [] for lists; image; region"
        },
    )
    one_to_many: bool = Field(
        False, description="whether a row may become several, which are numbered as segments; it is given one at a time"
    )
    max_rows: int = Field(1000, ge=1, le=1_000_000, description="most rows of one; an item beyond it is a reject")
    settings: dict[str, Setting] = Field({}, description="keyword arguments of the function, plain values")
    extra_files: tuple[str, ...] = Field((), description="further files that decide its results")
    batch_size: int = Field(32, ge=1, le=65_536, description="most rows of one call")
    max_side_px: int = Field(
        2048,
        ge=16,
        le=16_384,
        description="images with a longer side are reduced to it, or to the largest of all steps",
    )
    timeout_s: float = Field(30.0, gt=0, le=86_400, description="seconds of one call, after which its process is ended")
    memory_bytes: int = Field(4 << 30, ge=256 << 20, description="address space of its process")
    num_cpus: float = Field(1.0, gt=0, description="CPUs of the task that runs it; as many threads, one at least")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.name in OWN_STEPS:
            raise ValueError(f'name = "{self.name}" is a step of the pipeline\'s own; write another')
        given = [*self.inputs, *self.optional]
        if twice := [name for name in given if given.count(name) > 1]:
            raise ValueError(f'step "{self.name}": {twice[0]!r} stands twice in its inputs; write it once')
        if self.where == "before_write":
            self._check_before_write()
        if self.one_to_many and self.outputs.keys().isdisjoint(REPLACED):
            raise ValueError(
                f'step "{self.name}": of several rows made of one, each is embedded: return image, region or caption'
            )
        for name, kind in REPLACED.items():
            if self.outputs.get(name, kind) != kind:
                raise ValueError(
                    f'step "{self.name}": the output {name} is of the type {kind}; write {name} = "{kind}"'
                )
        if odd := [name for name, kind in self.outputs.items() if kind in IMAGE_TYPES and name != kind]:
            kind = self.outputs[odd[0]]
            raise ValueError(
                f'step "{self.name}": of the type {kind} is only the output {kind}; write {kind} = "{kind}"'
            )
        if "region" in self.outputs and "image" not in given:
            raise ValueError(
                f'step "{self.name}": it returns a region of an image that it isn\'t given; add the input image'
            )
        return self

    def _check_before_write(self) -> None:
        if self.one_to_many:
            raise ValueError(
                f'step "{self.name}": one_to_many before_write, when the rows have their vectors; write after_decode'
            )
        if found := [name for name in REPLACED if name in self.outputs]:
            raise ValueError(
                f'step "{self.name}": the output {found[0]} changes what is embedded, before_write is after that; '
                "write after_decode, or another name"
            )


def check_steps(steps: tuple[StepConfig, ...]) -> None:
    """Raise ValueError if the entries of [[step]] don't fit together."""
    columns: dict[str, str] = {}
    names: set[str] = set()
    for step in steps:
        if step.name in names:
            raise ValueError(f'two steps have the name "{step.name}"; write another')
        names.add(step.name)
        for column in step.outputs:
            if column in columns and column not in ("image", "caption"):
                raise ValueError(
                    f'steps "{columns[column]}" and "{step.name}" both return {column!r}; write another name'
                )
            columns[column] = step.name


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
        (0.05, 0.25, 0.5, 0.75, 0.95), min_length=1, description="quantiles that are reported"
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
    """Raise ValueError if two entries of [[metric]] have the same name."""
    names = [metric.name for metric in metrics]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f'two metrics have the name "{twice[0]}"; write another')


def with_declared(step: Any) -> Any:
    """Add the declarations of a step's class to its section (TOML); keys of the section take precedence.

    A section of the wrong type, or of a function, is returned as it is. Raises `ConfigError` if a declaration is
    computed rather than literal.
    """
    if not isinstance(step, dict) or not isinstance(named := step.get("callable"), str):
        return step
    if ":" not in named:
        point = find_plugins(STEPS).get(named)
        named = point.value if point is not None else named
    place, _, name = named.rpartition(":")
    try:
        spec = None if place.endswith(".py") else find_spec(place)
        tree = ast.parse(Path(spec.origin if spec and spec.origin else place).expanduser().read_bytes())
    except (Exception, SystemExit):  # noqa: BLE001  # it imports the package of a module, which may raise anything
        return step  # errors in it are reported where it is looked for
    found = _declared_in(name, {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}, place)
    return found.pop("resources", {}) | found | step


def _declared_in(name: str, classes: dict[str, ast.ClassDef], place: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (tree := classes.get(name)) is None:
        return found
    others = {each: classes[each] for each in classes.keys() - {name}}
    for base in reversed(tree.bases):
        if isinstance(base, ast.Name):
            found |= _declared_in(base.id, others, place)
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and target.id in DECLARED:
                try:
                    value = ast.literal_eval(node.value)
                except (TypeError, ValueError):
                    raise ConfigError(
                        f"{place}, line {node.lineno}: {name}.{target.id} is computed, and is read without running the "
                        "file; write its value out"
                    ) from None
                if target.id == "resources" and not isinstance(value, dict):
                    raise ConfigError(f'{place}, line {node.lineno}: {name}.resources: write {{"num_cpus": 2}}, a dict')
                found[DECLARED[target.id]] = _as_list(value)
    return found


def _as_list(value: Any) -> Any:
    """Return the list of a tuple, or of a set in an order that is the same in each process; else the value."""
    return sorted(value, key=repr) if isinstance(value, set) else list(value) if isinstance(value, tuple) else value
