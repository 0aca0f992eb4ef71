"""CPU step of the pipeline: turns listed items into pixels and token ids, or the reason of a failure."""

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embedder.batch_schema import (
    CARRIED,
    IMAGE_GRID,
    IMAGE_TEXT,
    ITEM_NUMBER,
    NEEDED,
    REASON,
    TENSOR,
    UNREADABLE_KIND,
    Measurement,
    model_column,
)
from embedder.installation import MISSING_EXTRA
from embedder.media.media_errors import UNSUPPORTED_CAMERA
from embedder.media.sandbox import MAX_BATCH_BYTES, MAX_BATCH_IMAGES
from embedder.quantities import plural
from embedder.sources.fetch import FetchError
from embedder.sources.file_names import RAW_SUFFIXES, UNREADABLE_SUFFIXES, suffix_of
from embedder.sources.uris import name_in
from embedder.steps.attempts import limit_deaths
from embedder.steps.caption_encoder import NUM_UNREAD
from embedder.steps.content_reader import CONVERT, ContentReader
from embedder.steps.item_captions import add_values, read_problem
from embedder.steps.item_decoder import (
    CAPTION_PLACE,
    CLIP_TEXT,
    NUM_DECODED,
    NUM_FRAMES,
    DecodeSpec,
    ItemContent,
    ItemDecoder,
    ItemProblem,
    Values,
)
from embedder.steps.table_cuts import repeatable_tables
from embedder.store.journal.runs import Run
from embedder.store.journal.step_metrics import measure, trace_column
from embedder.store.tables.arrow_tensors import pack, unpack
from shards.length_groups import count_computed

TOKEN_BYTES = 4  # int32
VERSIONS = ("known_version", "held_versions")  # content versions that already have vectors; the second are several
DECODE_CURE = "decode.items_per_task = 1 finds the item; it or its decoder may need more memory than the node has"
RAY_NICENESS = 19  # lowest priority: work decoded in advance waits anyway, and a stage without input leaves its core
RAY_TABLE_BYTES = 8 << 20  # Ray's cost per column and table does not depend on their size; large tables cost memory
LISTING_ONLY = ("caption", "caption_uri", "error_type", "error", "is_media", "described_by")


def decode(listing: pa.Table, *, spec: DecodeSpec, run: Run, table_bytes: int = 0) -> Iterator[pa.Table]:
    """Decode listed items into tables of whole batches of `spec.rows_per_batch` rows, each contiguous in memory.

    Args:
        listing: rows of `embedder.sources.listing.LISTING_SCHEMA`; an item is not decoded if its content has the
            version in `known_version` or `held_versions`.
        spec: how to decode them.
        run: checked before each item for a stop request; later items give no row.
        table_bytes: minimum bytes of pixels in a table, at whose end a batch ends, too (`embedder.steps.table_cuts`);
            0: one batch per table.
    """
    yield from _reader_for(spec).decode(listing, run.stop_requested, table_bytes)


def decode_at_low_priority(
    listing: pa.Table, *, spec: DecodeSpec, run: Run, table_bytes: int | None = None
) -> Iterator[pa.Table]:
    """Run `decode` as a Ray task at low CPU priority; `table_bytes` None means `RAY_TABLE_BYTES`."""
    _lower_priority()
    work = f"decoding {plural(listing.num_rows, 'item')}, the first {listing['uri'][0]},"
    with limit_deaths(lambda: work, DECODE_CURE):
        yield from decode(listing, spec=spec, run=run, table_bytes=table_bytes or RAY_TABLE_BYTES)


@cache
def _lower_priority() -> None:
    os.nice(RAY_NICENESS)


@lru_cache(maxsize=1)
def _reader_for(spec: DecodeSpec) -> "ItemReader":
    """Return this process's reader: consecutive tasks of a worker share its sandbox process and tokeniser."""
    return ItemReader(spec)


def forget_reader() -> None:
    """Make the next task of this process use a new reader."""
    _reader_for.cache_clear()


@dataclass(frozen=True)
class PendingImage:
    """Item that was read and waits to be decoded with its neighbours.

    `number` is its place in the listing. `models` are those it is for, and `needs` says for each model whether it needs
    the item. `version` is that of its content, `file_hash` that of only its file.
    """

    number: int
    uri: str
    content: ItemContent
    models: Collection[str]
    needs: Mapping[str, bool]
    version: str | None
    file_hash: str | None = None


def _is_full(pending: Sequence[PendingImage]) -> bool:
    num_bytes = sum(len(each.content.media) for each in pending if isinstance(each.content.media, bytes))
    return len(pending) >= MAX_BATCH_IMAGES or num_bytes >= MAX_BATCH_BYTES


