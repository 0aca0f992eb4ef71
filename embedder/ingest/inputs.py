"""Inputs of a run: its model, its store and its listing, all checked before anything is created."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import carried_schema
from embedder.config import ComputeSettings, RunConfig, SourceSettings
from embedder.config_toml.run_sections import SourceConfig
from embedder.errors import ConfigError, SourceError
from embedder.executors.choose_engine import EngineChoice, choose_engine
from embedder.executors.find_gpus import find_gpus
from embedder.executors.job import decode_spec, make_plan, store_info
from embedder.ingest.listed_items import ListedItems, listed_items
from embedder.ingest.run_times import measured_times
from embedder.ingest.work import IngestOptions
from embedder.medium_columns import BY_NAME
from embedder.models.further_models import open_models
from embedder.models.model_folder import Model, open_model, rows_of_clips
from embedder.models.run_model import RunModel
from embedder.placement import hardware
from embedder.placement.compute_dtype import DtypeChoice, Gpus, choose_dtype
from embedder.placement.fleet import Available
from embedder.placement.resources import check_cpus, check_gpus, request_resources
from embedder.quantities import plural
from embedder.sources.captions import ANY_CAPTION, CaptionRules
from embedder.sources.listing import LISTING_SCHEMA, list_sources
from embedder.sources.listing_schema import without_change_times
from embedder.sources.selection import LeftOut, is_store
from embedder.steps.item_decoder import DecodeSpec
from embedder.storage.object_stores import is_remote
from embedder.store.files import StoreFiles, is_same_place
from embedder.store.journal.runs import Run, all_runs
from embedder.store.layout import STORE_FILE, Current, StoreInfo, read_current, read_record
from embedder.store.schema import EMBEDDINGS
from embedder.store.store_info import output_columns, served_info
from embedder.store.tables.arrow_lookup import replace_column
from embedder.store.tables.tables import RecordTable
from embedder.user_steps.declared_steps import check_columns
from embedder.user_steps.run_steps import decoded_steps, depend_on_content
from shards.plan import ShardPlan

EMBED = IngestOptions()
CAPTION_FILE = r"\.(txt|json)$"


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run: configuration with its final dtype, main model without weights, and listing of all sources.

    `plan` is the cut into stages, `seen` what was published
    before the sources were listed, and `left_out` what the sources hold besides items. `models` are the main model and
    the further ones, in the order that they run in; `asked_colour` says whether the configuration sets how pixel values
    are read.
    """

    config: RunConfig
    options: IngestOptions
    model: Model
    plan: ShardPlan
    models: tuple[RunModel, ...]
    files: StoreFiles
    listing: ListedItems
    seen: Current | None
    left_out: LeftOut
    dtype: DtypeChoice
    asked_colour: bool = True

    @property
    def info(self) -> StoreInfo:
        """The main model and its preprocessing, as the store keeps them."""
        return self.models[0].info

    @property
    def views(self) -> list[tuple[StoreFiles, StoreInfo]]:
        """Views of the further models, each with its model and preprocessing."""
        return [(model.files(self.files), model.info) for model in self.models[1:]]

    @property
    def rows_follow_content(self) -> bool:
        """Whether items of one content have the same rows, whatever their names: no own step takes those."""
        return depend_on_content(self.config.step)

    @property
    def decode(self) -> DecodeSpec:
        """Settings by which items are read and decoded for the main model."""
        return replace(decode_spec(self.config.rows, self.model), steps=decoded_steps(self.config.step))


