"""Resolved steps of a configuration: where each function is, what decides its results, its inputs and outputs.

Nothing of the user's is imported here, so a dry run or a head node doesn't need a step's libraries.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from embedder.batch_schema import step_schema
from embedder.config_toml.own_code_sections import REPLACED, StepConfig
from embedder.entry_points import STEPS, find_plugins
from embedder.errors import EmbedderError
from embedder.servables.declared_servables import find_file, find_module
from embedder.servables.servable import file_digest
from embedder.store.schema import EMBEDDINGS, with_carryover
from shards.fingerprint import short_hash

FILE_SUFFIX = ".py"

ROW_COLUMNS = {
    name: EMBEDDINGS.field(name).type
    for name in ("item_id", "segment", "modality", "uri", "start_s", "end_s", "caption")
}
"""Columns that each step may take."""
IMAGE = pa.struct({"pixels": pa.large_binary(), "height": pa.int32(), "width": pa.int32()})
"""Image as steps after decoding take and return it: uint8 (H, W, 3), RGB."""
BOX = pa.struct({name: pa.int32() for name in ("x", "y", "width", "height")})
"""Region as steps return it; the size of the image is added to it."""
VECTORS = {name: EMBEDDINGS.field(name).type for name in ("image_embedding", "text_embedding")}

UNHASHED = {"name", "callable", "extra_files", "batch_size", "timeout_s", "memory_bytes", "num_cpus"}
"""Keys that change no result, or are hashed otherwise: files by their content, the function by its name."""


class StepError(EmbedderError):
    """A user's step that can't be run as it is declared."""


@dataclass(frozen=True)
class UserStep:
    """A resolved step; equal ones share one process.

    The configured `callable` resolves to `function` in `place`, the absolute path of a file or the name of a module.
    `files` decide its results, and `digest` is the hash of their contents; `fingerprint` covers everything that decides
    them.
    """

    config: StepConfig = field(hash=False)
    place: str
    function: str
    files: tuple[str, ...]
    digest: str
    fingerprint: str

    @property
    def where(self) -> str:
        """Return the step's name for messages."""
        return _describe(self.config)

    @property
    def takes(self) -> tuple[str, ...]:
        """Return all columns that it is given."""
        return (*self.config.inputs, *self.config.optional)


def open_step(config: StepConfig) -> UserStep:
    """Find a step's function and hash what decides its results.

    Raises:
        StepError: it names no function that can be found here.
        ServableError: a file or module is missing.
    """
    where = _describe(config)
    place, function = _split_name(where, config.callable)
    files = [_file_of(where, place), *(find_file(where, each, "extra_files") for each in config.extra_files)]
    digest = digest_of(where, files)
    hashed = config.model_dump(mode="json", exclude=UNHASHED) | {"function": function}
    if not config.one_to_many:
        hashed.pop("max_rows")
    if "image" not in (*config.inputs, *config.optional):
        hashed.pop("max_side_px")
    return UserStep(
        config=config,
        place=str(files[0]) if place.endswith(FILE_SUFFIX) else place,
        function=function,
        files=tuple(map(str, files)),
        digest=digest,
        fingerprint=short_hash([json.dumps(hashed, sort_keys=True, default=str).encode(), digest.encode()]),
    )


def _describe(config: StepConfig) -> str:
    """Return a step's name for messages."""
    return f"step {config.name} ({config.callable})"


def step_fingerprints(steps: Iterable[StepConfig]) -> dict[str, str]:
    """Return each step's fingerprint by name, in the order that they run in."""
    return {step.name: open_step(step).fingerprint for step in steps}


def changes_rows(step: StepConfig) -> bool:
    """Return whether a step changes what models are given, or into how many rows."""
    return step.where == "after_decode" and (step.one_to_many or not step.outputs.keys().isdisjoint(REPLACED))


def digest_of(where: str, files: Iterable[str | Path]) -> str:
    """Hash the contents of files; a StepError if one can't be read."""
    try:
        return short_hash([file_digest(Path(each)) for each in files])
    except OSError as error:
        raise StepError(
            f"{where}: {error.filename} can't be read ({error.strerror}); give each node the file"
        ) from None


def new_columns(steps: Iterable[StepConfig]) -> dict[str, str]:
    """Return types of the columns that steps add to the embeddings table."""
    return {name: kind for step in steps for name, kind in step.outputs.items() if name not in ("image", "caption")}


def check_columns(steps: Iterable[StepConfig], carried: Collection[str]) -> None:
    """Raise a StepError if an input column is unknown, or an output has the name of another column."""
    steps = sorted(steps, key=lambda step: step.where)  # after_decode, before_write
    own = set(EMBEDDINGS.names) - REPLACED.keys()
    made: set[str] = set()
    for step in steps:
        where = _describe(step)
        known = {*ROW_COLUMNS, *carried, *made, *(VECTORS if step.where == "before_write" else ("image",))}
        for name in (*step.inputs, *step.optional):
            if name not in known:
                raise StepError(
                    f"{where}: there is no column {name!r} {step.where.replace('_', ' ')}; there are "
                    f"{', '.join(sorted(known))}"
                )
        for name in step.outputs:
            if name in own or name in carried:
                whose = "the embeddings table has" if name in own else "the sources have"
                raise StepError(f"{where}: it returns {name!r}, and {whose} a column of that name; write another")
        made |= step.outputs.keys() - {"image", "caption"}
    with_carryover(EMBEDDINGS, step_schema(new_columns(steps)))


def input_types(step: UserStep, made: Mapping[str, str], carried: pa.Schema) -> dict[str, pa.DataType]:
    """Return Arrow types of the columns that a step is given."""
    known = ROW_COLUMNS | VECTORS | {"image": IMAGE} | {column.name: column.type for column in carried}
    known |= {column.name: column.type for column in step_schema(made)}
    return {name: known[name] for name in step.takes}


def _split_name(where: str, text: str) -> tuple[str, str]:
    """Split a path, a module or an entry point into place and name of the function."""
    if ":" in text:
        place, _, function = text.rpartition(":")
        if not place or not function.isidentifier():
            raise StepError(
                f"{where}: expected FILE.py:function, package.module:function, or the name of an entry point"
            )
        return place, function
    points = find_plugins(STEPS)
    if text not in points:
        known = ", ".join(sorted(points)) or "none"
        raise StepError(
            f"{where}: there is no entry point {text!r} of the group {STEPS} (there are: {known}); install its "
            "package, or write FILE.py:function"
        )
    return points[text].module, points[text].attr


def _file_of(where: str, place: str) -> Path:
    if place.endswith(FILE_SUFFIX):
        return find_file(where, place, "callable")
    return find_module(where, place, "write FILE.py:function")
