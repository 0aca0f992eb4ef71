"""What a run starts from: its model, its store and its listing, all checked before anything is made."""

from dataclasses import dataclass, replace

import pyarrow as pa

from embedder.config import RunConfig
from embedder.errors import ConfigError, SourceError
from embedder.run import machine
from embedder.run.job import Model, make_plan, open_model, store_info
from embedder.run.resources import Available, check_cpus, check_gpus, requested
from embedder.sources.listing import LISTING_SCHEMA, list_sources
from embedder.store.files import StoreFiles, lies_inside
from embedder.store.layout import Current, StoreInfo, read_current
from shards.plan import ShardPlan


@dataclass(frozen=True)
class Inputs:
    """What a run is made from.

    Attributes:
        seen: what was published before the sources were listed.
    """

    config: RunConfig
    model: Model
    plan: ShardPlan
    info: StoreInfo
    files: StoreFiles
    listing: pa.Table
    seen: Current | None


def open_inputs(config: RunConfig, *, may_be_empty: bool = False) -> Inputs:
    """Check the configuration, read the model's description, and list the sources.

    Args:
        config: the run; `model`, `store` and at least one source must be set.
        may_be_empty: whether sources with nothing in them are somebody else's to judge, where the store has items.

    Raises:
        ConfigError: something needed is not set, or the resources asked for do not exist.
        SourceError: a source can't be listed, or nothing is in any.
        StoreError: the store can't be read.
    """
    model_uri, store_uri = _required(config)
    model = open_model(model_uri)
    plan = make_plan(config, model)
    files = StoreFiles(store_uri)
    _check_places(config, files)
    if config.engine == "local":
        check_gpus(requested(config, Available(machine.num_cpus()), plan.stages), num_devices=0)
    if config.engine == "ray" and config.ray_address is None:  # say so before Ray takes its seconds to start
        num_cpus = machine.num_cpus()
        check_cpus(requested(config, Available(num_cpus), plan.stages), num_cpus)
    seen = read_current(files)
    listing = list_items(config, may_be_empty=may_be_empty and seen is not None)
    return Inputs(config, model, plan, store_info(config, model), files, listing, seen)


def as_of_now(inputs: Inputs) -> Inputs:
    """The inputs under the store's lock: listed again where another run has published since.

    What that run found new would look as if it had gone, were it compared with the listing of before.
    """
    now = read_current(inputs.files)
    if now == inputs.seen:
        return inputs
    return replace(inputs, listing=list_items(inputs.config, may_be_empty=True), seen=now)


def _required(config: RunConfig) -> tuple[str, str]:
    if config.model is None:
        raise ConfigError("no model: give --model DIR, or `model` in the configuration file")
    if config.store is None:
        raise ConfigError("no store: give --store URI, or `store` in the configuration file")
    if not config.source:
        raise ConfigError("no source: give SOURCE, or a [[source]] in the configuration file")
    return config.model, config.store


def _check_places(config: RunConfig, files: StoreFiles) -> None:
    """A store inside a source would be embedded itself the next time."""
    for source in config.source:
        if lies_inside(files, source.path):
            raise ConfigError(f"store {files.address}: it lies inside the source {source.path}; put it somewhere else")


def list_items(config: RunConfig, *, may_be_empty: bool) -> pa.Table:
    """All items of all sources; before anything is made, so that a wrong path leaves no store behind.

    Raises:
        SourceError: a source can't be listed, or nothing is in any and that may not be.
    """
    tables = list(list_sources(config.source))
    if not any(table.num_rows for table in tables) and not may_be_empty:
        paths = ", ".join(source.path for source in config.source)
        raise SourceError(f"source {paths}: nothing is in it; check the path, or whether a disk is mounted")
    return pa.concat_tables(tables) if tables else LISTING_SCHEMA.empty_table()