def open_inputs(
    config: RunConfig, options: IngestOptions = EMBED, find: Callable[[ComputeSettings], Gpus] = find_gpus
) -> Inputs:
    """Check the configuration, read the model's description, and list the sources.

    `config` must set `model`, `store` and at least one source. If items may leave and the store has some, empty sources
    are left to the guards. `find` finds the GPUs that decide the dtype of a new store. Raises `ConfigError` if
    something needed is not set, or the requested resources do not exist; `SourceError` if a source can't be listed, or
    all are empty; `StoreError` if the store can't be read.
    """
    model_uri, store_uri = config.required_model, config.required_store
    if not config.source and options.given is None:
        raise ConfigError("no source: give SOURCE, or a [[source]] in the configuration file")
    model, files = open_model(model_uri), StoreFiles(store_uri)
    _check_embeds(model)
    _check_places(config.source, files)
    _check_etags(config.listed)
    seen = read_current(files)
    asked_colour, config = config.decode.colour != "auto", _with_colour(config, files, seen)
    dtype = _settled_dtype(config.compute, files, seen)
    further = open_models(config.model_sections, rows_of_clips(config.rows, model))
    compute = config.compute if dtype is None else dtype.apply_to(config.compute)
    plan = make_plan(compute, model)
    _check_resources(compute, plan)
    may_be_empty = options.may_retire and seen is not None
    listing, left_out = _list_items(config.listed, model, options, files, seen, may_be_empty=may_be_empty)
    check_columns(config.step, carried_schema(listing.schema).names)
    if dtype is None:
        num_items = listing.num_rows if options.limit is None else min(options.limit, listing.num_rows)
        dtype = _first_dtype(compute, plan, model.fingerprint, num_items, find)
        plan = plan if plan.dtype == dtype.dtype else make_plan(dtype.apply_to(compute), model)
    config = config.model_copy(update={"dtype": dtype.dtype})
    carried = carried_schema(listing.schema).names
    info = with_former_columns(store_info(config.rows, model, dtype.dtype), files, seen, carried)
    models = (RunModel("", info, output_columns(info)), *further)
    return Inputs(config, options, model, plan, models, files, listing, seen, left_out, dtype, asked_colour)


def _check_embeds(model: Model) -> None:
    """Refuse a re-ranker, whose two values are no vector to search by."""
    if model.config.preprocess.scores_queries:
        raise ConfigError(
            f"model {model.uri}: it is a re-ranker, which scores hits and embeds nothing; give it to `embedder search "
            "--rerank 50 --reranker`, and a model of vectors here"
        )


def _check_resources(compute: ComputeSettings, plan: ShardPlan) -> None:
    """Refuse missing resources of this machine before anything is listed, and before Ray's slow start."""
    num_cpus = hardware.num_cpus()
    if compute.engine == "local":
        none = Available(num_cpus)
        check_gpus(request_resources(compute, none, plan.stages), none)
    if compute.engine == "ray" and compute.ray_address is None:
        check_cpus(request_resources(compute, Available(num_cpus), plan.stages), num_cpus)


def _with_colour(config: RunConfig, files: StoreFiles, seen: Current | None) -> RunConfig:
    """Return the configuration with how pixel values are read; for an existing store, as it was made."""
    bound = read_record(files, STORE_FILE, StoreInfo) if config.decode.colour == "auto" else None
    colour = config.decode.settled_colour if bound is None else served_info(bound, seen).colour
    return config.model_copy(update={"decode": config.decode.model_copy(update={"colour": colour})})


def _settled_dtype(compute: ComputeSettings, files: StoreFiles, seen: Current | None) -> DtypeChoice | None:
    """Return the compute dtype that the configuration or an existing store names; None if the devices decide."""
    bound = read_record(files, STORE_FILE, StoreInfo) if compute.dtype == "auto" else None
    if compute.dtype == "auto" and bound is None:
        return None
    recorded = (files.address, served_info(bound, seen).dtype) if bound is not None else None
    return choose_dtype(compute, lambda: None, recorded=recorded)


def _first_dtype(
    compute: ComputeSettings,
    plan: ShardPlan,
    fingerprint: str,
    num_items: int,
    find: Callable[[ComputeSettings], Gpus],
) -> DtypeChoice:
    """Return the compute dtype of a new store: that of the plan file, or by the devices of the engine that will run."""

    def gpus() -> Gpus:
        is_here = compute.ray_address is None
        if is_here and choose_here(compute, plan, num_items, fingerprint).engine == "local":
            return ()
        return find(compute)

    return choose_dtype(compute, gpus, planned=plan.dtype if compute.plan is not None else None)


