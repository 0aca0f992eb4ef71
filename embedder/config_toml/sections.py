"""Sections of a configuration that other layers read by themselves; `[deploy]` has its own module."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Tag, ValidationError, field_validator, model_validator

from embedder.entry_points import TRACKERS, find_plugins, load_plugin

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
        description="whether to require proof that no group lost more; else only a proven loss is refused",
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
    offline: bool = Field(False, description="wandb: write only to `folder`; `wandb sync` sends it later")
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


def check_models(models: tuple[FurtherModelConfig, ...], plan: str | None, num_stages: int) -> None:
    """Raise ValueError if the entries of [[model]] don't fit together, or the first to what the top says of its cut."""
    if not models:
        raise ValueError("[[model]] has no entry; write one, or leave the key out")
    first, *further = models
    if first.kind != "towers" or first.model_extra:
        found = f'kind = "{first.kind}"' if first.kind != "towers" else min(first.model_extra or {})
        raise ValueError(
            f"the first [[model]] has {found}; it is the store's main model, of the kind towers, and takes only uri, "
            "name, stages, plan, instructions and dimensions: write it first, and this one below"
        )
    if first.plan not in (None, plan) or first.stages not in (None, num_stages):
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
                    f'model "{model.name}": {key} = {getattr(model, key)}: only of the kind towers; {model.kind} runs '
                    "whole"
                )
        seen.add(model.name)


def _check_settings(model: FurtherModelConfig) -> None:
    from shards.file_schema import describe

    given = [key for key in OF_TOWERS if getattr(model, key) not in (None, False)]
    if given and model.kind != "towers":
        raise ValueError(f"the [[model]] of {model.uri} has {given[0]}, which only the kind towers has; leave it out")
    try:
        _ = model.of_towers
    except ValidationError as error:
        raise ValueError(f"the [[model]] of {model.uri}: {describe(error)}") from None


ModelUri = Annotated[str, Tag("uri")]
ModelTables = Annotated[tuple[FurtherModelConfig, ...], Tag("tables")]


def of_first(model: Any, key: Literal["plan", "stages"]) -> Any:
    """Return the plan or the number of stages that the first entry of [[model]] gives; None if it gives none."""
    return getattr(model[0], key) if isinstance(model, tuple) and model else None


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
        None, description="column with captions that replace the items' own; a blank one replaces nothing"
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
