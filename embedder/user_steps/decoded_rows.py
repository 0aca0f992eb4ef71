"""Steps after decoding: apply the user's functions to decoded rows.

Rows stream through. An item's last one keeps `num_vectors`, which is recounted: rows may fail or become several.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from embedder.batch_schema import CARRIED, NEEDED, step_schema
from embedder.media.media_errors import DecodeError
from embedder.steps.item_decoder import CLIP_TEXT, MAIN_ALONE, STEP_IMAGE, ItemDecoder, ItemProblem, Values
from embedder.user_steps.calls import StepCalls
from embedder.user_steps.declared_steps import ROW_COLUMNS, UserStep, input_types

CHANNELS = 3
MAX_WAITING_BYTES = 64 << 20  # of images that wait for a full batch
PROBLEM = ("step", "error_type", "error", "transient")
NO_ROWS = "NoRows"
"""Error type of an item of which a step left nothing."""

Row = tuple[int, Values]
"""Number of an item in the listing, and the values of one of its rows."""


@dataclass(frozen=True)
class DecodedSteps:
    """Steps after decoding, in order, for `embedder.steps.item_decoder.DecodeSpec`; plain values.

    `outputs` are names and types of all columns that they add.
    """

    steps: tuple[UserStep, ...]
    outputs: tuple[tuple[str, str], ...]

    @property
    def columns(self) -> list[pa.Field]:
        """Return the columns that they add to the rows."""
        return [column.with_name(CARRIED + column.name) for column in step_schema(dict(self.outputs))]

    @property
    def carried(self) -> tuple[str, ...]:
        """Return the columns of the listing that they take."""
        own = {*ROW_COLUMNS, "image", *dict(self.outputs)}
        names = dict.fromkeys(name for step in self.steps for name in step.takes if name not in own)
        return tuple(CARRIED + name for name in names)

    @property
    def max_side_px(self) -> int | None:
        """Return the longest side of the images that they are given; None if they take no image."""
        return max((step.config.max_side_px for step in self.steps if "image" in step.takes), default=None)

    def open(self, decoder: ItemDecoder) -> "StepRows":
        """Return what applies them in this process."""
        return StepRows(self, decoder)


class StepRows:
    """Steps after decoding, with their processes; only one thread may use them at a time."""

    def __init__(self, steps: DecodedSteps, decoder: ItemDecoder) -> None:
        """Start nothing yet; each process starts with the first row for it.

        `decoder` makes the models' inputs of images and captions that a step returns.
        """
        self._steps = [(step, StepCalls(step)) for step in steps.steps]
        self._outputs, self._decoder = steps.outputs, decoder
        self._renumbers = any(step.config.one_to_many for step in steps.steps)

    def __call__(self, listing: pa.Table, rows: Iterable[Row]) -> Iterator[Row]:
        """Apply the steps; a ServableError if a function can't be called any more."""
        items = _Items(listing, self._decoder.caption_columns)
        for step, calls in self._steps:
            types = input_types(step, dict(self._outputs), items.carried)
            apply = self._many if step.config.one_to_many else self._each
            rows = apply(_Running(step, calls, types, items), rows)
        last = self._steps[-1][0].config.name if self._steps else ""
        return recount(map(self._finish, rows), last, renumbers=self._renumbers)

    def _each(self, running: "_Running", rows: Iterable[Row]) -> Iterator[Row]:
        step = running.step
        for waiting in _batches(rows, step.config.batch_size):
            given = {place: found for place, row in enumerate(waiting) if (found := running.inputs(row)) is not None}
            results = running.calls.each(_batch([*given.values()], running.types)) if given else []
            for place, result in zip(given, results, strict=True):
                number, values = waiting[place]
                waiting[place] = number, self._with(step, values, result, is_first=True)
            yield from waiting

    def _many(self, running: "_Running", rows: Iterable[Row]) -> Iterator[Row]:
        step = running.step
        for number, values in rows:
            given = running.inputs((number, values))
            if given is None:
                yield number, values
                continue
            found = running.calls.many(_batch([given], running.types))
            if isinstance(found, ItemProblem):
                yield number, _fail(values, found)
                continue
            children = [self._with(step, values, each, is_first=place == 0) for place, each in enumerate(found)]
            children = children or [_without_vector(values)]
            for child in children[:-1]:
                yield number, child | {"num_vectors": None}
            yield number, children[-1]

    def _with(self, step: UserStep, values: Values, result: Values | ItemProblem, *, is_first: bool) -> Values:
        """Add a function's result to a row's values; second and later rows lack its image and caption."""
        if isinstance(result, ItemProblem):
            return _fail(values, result)
        values = dict(values)
        if not is_first:
            for name in self._decoder.caption_columns | self._decoder.image_columns:
                values.pop(name, None)
        names, image = step.config.outputs, values.get(STEP_IMAGE)
        try:
            for name in names.keys() - {"image", "caption", "region"}:
                values[CARRIED + name] = result[name]
            if "image" in names:
                values |= {STEP_IMAGE: _image_of(result["image"]), "is_remade": True}
            if "region" in names:
                values |= _of_region(image, result["region"], is_cut="image" not in names)
            if "caption" in names:
                text = result["caption"]
                values |= {"caption": text if text and not text.isspace() else None, "is_recaptioned": True}
        except _BadRowError as error:
            return _fail(values, ItemProblem(step.config.name, "WrongOutput", str(error)))
        return values

    def _finish(self, row: Row) -> Row:
        """Make the models' inputs of a row whose image or caption a step has replaced."""
        number, values = row
        image = values.pop(STEP_IMAGE, None)
        is_remade, is_recaptioned = values.pop("is_remade", False), values.pop("is_recaptioned", False)
        if not values.get("modality") or not (is_remade or is_recaptioned):
            return number, values
        models = _models_of(values)
        try:
            if is_remade:
                values |= self._decoder.of_pixels(np.ascontiguousarray(image[0]), models)
                values.pop(CLIP_TEXT, None)
            if is_recaptioned:
                for name in self._decoder.caption_columns:
                    values.pop(name, None)
                values |= self._decoder.of_caption(values["caption"], models)
        except DecodeError as error:
            problem = ItemProblem(self._steps[-1][0].config.name, error.error_type, error.message, error.transient)
            return number, _fail(values, problem)
        has_image = not values.keys().isdisjoint(self._decoder.image_columns)
        if not has_image and values.keys().isdisjoint(self._decoder.caption_columns):
            problem = ItemProblem(
                self._steps[-1][0].config.name, "Empty", "the steps left neither an image nor a caption"
            )
            return number, _fail(values, problem)
        if values["modality"] != "video":
            values["modality"] = ("pair" if values.get("caption") else "image") if has_image else "text"
        return number, values


