"""Embed any Ray dataset into a store: its rows are items, with the same guarantees as those of a source."""

import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import CARRIED, SHOWN_URI
from embedder.compat import fast_start
from embedder.config import RunConfig, SourceSettings
from embedder.errors import ConfigError, SourceError, check_argument
from embedder.executors.dataset_rows import (
    DatasetColumns,
    carried_types,
    store_pictures,
    stream_listing,
)
from embedder.executors.progress import ShowProgress, no_progress
from embedder.ingest.copies import first_of_each
from embedder.ingest.embed import ingest
from embedder.ingest.work import IngestOptions
from embedder.installation import require
from embedder.quantities import plural
from embedder.report.report_schema import Report
from embedder.sources.captions import PLACES_MARK, CaptionRules
from embedder.sources.join import JOINED
from embedder.sources.listing import LISTING_SCHEMA, list_given
from embedder.sources.listing_schema import HASHED, Listing, table_of_rows
from embedder.sources.selection import LeftOut
from embedder.store.journal.runs import Run
from embedder.store.layout import input_folder
from embedder.store.schema import EMBEDDINGS
from embedder.store.tables.arrow_lookup import positions, replace_column, take_or_null

if TYPE_CHECKING:
    from ray.data import Dataset

LOG = logging.getLogger(__name__)
WAY_OUT = "embed_dataset(..., id=COLUMN)"
NAME_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
CHANGED = "DatasetChanged"
ADDED = f"{re.escape(JOINED)}|{re.escape(PLACES_MARK)}"
"""What precedes what listing adds to `modified`."""


def embed_dataset(
    dataset: "Dataset",
    config: RunConfig,
    *,
    id: str | None = None,
    image: str | None = None,
    caption: str | None = None,
    uri: str | None = None,
    carryover: Sequence[str] = (),
    name: str | None = None,
    retire: bool = False,
    retry_rejects: bool = False,
    limit: int | None = None,
    forced: Collection[str] = (),
    show_progress: ShowProgress = no_progress,
) -> Report:
    """Embed the rows of a Ray dataset that the store lacks, and publish them.

    Each row is one item, embedded exactly once: the same call continues one that was killed, an unchanged row costs a
    later call only its hash, a broken row is a reject. Other items of the store stay; with `retire`, items of this
    dataset's `name` leave if the dataset no longer has them.

    The dataset is computed twice: to list it, and for the pictures of the items to embed, which lie in the store while
    the run lasts (`embedder.executors.dataset_rows`). It must give the same rows both times; materialise a costly one
    first (`dataset.materialize()`).

    Args:
        dataset: rows with images, captions, or both; Ray must be up.
        config: the run; `model` and `store` must be set. Its sources are not listed; its joins apply.
        id: column with ids, strings or integers; without it, addresses are ids, or else a hash of the content.
        image: column with encoded bytes, uint8 arrays (H, W, 3), addresses, or structs with `bytes` or `path`.
        caption: column with captions.
        uri: column with addresses that hits show and open; without one, pictures given as bytes can't be shown later.
        carryover: columns copied into the embeddings table; no others are carried.
        name: prefix of each id (`name:id`), which distinguishes the dataset from other sources of the store.
        retire: whether items of that name leave if the dataset no longer has them.
        retry_rejects: embed again what was rejected before, changed or not.
        limit: the most items to embed in this call.
        forced: names of guards that are overridden.
        show_progress: display of the progress.

    Raises:
        ArgumentTypeError: the dataset is not a Ray Data one, or a column's name is not a string.
        ConfigError: something needed is not set, or Ray is not running.
        SourceError: a column is missing or of a wrong type, or the dataset has no row.
        StoreError, RunFailedError: as `embedder.refresh`.
    """
    check_argument("embedder.embed_dataset: config", config, RunConfig, "one of embedder.load_config")
    require("embed", "embedder.embed_dataset")
    import ray

    if not ray.is_initialized():
        raise ConfigError("Ray is not running; call ray.init() before embedder.embed_dataset")
    expected = "a dataset of Ray Data, as ray.data.from_items makes one"
    check_argument("embedder.embed_dataset: dataset", dataset, ray.data.Dataset, expected)
    columns = _columns(id, image, caption, uri, carryover, name)
    schema = dataset.schema(fetch_if_missing=False)
    if schema is not None:
        columns.check(dict(zip(schema.names, schema.types, strict=True)))
    options = IngestOptions(
        kind="refresh" if retire else "embed",
        retry_rejects=retry_rejects,
        limit=limit,
        forced=tuple(forced),
        given=DatasetItems(dataset, columns),
    )
    with fast_start(config.fast_start):
        return ingest(config.model_copy(update={"source": ()}), options, show_progress)


