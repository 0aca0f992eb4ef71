"""Sections of a configuration that other layers read by themselves; `[deploy]` has a module of its own."""

import ast
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Tag, ValidationError, field_validator, model_validator

from embedder.entry_points import STEPS, TRACKERS, find_plugins, load_plugin
from embedder.errors import ConfigError

if TYPE_CHECKING:
    from shards.model_settings import ModelSettings


class ConfigSection(BaseModel):
    """Base of all sections: frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Keys that belong to another kind of configuration, with the message for each."""


Metric = Literal["R@1", "R@5", "R@10", "MRR", "nDCG@10"]


class CompareConfig(ConfigSection):
    """Rule by which `embedder compare` judges two models, and a refresh with another model before it publishes."""

    required: bool = Field(
        False, description="whether a refresh with another model must pass the comparison before it publishes"
    )
    metric: Metric = Field("R@10", description="metric that the verdict looks at: R@1, R@5, R@10, MRR or nDCG@10")
    group: str | None = Field(
        None, description="column of the embeddings table whose values are groups of queries, each compared for itself"
    )
    max_drop: float = Field(0.02, ge=0, le=1, description="loss that is allowed in any group: 0.02 is two points")
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="of the intervals of all groups together; many groups have wider ones"
    )
    prove: bool = Field(
        False,
        description="whether it must be shown that no group lost more; else what is shown to have lost more is refused",
    )


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
    on_missed: Literal["publish", "keep", "fail"] = Field(
        "publish",
        description="where no design keeps recall, latency_ms and memory_bytes: publish the nearest one; keep what is "
        "published (a run with other rows makes an exact index); or fail",
    )
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


class ServeConfig(ConfigSection):
    """Second model of `embedder serve`, which scores the first hits of texts again."""

    reranker: str | None = Field(
        None, min_length=1, description="folder of `embedder model import --reranker`; left out: hits stay as found"
    )
    rerank: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="first hits of a query that it scores, unless fewer are asked for",
        json_schema_extra={"default": "50"},
    )
    rerank_timeout_s: float | None = Field(
        None,
        gt=0,
        description="seconds that a search waits for it; then the hits come in their first order, with a warning",
        json_schema_extra={"default": "5.0"},
    )

    @property
    def given(self) -> dict[str, Any]:
        """Settings of the service that it gives."""
        return self.model_dump(exclude_none=True)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.reranker is None and self.given:
            raise ValueError(f"{next(iter(self.given))} is of a re-ranker; give its folder, reranker, too")
        return self


class TrackerConfig(ConfigSection):
    """Tracker of experiments that follows a run."""

    kind: str = Field(
        description="mlflow (the extra `mlflow`), wandb: Weights & Biases (the extra `wandb`), or another package's"
    )
    uri: str | None = Field(
        None,
        min_length=1,
        description="mlflow: sqlite:////ABSOLUTE/FILE.db or the server's address; wandb: a server of your own",
    )
    experiment: str = Field("embedder", min_length=1, description="experiment of MLflow, project of W&B")
    offline: bool = Field(False, description="wandb: write to `folder` alone; `wandb sync` sends it later")
    pictures: bool = Field(
        True, description="whether `embed` and `refresh` add a contact sheet of up to 20 items that they embedded"
    )
    folder: str | None = Field(None, min_length=1, description="wandb: folder for its files; left out: ./wandb")
    options: dict[str, str] = Field({}, description="settings of a tracker of another package, as it names them")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind not in (known := find_plugins(TRACKERS)):
            raise ValueError(f"kind = {self.kind!r}: there is no such tracker; there are {', '.join(known) or 'none'}")
        tracker = load_plugin(TRACKERS, self.kind, "[tracker] kind")
        if hasattr(tracker, "check"):
            tracker.check(self)
        return self


OF_TOWERS = ("query_instruction", "item_instruction", "dimensions", "force_dimensions")
"""Keys of a model that only towers take, and that are part of its address."""