def choose_here(
    compute: ComputeSettings, plan: ShardPlan, num_items: int, fingerprint: str, *, has_bf16: bool = False
) -> EngineChoice:
    """Choose the engine for a number of items, by this machine and the times of earlier runs of the model."""
    return choose_engine(
        compute,
        plan,
        num_items,
        hardware.num_cpus(),
        hardware.num_gpus(),
        gpus=hardware.gpu_names(),
        has_bf16=has_bf16,
        measured=measured_times(compute.ray_address, fingerprint),
    )


def with_former_columns(
    info: StoreInfo, files: StoreFiles, current: Current | None, carried: Collection[str] = ()
) -> StoreInfo:
    """Add the columns that removed steps, or another `[metadata]`, have left in the store's table.

    They stay, and are null in new rows; the records of runs name those that were rolled back or never published.
    Columns of the medium give way to steps' and carried ones of the same name, also to those that were carried before:
    `embedder.ingest.embed` refuses a run that carries them no more.
    """
    of_medium, of_steps, others = {*info.medium_columns}, dict[str, str](), {*carried}
    bound = read_record(files, STORE_FILE, StoreInfo) if current is not None else None
    if bound is not None and current is not None:
        served = served_info(bound, current)
        known = {*EMBEDDINGS.names, *served.step_columns, *served.medium_columns, *carried}
        newest = RecordTable(files, "embeddings")
        as_published = newest.version == current.embeddings  # the usual case: the log is read once
        table = newest if as_published else RecordTable(files, "embeddings", current.embeddings)
        left, published = _columns(newest) - known, _columns(table) - known
        runs = all_runs(files) if left else []
        of_steps = {name: kind for run in runs for name, kind in run.step_columns.items() if name in left}
        of_steps |= served.step_columns
        strange = published.difference(*(run.medium_columns for run in runs))
        of_medium, others = of_medium.union(served.medium_columns, left - strange), others | strange
    of_steps = of_steps | info.step_columns
    taken = {name.lower() for name in (*others, *of_steps)}  # the table knows no difference of case
    names = tuple(name for name in BY_NAME if name in of_medium - taken)
    return info.model_copy(update={"step_columns": of_steps, "medium_columns": names})


def _columns(table: RecordTable) -> set[str]:
    return {*(table.schema.names if table.schema is not None else ())}


def list_again_if_published(inputs: Inputs) -> Inputs:
    """Update the inputs under the store's lock: list again if another run has published since.

    Compared with the earlier listing, what that run added would look deleted.
    """
    now = read_current(inputs.files)
    if now == inputs.seen:
        return inputs
    listing, left_out = _list_items(
        inputs.config.listed, inputs.model, inputs.options, inputs.files, now, may_be_empty=True
    )
    return replace(inputs, listing=listing, seen=now, left_out=left_out)


def _check_places(sources: Iterable[SourceConfig], files: StoreFiles) -> None:
    """Refuse a store in a source's own folder, and as a source; one in a subfolder is left out of the listing."""
    for source in sources:
        if is_same_place(files, source.path):
            address = files.address.rstrip("/") if "://" in files.address else os.path.normpath(files.address)
            raise ConfigError(
                f"store {files.address}: this is the source, and the two would lie in one folder; put the store "
                f"next to it, such as {address}-store"
            )
        if not is_remote(source.path) and is_store(source.path):
            raise ConfigError(
                f"source {source.path}: this is a store, which holds embeddings and no pictures; give the folder of "
                "the pictures, and the store as --store"
            )


def _check_etags(sources: SourceSettings) -> None:
    """Refuse a comparison by ETags of sources that have none."""
    for source in sources.source:
        if sources.sources.changed_by == "etag" and not is_remote(source.path):
            raise ConfigError(
                f'sources.changed_by = "etag": source {source.path} is no bucket, and only objects of buckets have '
                'ETags; write "size+time", or "content", which reads every item in each run (for a table of web '
                "addresses, web.revalidate = true asks for their ETags)"
            )