def _columns(
    id_: str | None,
    image: str | None,
    caption: str | None,
    uri: str | None,
    carryover: Sequence[str],
    name: str | None,
) -> DatasetColumns:
    carryover = (carryover,) if isinstance(carryover, str) else tuple(carryover)
    named = {"id": id_, "image": image, "caption": caption, "uri": uri, "name": name}
    for key, value in (*named.items(), *(("carryover", each) for each in carryover)):
        if value is not None:
            check_argument(f"embedder.embed_dataset: {key}", value, str, "a text")
    if image is None and caption is None:
        raise ConfigError("embedder.embed_dataset: neither image nor caption names a column; name one of them, or both")
    for each in carryover:
        if each in EMBEDDINGS.names:
            raise SourceError(
                f"dataset: carryover {each!r} is already a column of the embeddings table; rename it in the dataset"
            )
    if twice := [each for each in carryover if carryover.count(each) > 1]:
        raise SourceError(f"dataset: carryover names {twice[0]!r} twice; name each once")
    if name is not None and not (name and NAME_LETTERS.issuperset(name)):
        raise ConfigError(f"embedder.embed_dataset: name={name!r}: letters, digits, . _ and - only, one at least")
    return DatasetColumns(id_, image, caption, uri, carryover, name or "", os.getcwd())  # noqa: PTH109


@dataclass(frozen=True)
class DatasetItems:
    """Items of a run that come from a dataset instead of sources (`embedder.ingest.work.GivenItems`)."""

    dataset: "Dataset"
    columns: DatasetColumns

    @property
    def source(self) -> str:
        """Value of the column `source` of its items."""
        return self.columns.name

    def list_items(self, sources: SourceSettings, *, may_be_empty: bool) -> tuple[pa.Table, LeftOut]:
        """Compute the dataset, and list its rows ordered by id; `sources` has the joins and limits for the web.

        Raises `SourceError` if it can't be listed, or has no row although it must.
        """
        left_out = LeftOut()
        with _translate_ray_errors():
            tables = list(stream_listing(self.dataset, self.columns))
        if not tables and not may_be_empty:
            raise SourceError("dataset: it has no row, so there is nothing to embed; look at dataset.count()")
        carried = carried_types(tables)
        schema = pa.schema(
            [*table_of_rows([]).schema, *(column.with_name(CARRIED + column.name) for column in carried)]
        )
        rows = pa.concat_tables([schema.empty_table(), *(table.cast(schema) for table in tables)])
        # Blocks come in random order, but of rows with the same id always the same one must be the item.
        rows = rows.sort_by([("item_id", "ascending"), ("modified", "ascending")])
        if self.columns.id is None:
            first = first_of_each(rows, ["item_id"])
            if num_others := rows.num_rows - first.num_rows:
                left_out.repeated[WAY_OUT] += num_others
            rows = first
        listing = Listing(iter([rows]), carried, unique_ids=self.columns.id is None)
        rules = CaptionRules(places=sources.captions.places, languages=sources.captions.languages)
        listed = list_given(
            listing, self.source, left_out=left_out, web=sources.web, joins=sources.join, captions=rules
        )
        return pa.concat_tables([LISTING_SCHEMA.empty_table(), *listed], promote_options="default"), left_out

    def supply(self, chosen: pa.Table, run: Run) -> pa.Table:
        """Store the pictures of the items to embed where decode finds them, below the run's folder until `discard`.

        Returns the items with the places of their pictures as `uri`, and the addresses to publish as `SHOWN_URI`.
        """
        self.discard(run)  # left by a killed session
        is_here = pc.and_(pc.starts_with(chosen["modified"], HASHED), pc.is_null(chosen["error_type"]))
        if not pc.any(is_here).as_py():
            return chosen
        ids, versions = self._raw(chosen)
        wanted = pa.table({"item_id": ids, "modified": versions}).filter(is_here)
        LOG.info(f"dataset: {plural(wanted.num_rows, 'picture')} to be written below the store's run, until it ends")
        with _translate_ray_errors():
            placed = store_pictures(self.dataset, self.columns, wanted, run.files, input_folder(run.run_id))
        placed = first_of_each(placed, ["item_id"])  # equal rows are one item
        cells = take_or_null(placed["cell"], positions(ids, placed["item_id"]))
        is_gone = pc.and_(is_here, pc.is_null(cells))
        if num_gone := pc.sum(is_gone).as_py():
            LOG.warning(f"dataset: {plural(num_gone, 'row')} did not come again as listed; they are rejects")
        error = (
            "the dataset did not give this row a second time as it was listed; give one that is the same each time it "
            "is computed, as dataset.materialize() makes it"
        )
        values = {
            "uri": pc.if_else(pc.is_valid(cells), cells, chosen["uri"]),
            "error_type": pc.if_else(is_gone, pa.scalar(CHANGED), chosen["error_type"]),
            "error": pc.if_else(is_gone, pa.scalar(error), chosen["error"]),
        }
        supplied = chosen.append_column(SHOWN_URI, chosen["uri"])
        for name, column in values.items():
            supplied = replace_column(supplied, name, column)
        return supplied

    def discard(self, run: Run) -> None:
        """Delete the pictures of a run."""
        for info in run.files.list(input_folder(run.run_id)):
            run.files.delete(info.path)

    def _raw(self, items: pa.Table) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
        """Return ids and versions as the dataset's rows have them: without the name, and without what listing adds."""
        ids = items["item_id"]
        if self.source:
            ids = pc.utf8_slice_codeunits(ids, len(self.source) + 1)
        versions = pc.list_element(pc.split_pattern_regex(items["modified"], ADDED), 0)
        return ids, versions


@contextmanager
def _translate_ray_errors() -> Iterator[None]:
    """Raise a task's error that the user can repair, without Ray's wrapping."""
    from ray.exceptions import RayError

    from embedder.pipeline import translate_ray_error

    try:
        yield
    except RayError as error:
        raise translate_ray_error(error) from None