class FurtherModelConfig(ConfigSection):
    """Model of a run, the first one the store's main model; further ones take the keys of their kind, too."""

    # Keys of a kind are checked by `embedder.servables`.
    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)

    name: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9_]{0,31}$",
        description="of a further model: its folder, and what stands before its columns; the first one is `main`",
        json_schema_extra={"rule": "lower-case letters, digits and _, at most 32, the first one a letter"},
    )
    uri: str = Field(min_length=1, description="model folder or file; of the kind python, FILE.py:Class")
    kind: str = Field("towers", description="towers, hf, onnx, torch_export, torchscript, vllm or python")
    stages: int | None = Field(None, ge=1, description="shards that towers are cut into; of the first: `num_stages`")
    plan: str | None = Field(None, description="plan that says how towers are cut, and on what; of the first: `plan`")
    query_instruction: str | None = Field(
        None, description="of towers that take one: what queries ask for; left out: the model's own"
    )
    item_instruction: str | None = Field(
        None, description="of towers that take one: how pictures and captions are embedded; part of the fingerprint"
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        description="of towers that are trained for it (Matryoshka): first values of vectors that are kept, then of "
        "length 1 again; part of the fingerprint",
    )
    force_dimensions: bool = Field(False, description="cut also vectors of towers that aren't known to be trained so")

    @property
    def address(self) -> str:
        """Address of the model with its settings, as a store records it."""
        from shards.model_settings import join_address

        return join_address(self.uri, self.of_towers)

    @property
    def of_towers(self) -> "ModelSettings":
        """Settings that only towers take; raises a ValidationError if they don't fit together."""
        from shards.model_settings import ModelSettings

        return ModelSettings(**{key: getattr(self, key) for key in OF_TOWERS})

    def settings(self) -> dict[str, Any]:
        """Return the section as `embedder.servables.make_servable` takes it."""
        cut = {key: value for key in ("stages", "plan") if (value := getattr(self, key)) is not None}
        return {"name": self.name, "uri": self.address, "kind": self.kind, **cut, **(self.model_extra or {})}


def check_models(models: tuple[FurtherModelConfig, ...], given: Collection[str]) -> None:
    """Raise ValueError if the entries of [[model]] don't fit together."""
    if not models:
        raise ValueError("[[model]] has no entry; write one, or leave the key out")
    first, *further = models
    if first.kind != "towers" or first.model_extra:
        found = f'kind = "{first.kind}"' if first.kind != "towers" else min(first.model_extra or {})
        raise ValueError(
            f"the first [[model]] has {found}; it is the store's main model, of the kind towers, and takes uri, name, "
            "stages, plan, instructions and dimensions alone: write it first, and this one below"
        )
    if (first.plan and "plan" in given) or (first.stages and not {"num_stages", "stage"}.isdisjoint(given)):
        raise ValueError("the first [[model]] and the top both say how it is cut; write plan or stages once")
    seen = {"main"}
    for model in models:
        _check_settings(model)
    for model in further:
        if model.name is None:
            raise ValueError(f"the [[model]] of {model.uri} has no name; write one: its folder and columns bear it")
        if model.name in seen | {first.name}:
            raise ValueError(f'two models have the name "{model.name}" (the first one is `main`); write another')
        for key in ("stages", "plan"):
            if getattr(model, key) is not None and model.kind != "towers":
                raise ValueError(
                    f'model "{model.name}": {key} = {getattr(model, key)}: of the kind towers alone; {model.kind} runs '
                    "whole"
                )
        seen.add(model.name)


def _check_settings(model: FurtherModelConfig) -> None:
    from shards.file_schema import describe

    given = [key for key in OF_TOWERS if getattr(model, key) not in (None, False)]
    if given and model.kind != "towers":
        raise ValueError(f"the [[model]] of {model.uri} has {given[0]}, of the kind towers alone; leave it out")
    try:
        _ = model.of_towers
    except ValidationError as error:
        raise ValueError(f"the [[model]] of {model.uri}: {describe(error)}") from None