@contextmanager
def supply_contents(inputs: Inputs, run: Run, chosen: pa.Table) -> Iterator[pa.Table]:
    """Yield the chosen items with contents that can be read while the engine runs.

    If items are given instead of sources, so are their contents, which are stored below the run's folder.
    """
    given = inputs.options.given
    if given is None:
        yield chosen
        return
    try:
        yield given.supply(chosen, run)
    finally:
        given.discard(run)


def _list_items(
    sources: SourceSettings,
    model: Model,
    options: IngestOptions,
    files: StoreFiles,
    current: Current | None,
    *,
    may_be_empty: bool,
) -> tuple[ListedItems, LeftOut]:
    if options.given is not None:
        listing, left_out = options.given.list_items(sources, may_be_empty=may_be_empty)
        return listed_items([listing], listing.schema), left_out
    asked = sources.captions.alone
    rules = CaptionRules(
        alone=model.config.vision is None if asked == "auto" else asked,
        is_kept=_KeptCaptions(files, current) if asked == "auto" else None,
        columns=sources.captions.columns,
        places=sources.captions.places,
        languages=sources.captions.languages,
    )
    return list_items(sources, files, may_be_empty=may_be_empty, captions=rules)


class _KeptCaptions:
    """Caption files that a store has a record of, read on first use."""

    def __init__(self, files: StoreFiles, current: Current | None) -> None:
        self._files, self._current = files, current
        self._was_embedded: dict[str, bool] | None = None

    def __call__(self, item_id: str) -> bool | None:
        """Whether one is an item; False if its record says that it is no item, None if there is no record."""
        if self._was_embedded is None:
            self._was_embedded = {} if self._current is None else self._read(self._current)
        return self._was_embedded.get(item_id)

    def _read(self, current: Current) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for items in RecordTable(self._files, "items", current.items).pieces(["item_id", "uri", "state"]):
            kept = items.filter(pc.match_substring_regex(items["uri"], CAPTION_FILE, ignore_case=True))
            was_embedded = pc.equal(kept["state"], "embedded").to_pylist()
            found |= dict(zip(kept["item_id"].to_pylist(), was_embedded, strict=True))
        return found


def list_items(
    sources: SourceSettings, files: StoreFiles, *, may_be_empty: bool, captions: CaptionRules = ANY_CAPTION
) -> tuple[ListedItems, LeftOut]:
    """List all items of all sources, and count what is left out; done first, so that a wrong path creates no store.

    The store, and files that the run writes for its operators, are not items. `captions` has the rules for caption
    files. Raises `SourceError` if a source can't be listed, or all are empty although they may not be.
    """
    own = (files.address, *(str(Path(name).expanduser().absolute()) for name in sources.written))
    left_out = LeftOut()
    # A joined table is in memory anyway. Repeated ids are neither looked up in it nor requested from a server.
    is_unique = bool(sources.join) or sources.web.revalidate
    tables = list_sources(
        sources.source,
        own=own,
        left_out=left_out,
        web=sources.web,
        joins=sources.join,
        unique=is_unique,
        captions=captions,
    )
    if sources.sources.changed_by == "size+mtime":
        tables = (replace_column(each, "modified", without_change_times(each["modified"])) for each in tables)
    listing = listed_items(tables, LISTING_SCHEMA)
    if not listing.num_rows and not may_be_empty:
        paths = ", ".join(source.path for source in sources.source)
        found = "; ".join(left_out.lines()) or "check the path, or whether a disk is mounted"
        if left_out.counts["excluded"]:
            found = f"{plural(left_out.counts['excluded'], 'file')} excluded by `include` or `exclude`; {found}"
        raise SourceError(f"source {paths}: nothing is in it to embed; {found}")
    return listing, left_out
