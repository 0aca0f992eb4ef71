"""Further models of a run: their servables, the columns of their rows in the store, and the inputs that decode makes.

No framework is imported: a dry run and a submission need none.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from embedder.config import RowSettings
from embedder.errors import ConfigError
from embedder.media.resize import Colour, ResizeSpec
from embedder.models.model_folder import Model, resize_spec
from embedder.models.run_model import RunModel
from embedder.servables import make_servable
from embedder.servables.declared_servables import find_tokenizer
from embedder.servables.order import order_servables
from embedder.servables.running_servable import comes_from_servable, decoded_name
from embedder.servables.servable import Servable
from embedder.servables.servable_columns import (
    IMAGES,
    BytesInput,
    ColumnInput,
    ImageInput,
    InputColumn,
    OutputColumn,
    ResizedInput,
    TokensInput,
)
from embedder.steps.further_inputs import FurtherInput
from embedder.store.layout import Searched, StoreInfo
from embedder.store.schema import EMBEDDINGS, VECTOR_COLUMNS, with_carryover
from embedder.user_steps.declared_steps import changes_rows, step_fingerprints
from shards.fingerprint import short_hash

EMBEDDING = "embedding"
"""Output that is the vector of the image or text, by what the servable takes."""


@dataclass(frozen=True, kw_only=True)
class FurtherModel(RunModel):
    """Model of a run in addition to the main one; `computed_for` names it and the models that need its outputs."""

    servable: Servable
    computed_for: frozenset[str]


def further_models(models: Iterable[RunModel]) -> list[FurtherModel]:
    """Return the models of a run but the main one, in the order in which they run."""
    return [model for model in models if isinstance(model, FurtherModel)]


def columns_of(servable: Servable) -> dict[str, str]:
    """Return the columns of a model's table by outputs of its servable: vector columns, else the outputs' own names.

    Raises:
        ConfigError: two outputs have the same column, or one has the name of a column that all tables have.
    """
    declared = servable.output_columns()
    of_images = any(isinstance(each, IMAGES) for each in servable.input_columns().values())
    vector = "image_embedding" if of_images else "text_embedding"
    found = {name: vector if name == EMBEDDING and _is_vector(output) else name for name, output in declared.items()}
    twice = [name for name, column in found.items() if list(found.values()).count(column) > 1]
    if twice:
        raise ConfigError(f"{servable.where()}: outputs {' and '.join(twice)} are both the column {vector}; rename one")
    for name, column in found.items():
        if column in VECTOR_COLUMNS and not _is_vector(declared[name]):
            raise ConfigError(
                f"{servable.where()}: output {name} is no vector (type float32, shape [size]), as a column of that "
                "name is; rename it"
            )
        if column in EMBEDDINGS.names and column not in VECTOR_COLUMNS:
            raise ConfigError(f"{servable.where()}: output {name}: each table has a column of that name; rename it")
    return found


def _is_vector(output: OutputColumn) -> bool:
    return output.type == "float32" and len(output.shape) == 1 and output.shape[0] != "any"


def open_models(sections: Iterable[Mapping[str, Any]], rows: RowSettings) -> tuple[FurtherModel, ...]:
    """Read and check the further models of a configuration, in the order in which they run.

    Each of the `sections` is one that `embedder.servables.make_servable` takes.

    Raises:
        ServableError: one breaks a rule, lacks a file, or doesn't fit the others.
        shards.ModelError: a folder is no model folder.
        ConfigError: an output has the name of another column, or a run's items don't have an input.
    """
    servables = [make_servable(section).absolute() for section in sections]
    ordered = order_servables(servables)
    takers = {each.name: {each.name} for each in ordered}
    for servable in reversed(ordered):
        for giver in _givers(servable):
            takers[giver] |= takers[servable.name]
    fingerprints: dict[str, str] = {}
    found = []
    for servable in ordered:
        _check_inputs(servable)
        _check_clips(servable, rows)
        parts = [servable.fingerprint(), *(fingerprints[giver] for giver in sorted(_givers(servable)))]
        fingerprints[servable.name] = short_hash([part.encode() for part in parts]) if parts[1:] else parts[0]
        columns = columns_of(servable)
        outputs = _other_outputs(servable, columns)
        info = _info(rows, servable, fingerprints[servable.name], columns, outputs)
        found.append(
            FurtherModel(
                servable.name,
                info,
                outputs,
                columns,
                servable=servable,
                computed_for=frozenset(takers[servable.name]),
            )
        )
    return tuple(found)


def _givers(servable: Servable) -> set[str]:
    inputs = servable.input_columns().values()
    return {(each.of or "").partition(".")[0] for each in inputs if comes_from_servable(each)}


def _check_inputs(servable: Servable) -> None:
    for name, declared in servable.input_columns().items():
        if declared.of and not comes_from_servable(declared):
            raise ConfigError(
                f"{servable.where()}: input {name}: of = {declared.of!r}: a run's items have only an image and a "
                "caption; leave `of` out, or name another model's output as MODEL.OUTPUT"
            )


def _check_clips(servable: Servable, rows: RowSettings) -> None:
    """Refuse a model of clips next to a main one that takes other frames of a segment."""
    clips, main = (servable.clip_frames, True), (rows.frames_per_segment, rows.frames_from_start)
    if servable.clip_frames is not None and clips != main:
        raise ConfigError(
            f"{servable.where()}: {servable.uri} takes clips of {servable.clip_frames} frames, and the store's main "
            f"model is given {rows.frames_per_segment} of a segment{', too' if main[1] else ', spread otherwise'}; "
            'make it the main one, or write sides = ["text"]'
        )


def _other_outputs(servable: Servable, columns: Mapping[str, str]) -> pa.Schema:
    """Return the columns of a model's table other than vectors."""
    declared = servable.output_columns()
    return pa.schema(
        [
            pa.field(column, declared[output].arrow_type())
            for output, column in columns.items()
            if column not in VECTOR_COLUMNS
        ]
    )