ModelUri = Annotated[str, Tag("uri")]
ModelTables = Annotated[tuple[FurtherModelConfig, ...], Tag("tables")]


def stages_of(model: Any) -> int | None:
    """Return the number of stages that the first entry of [[model]] gives."""
    return model[0].stages if isinstance(model, tuple) and model else None


def plan_of(model: Any) -> str | None:
    """Return the plan that the first entry of [[model]] gives."""
    return model[0].plan if isinstance(model, tuple) and model else None


def form_of_model(value: Any) -> str:
    """Return whether the key `model` is one address, or tables."""
    return "uri" if isinstance(value, str) else "tables"


class JoinOn(ConfigSection):
    """Columns whose values are equal in an item and its row."""

    id: str | None = Field(None, description="column of the table with the ids of the items")
    left: str | None = Field(None, description="column of the items that a source carries over, in place of the id")
    right: str | None = Field(None, description="column of the table that `left` is compared with")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        is_pair = self.left is not None and self.right is not None
        if (self.id is None) != is_pair or (self.id is not None and (self.left or self.right)):
            raise ValueError('on takes id = "KEY COLUMN", or left = "CARRIED COLUMN" with right = "KEY COLUMN"')
        return self

    @property
    def key(self) -> str:
        """Column of the table with the keys."""
        return self.id or self.right or ""


class JoinConfig(ConfigSection):
    """Table whose rows belong to the items of the sources, one row at most to each item."""

    path: str = Field(description="table (Parquet, CSV, JSONL, Delta): file, folder, glob or URI (local, s3://, gs://)")
    on: JoinOn = Field(description="what an item and its row have in common")
    columns: tuple[str, ...] = Field((), description="columns copied into the embeddings table, as carryover is")
    caption: str | None = Field(
        None, description="column with captions, which take the place of the items' own; of a blank one the own stays"
    )
    missing: Literal["null", "error"] = Field(
        "null",
        description="of an item without a row: null leaves the columns null, error ends the run before it begins",
    )
    source: str | None = Field(
        None, description="name of the one source whose items are joined, by their ids without that name; else of all"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.columns and self.caption is None:
            raise ValueError(f"[[join]] of {self.path}: it brings nothing; name columns, a caption, or both")
        if twice := [name for name in self.columns if self.columns.count(name) > 1]:
            raise ValueError(f"[[join]] of {self.path}: columns names {twice[0]!r} twice; name it once")
        return self


def check_joins(joins: tuple[JoinConfig, ...], sources: set[str | None]) -> None:
    """Raise ValueError if a [[join]] names a missing source, or two add the same column."""
    brought: dict[str, str] = {}
    for join in joins:
        if sources and join.source is not None and join.source not in sources:
            known = ", ".join(sorted(name for name in sources if name is not None)) or "none has a name"
            raise ValueError(f'[[join]] of {join.path}: there is no source "{join.source}" ({known}); name one of them')
        for name in (*join.columns, *(["caption"] if join.caption is not None else [])):
            if name in brought:
                raise ValueError(
                    f"[[join]] of {brought[name]} and of {join.path} both bring {name!r}; leave it out of one of them"
                )
            brought[name] = join.path


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
        description="columns that it is given; a row that lacks one passes by the step; left out: `columns_in` of the "
        "class",
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
    max_side_px: int = Field(2048, ge=16, le=16_384, description="images with a longer side are reduced to it")
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
                f'step "{self.name}": of the type {kind} is the output {kind} alone; write {kind} = "{kind}"'
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
    except (OSError, ImportError, SyntaxError, ValueError):
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
                except ValueError:
                    raise ConfigError(
                        f"{place}, line {node.lineno}: {name}.{target.id} is computed, and is read without running the "
                        "file; write its value out"
                    ) from None
                found[DECLARED[target.id]] = list(value) if isinstance(value, tuple) else value
    return found