class ItemReader:
    """Fetches listed items and decodes them."""

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec
        self.decoder = ItemDecoder(spec)
        self.contents = ContentReader(spec, self.decoder.sandbox)
        self.steps = spec.steps.open(self.decoder) if spec.steps is not None else None

    def decode(self, listing: pa.Table, should_stop: Callable[[], bool], table_bytes: int = 0) -> Iterator[pa.Table]:
        """Yield tables of decoded rows; `should_stop` is called before each item.

        `table_bytes` is the minimum of pixel bytes in a table; 0: one batch per table.
        """
        rows = self._rows(listing, should_stop)
        rows = self.steps(listing, rows) if self.steps is not None else rows
        size, ended = self.spec.rows_per_batch, _list_ended(listing)
        batches = (
            repeatable_tables(rows, self.spec, listing.num_rows, table_bytes)
            if table_bytes
            else iter(lambda: list(islice(rows, size)), [])
        )
        while True:
            with measure("decode", self.decoder.cpu_s) as measurement:
                batch = next(batches, None)
                if batch is None:
                    return
                # A table without rows has the same columns as any other.
                table = assemble(listing.drop_columns(ended), batch or [(0, {})], self.spec)
                count_inputs(measurement, table, self.spec)
                measurement.num_frames = sum(values.get(NUM_FRAMES, 0) for _, values in batch)
                measurement.num_decoded_frames = sum(values.get(NUM_DECODED, 0) for _, values in batch)
                unread = [values[NUM_UNREAD] for _, values in batch if NUM_UNREAD in values]
                measurement.num_cut_captions, measurement.num_cut_characters = len(unread), sum(unread)
                places = (values[CAPTION_PLACE] for _, values in batch if CAPTION_PLACE in values)
                measurement.caption_places = Counter(places)
                tensors = [column.name for column in self.spec.columns if column.type == TENSOR]
                measurement.bytes_out = sum(table[name].nbytes for name in tensors)
            table = table.append_column("trace", trace_column(table.num_rows, measurement))
            yield table if batch else table.slice(0, 0)

    def _rows(self, listing: pa.Table, should_stop: Callable[[], bool]) -> Iterator[tuple[int, Values]]:
        per_model = (model_column(name, each) for each in self.spec.models for name in (REASON, *VERSIONS))
        of_steps = self.spec.steps.carried if self.spec.steps is not None else ()
        columns = ["uri", *_list_known(listing, (*LISTING_ONLY, *per_model, *of_steps))]
        items, limits = listing.select(columns).to_pylist(), self.spec.limits
        uris = (item["uri"] for item in items if item["error_type"] is None)
        pending: list[PendingImage] = []
        with self.contents.fetcher.ahead(uris, max_bytes=limits.max_file_bytes, max_file_bytes=limits.max_video_bytes):
            for number, item in enumerate(items):
                if should_stop():
                    return
                for row in self._item_rows(number, item):
                    if isinstance(row, PendingImage):
                        pending.append(row)
                        if not _is_full(pending):
                            continue
                    yield from self._decode(pending, should_stop)
                    pending = []
                    if isinstance(row, dict):
                        yield number, row
                        if row.get("segment") and should_stop():  # it may be an hour of video; the item is redone
                            return
            yield from self._decode(pending, should_stop)

    def _decode(
        self, pending: Sequence["PendingImage"], should_stop: Callable[[], bool]
    ) -> Iterator[tuple[int, Values]]:
        rows = self.decoder.image_rows([(each.content, each.models) for each in pending])
        for each, row in zip(pending, rows, strict=True):
            yield each.number, self._finish(row, each)
            if should_stop():
                return

    def _item_rows(self, number: int, item: Values) -> Iterator["Values | PendingImage | None"]:
        """Yield an item's rows, or its image to be decoded with its neighbours; None before another file is opened."""
        if item["error_type"] is not None:
            listed = ItemContent(problem=ItemProblem("read", item["error_type"], item["error"]))
            yield from self._rows_for(self._needs(item), listed)
            return
        try:
            with self.contents.fetch(item["uri"]) as fetched:
                content = self.contents.read(item, fetched)
                file_hash = self.contents.file_hash(fetched, content)
                version = self.contents.version(file_hash, content, item)
                needs = self._needs(item, version if content.problem is None else None)
                if not any(needs.values()):
                    known = {"content_version": version, "unchanged": True, "num_vectors": 0}
                    yield known | self._flags(needs) | _place_of(content)
                    return
                image = PendingImage(number, item["uri"], content, _needing(needs), needs, version, file_hash)
                if content.kind == "image" and isinstance(content.media, bytes):
                    yield image
                    return
                yield None
                for row in self.decoder.rows(content, image.models):
                    yield self._finish(row, image)
        except FetchError as error:  # it can't be opened, or it or its disk has disappeared
            content = ItemContent(caption=self.contents.captions.read(item, None).caption, problem=read_problem(error))
            yield from self._rows_for(self._needs(item), content)

    def _needs(self, item: Values, version: str | None = None) -> dict[str, bool]:
        """Return for each model whether it lists the item and lacks that content."""
        needs = {}
        for name in self.spec.models:
            is_listed = not self.spec.has_several_models or item.get(model_column(REASON, name)) is not None
            known, held = (item.get(model_column(each, name)) for each in VERSIONS)
            needs[name] = is_listed and (version is None or version not in (known, *(held or ())))
        return needs

    def _rows_for(self, needs: Mapping[str, bool], content: ItemContent) -> Iterator[Values]:
        flags = self._flags(needs)
        return (row | flags for row in self.decoder.rows(content, _needing(needs)))

    def _finish(self, row: Values, image: "PendingImage") -> Values:
        known: Values = {"content_version": image.version}
        if (medium := row.pop("medium", None)) is not None:
            said = add_values(medium, image.content.beside, self.spec.medium_columns)
            with_hash = {"content_hash": image.file_hash} if "content_hash" in self.spec.medium_columns else {}
            known["medium"] = json.dumps(said | with_hash)
        if not image.needs[""]:
            known["unchanged"] = True
        if row.get("num_vectors") is not None:
            known |= _place_of(image.content)
        return _raw_file_row(image.uri, row | self._flags(image.needs)) | known

    def _flags(self, needs: Mapping[str, bool]) -> Values:
        """Return columns that say which models a row is for; empty in a run of one model."""
        if not self.spec.has_several_models:
            return {}
        return {model_column(NEEDED, name): is_needed for name, is_needed in needs.items()}