@dataclass(frozen=True)
class _Running:
    """A step with its process, the types of its inputs, and the items that its rows belong to."""

    step: UserStep
    calls: StepCalls
    types: Mapping[str, pa.DataType]
    items: "_Items"

    def inputs(self, row: Row) -> Values | None:
        """Return the inputs of a row; None if the row is skipped."""
        if not row[1].get("modality"):
            return None
        found = self.items.inputs(row, self.types)
        return found if all(found[name] is not None for name in self.step.config.inputs) else None


class _BadRowError(Exception):
    """Not an image or region."""


class _Items:
    """Columns of the listed items that steps may take."""

    def __init__(self, listing: pa.Table, caption_columns: Collection[str]) -> None:
        self._caption_columns = caption_columns
        fields = [column for column in listing.schema if column.name.startswith(CARRIED)]
        self.carried = pa.schema([column.with_name(column.name.removeprefix(CARRIED)) for column in fields])
        self._columns = {column.name: listing[CARRIED + column.name] for column in self.carried}
        self._columns |= {name: listing[name] for name in ("item_id", "uri")}

    def _has_caption(self, values: Values) -> bool:
        """Return whether a row has its item's caption, which other rows only show."""
        names = self._caption_columns
        return not names or "is_recaptioned" in values or not values.keys().isdisjoint(names)

    def inputs(self, row: Row, types: Mapping[str, pa.DataType]) -> Values:
        """Return some columns of a row."""
        number, values = row
        found: Values = {}
        for name in types:
            if name in self._columns:
                found[name] = self._columns[name][number].as_py()
            elif name == "image":
                found[name] = _struct_of(values.get(STEP_IMAGE))
            elif name == "caption" and not self._has_caption(values):
                found[name] = None
            else:
                found[name] = values.get(name if name in ROW_COLUMNS else CARRIED + name)
        return found