def _info(
    rows: RowSettings, servable: Servable, fingerprint: str, columns: Mapping[str, str], others: pa.Schema
) -> StoreInfo:
    """Describe what determines a model's rows: the servable, and how videos and animations are cut."""
    stored = with_carryover(EMBEDDINGS, others)
    vectors = [column for column in columns.values() if column in VECTOR_COLUMNS]
    searched: Searched = "text" if vectors == ["text_embedding"] else "image"
    colour = rows.decode.settled_colour
    # Older stores were made before there was a choice.
    of_choices = [*([] if colour == "raw" else [colour]), *(["from_start"] if rows.frames_from_start else [])]
    cut = json.dumps([rows.segment_s, rows.frames_per_segment, sorted(map(str, others)), *of_choices])
    section = servable.model_dump(mode="json", exclude_unset=True)
    return StoreInfo(
        model=servable.uri,
        model_fingerprint=fingerprint,
        preprocess_fingerprint=short_hash([cut.encode()]),
        segment_s=rows.segment_s,
        frames_per_segment=rows.frames_per_segment,
        dtype=str(getattr(servable, "dtype", "float32")),
        colour=colour,
        searched=searched,
        steps=step_fingerprints(step for step in rows.step if changes_rows(step)),
        has_vectors=bool(vectors),
        outputs={column: str(stored.field(column).type) for column in others.names},
        servable=section | {"kind": getattr(servable, "kind", "python")},
    )


def further_inputs(models: Sequence[FurtherModel], main: Model, colour: Colour) -> tuple[FurtherInput, ...]:
    """Return decode's inputs for further models: equal ones only once, in the main model's column if possible."""
    found: dict[str, FurtherInput] = {}
    for made, rule, of_main in _inputs(models, main):
        column = of_main or made.column
        before = found.get(column)
        models_of_it = made.models | (before.models if before is not None else frozenset())
        shared = FurtherInput(column, models_of_it, made.make, *rule)
        resize = replace(shared.resize, colour=colour) if shared.resize is not None else None
        found[column] = replace(shared, resize=resize)
    return tuple(found.values())


def shared_columns(models: Sequence[FurtherModel], main: Model) -> dict[str, str]:
    """Return the main model's input columns that further models also take, by the names that these use."""
    found: dict[str, str] = {}
    for made, rule, of_main in _inputs(models, main):
        if of_main is not None:
            found[made.column] = of_main
            if made.has_grid:
                found[made.grid_column] = FurtherInput(of_main, made.models, made.make, *rule).grid_column
    return found


Rule = tuple[ResizeSpec | None, str | None, int, int | None, str]


def _inputs(models: Sequence[FurtherModel], main: Model) -> Iterator[tuple[FurtherInput, Rule, str | None]]:
    """Yield the inputs that decode makes, with their rules and the main model's column of the same rule."""
    own = _own_columns(main)
    for model in models:
        for declared in model.servable.input_columns().values():
            if comes_from_servable(declared):
                continue
            made = _make_input(declared, model.computed_for)
            rule = (made.resize, made.tokenizer_json, made.max_tokens, made.end_id, made.prompt)
            yield made, rule, own.get(rule) if made.make in ("pixels", "token_ids") else None


def _own_columns(main: Model) -> Mapping[Rule, str]:
    own: dict[Rule, str] = {}
    if main.config.vision is not None and main.config.preprocess.clips is None:  # clips' frames have their own sizes
        own[resize_spec(main), None, 0, None, ""] = "pixels"
    if main.config.text is not None:
        rule = main.config.preprocess
        own[None, main.tokenizer_json, rule.max_caption_tokens, main.config.text.end_id, rule.caption_prompt] = (
            "token_ids"
        )
    return own


def _make_input(declared: InputColumn, models: frozenset[str]) -> FurtherInput:
    column = decoded_name(declared)
    match declared:
        case ImageInput():
            return FurtherInput(column, models, "image", declared.resize)
        case ResizedInput():
            return FurtherInput(column, models, "pixels", declared.resize)
        case TokensInput():
            path = find_tokenizer("the tokeniser of an input", declared.tokenizer)
            text = Path(path).read_text(encoding="utf-8")
            limits = declared.max_tokens, declared.end_id, declared.prompt
            return FurtherInput(column, models, "token_ids", None, text, *limits)
        case ColumnInput():
            raise ConfigError(f"column {declared.of}: a run's items have no such column")
        case _:
            return FurtherInput(column, models, "bytes" if isinstance(declared, BytesInput) else "text")