def _place_of(content: ItemContent) -> Values:
    """Return where the caption of an item is from, for its last row; empty if it has none."""
    return {} if content.place is None else {CAPTION_PLACE: content.place}


def _list_ended(listing: pa.Table) -> list[str]:
    """List the columns that no later step takes, including carried ones if write tasks join them again."""
    is_joined = ITEM_NUMBER in listing.column_names
    return [name for name in listing.column_names if name in LISTING_ONLY or (is_joined and name.startswith(CARRIED))]


def _list_known(listing: pa.Table, names: Iterable[str]) -> list[str]:
    return [name for name in names if name in listing.schema.names]


def _raw_file_row(uri: str, row: Values) -> Values:
    """Make the row of a camera raw that can't be read: of an unknown camera, or a TIFF that is a raw only by name."""
    suffix, found = suffix_of(name_in(uri)), row.get("error_type")
    if found == UNSUPPORTED_CAMERA:
        return row | {"error_type": UNREADABLE_KIND}
    is_read = found == MISSING_EXTRA or str(found).startswith("LibRaw")
    if suffix not in RAW_SUFFIXES or row.get("step") != "decode" or row.get("transient") or is_read:
        return row
    message = f"{UNREADABLE_SUFFIXES[suffix]}: this version can't read that kind ({row['error']}); {CONVERT}"
    return row | {"error_type": UNREADABLE_KIND, "error": message}


def assemble(carried: pa.Table, rows: list[tuple[int, Values]], spec: DecodeSpec) -> pa.Table:
    """Join the listing columns of the rows' items with the decoded values, as one contiguous table."""
    numbers = [number for number, _ in rows]
    carried = carried.take(pa.array(numbers, pa.int64())).combine_chunks()
    values = [row for _, row in rows]
    carried = carried.append_column("caption", pa.array([row.get("caption") for row in values], pa.string()))
    for column in spec.columns:
        cells = [row.get(column.name) for row in values]
        if column == IMAGE_TEXT:  # a caption by itself has none
            names = [{"pair": IMAGE_TEXT.name, "video": CLIP_TEXT}.get(row.get("modality") or "", "") for row in values]
            cells = [row.get(name) for name, row in zip(names, values, strict=True)]
        array = pack(cells) if column.type == TENSOR else pa.array(cells, column.type)
        carried = carried.append_column(column, array)
    return carried


def count_inputs(measurement: Measurement, table: pa.Table, spec: DecodeSpec) -> None:
    """Count the images, captions and tokens that the towers will compute, batch by batch, including padding.

    Frames of a clip that are computed together count as one image.
    """
    pixels, tokens = table["pixels"], table["token_ids"]
    measurement.num_rows = table.num_rows
    if IMAGE_GRID.name in table.schema.names:
        together = spec.clips.frames_together if spec.clips is not None else 1
        measurement.num_images = int(sum(-(-grid[0] // together) for grid in grids_of(table)))
    elif spec.resize is not None:
        measurement.num_images = (pc.sum(pc.binary_length(pixels)).as_py() or 0) // (3 * spec.resize.image_size**2)
    measurement.num_captions = table.num_rows - tokens.null_count
    for start in range(0, table.num_rows, spec.rows_per_batch):
        sizes_bytes = pc.binary_length(tokens.slice(start, spec.rows_per_batch).drop_null())
        measurement.num_tokens += count_computed(sizes_bytes.to_numpy().astype(np.int64) // TOKEN_BYTES)


def grids_of(table: pa.Table) -> NDArray[np.int32]:
    """Return frames, patch rows and patch columns of the rows with images; int32 (R, 3)."""
    flat, _ = unpack(table[IMAGE_GRID.name].combine_chunks())
    return flat.view(np.int32).reshape(-1, 3)


def _needing(needs: Mapping[str, bool]) -> Collection[str]:
    return {name for name, is_needed in needs.items() if is_needed}
