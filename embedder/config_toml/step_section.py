"""Section `[[step]]`: a class or function of the user's own in the course of a run.

What a class (`embedder.Stage`) declares stands for the keys that the section leaves out. It is read from the source:
nothing of the user's is imported where a configuration is read.
"""

import ast
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from embedder.config_toml.section import ConfigSection
from embedder.errors import ConfigError

StepPlace = Literal["after_decode", "before_write"]
STEP_NAME = r"^[a-z][a-z0-9_]{0,31}$"
COLUMN_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"
OUTPUT_TYPE = r"^(bool|int32|int64|float32|float64|string|binary)(\[\])?$|^(image|region)$"

Setting = bool | int | float | str
OWN_STEPS = ("read", "decode", "tokenise", "embed", "write")
"""Names that rejects of the pipeline's own steps have."""
REPLACED = {"image": "image", "region": "region", "caption": "string"}
"""Outputs of steps after decoding that have a meaning, and the type of each."""
IMAGE_TYPES = ("image", "region")
ENTRY_POINTS = "embedder.steps"
DECLARED = {
    "columns_in": "inputs",
    "columns_optional": "optional",
    "columns_out": "outputs",
    "where": "where",
    "one_to_many": "one_to_many",
    "resources": "resources",
}
"""Attributes of a class, and the keys that they stand for; those of `resources` are keys themselves."""


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
    """Raise ValueError where the entries of [[step]] don't fit together."""
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


def with_declared(step: Any) -> Any:
    """Fill in a section, as TOML has it, by what its class declares; keys of the section go before it.

    Args:
        step: an entry of [[step]]; of the wrong type, or of a function, it stays as it is.

    Raises:
        ConfigError: a declaration is computed.
    """
    if not isinstance(step, dict) or not isinstance(named := step.get("callable"), str):
        return step
    if ":" not in named:
        named = next((each.value for each in entry_points(group=ENTRY_POINTS) if each.name == named), named)
    place, _, name = named.rpartition(":")
    try:
        spec = None if place.endswith(".py") else find_spec(place)
        tree = ast.parse(Path(spec.origin if spec and spec.origin else place).expanduser().read_bytes())
    except (OSError, ImportError, SyntaxError, ValueError):
        return step  # what is wrong with it is told where it is looked for
    found = _declared_in(name, {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}, place)
    return found.pop("resources", {}) | found | step


def _declared_in(name: str, classes: dict[str, ast.ClassDef], place: str) -> dict[str, Any]:
    """Declarations of a class, and of its bases in the same file."""
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