def recount(rows: Iterable[Row], step: str, *, renumbers: bool) -> Iterator[Row]:
    """Recount each item's rows, and number `segment` from 0 in each item if `renumbers`. Pure.

    A failed row gives none; the item's last one, which has `num_vectors`, says how many there are and why one is
    missing. `step` is the last step's name, for an item without any row.
    """
    item, count, problem = None, 0, {}
    for number, values in rows:
        if number != item:
            item, count, problem = number, 0, dict[str, Any]()
        if values.get("error_type") and not problem:
            problem = {name: values.get(name) for name in PROBLEM}
        is_last = values.get("num_vectors") is not None
        has_vector = values.get("modality") is not None
        if not has_vector and (not is_last or values.get("unchanged")):
            if is_last:
                yield number, values
            continue
        row = _unmark(values)
        if has_vector:
            row |= {"segment": count} if renumbers else {}
            count += 1
        if is_last:
            if not count and not problem:
                problem = asdict(ItemProblem(step, NO_ROWS, "the steps left no row of the item; return one, or raise"))
            row |= {"num_vectors": count} | problem
        yield number, row


def _batches(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """Gather rows until there are `size` of them, or their images are too large."""
    waiting: list[Row] = []
    num_bytes = 0
    for row in rows:
        waiting.append(row)
        image = row[1].get(STEP_IMAGE)
        num_bytes += 0 if image is None else image.nbytes
        if len(waiting) >= size or num_bytes >= MAX_WAITING_BYTES:
            yield waiting
            waiting, num_bytes = [], 0
    if waiting:
        yield waiting


def _batch(values: Sequence[Values], types: Mapping[str, pa.DataType]) -> pa.RecordBatch:
    arrays = [pa.array([each[name] for each in values], kind) for name, kind in types.items()]
    return pa.RecordBatch.from_arrays(arrays, list(types))


def _models_of(values: Values) -> Collection[str]:
    return {name.partition("@")[2] for name, value in values.items() if _is_flag(name) and value} or MAIN_ALONE


def _is_flag(name: str) -> bool:
    """Whether a column says that rows are for a model."""
    return name.partition("@")[0] == NEEDED


def _unmark(values: Values) -> Values:
    """Return a row without the values that only an item's last one has."""
    return {name: value for name, value in values.items() if name not in ("num_vectors", *PROBLEM)}


def _without_vector(values: Values) -> Values:
    """Return a row that only reports on its item."""
    kept = ("content_version", "num_vectors", "caption", *PROBLEM)
    return {name: value for name, value in values.items() if name in kept or _is_flag(name)}


def _fail(values: Values, problem: ItemProblem) -> Values:
    return _without_vector(values) | asdict(problem)


def _struct_of(image_FHWC: Any) -> Values | None:
    """Return an image as functions take it; for a video's segment, its middle frame."""
    if image_FHWC is None:
        return None
    image = np.ascontiguousarray(image_FHWC[0])
    return {"pixels": image.reshape(-1).data, "height": image.shape[0], "width": image.shape[1]}


def _image_of(returned: Values | None) -> Any:
    """Return the pixels of a returned image, uint8 (1, H, W, 3); a _BadRowError if it is no image."""
    if returned is None or returned["pixels"] is None:
        raise _BadRowError("image: found null; return an image, or raise")
    height, width, pixels = returned["height"], returned["width"], returned["pixels"]
    if not height or not width or min(height, width) < 1 or len(pixels) != height * width * CHANNELS:
        raise _BadRowError(
            f"image: found {len(pixels):,} bytes of pixels for height {height} and width {width}; return uint8 "
            "(height, width, 3)"
        )
    return np.frombuffer(pixels, np.uint8).reshape(1, height, width, CHANNELS)


def _of_region(image_FHWC: Any, region: Values | None, *, is_cut: bool) -> Values:
    """Return the columns of a row about a region of an image, cut out of it if `is_cut`.

    Raises a _BadRowError if the region is null, empty, or reaches beyond the image.
    """
    if image_FHWC is None or region is None or None in region.values():
        raise _BadRowError("region: found null; return x, y, width and height of a row that has an image")
    x, y, width, height = (region[name] for name in ("x", "y", "width", "height"))
    rows, columns = image_FHWC.shape[1:3]
    if min(x, y) < 0 or min(width, height) < 1 or x + width > columns or y + height > rows:
        raise _BadRowError(
            f"region: found x {x}, y {y}, width {width}, height {height} in an image of {columns} x {rows} pixels; "
            "return a part of it"
        )
    found: Values = {CARRIED + "region": region | {"image_width": columns, "image_height": rows}}
    if is_cut:
        found |= {STEP_IMAGE: image_FHWC[:, y : y + height, x : x + width], "is_remade": True}
    return found
