"""Commands on what is published: `history`, `rollback`, `compact`, `export-query-towers`."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from embedder.cli.options import ReadConfig, SearchedModel, StoreUri, command
from embedder.cli.results import Result, new_table
from embedder.cli.store_access import read_access, write_access
from embedder.config import RunConfig
from embedder.errors import ConfigError
from embedder.quantities import MIB, plural, size_text
from embedder.store.files import StoreFiles
from embedder.store.layout import describe_hold

if TYPE_CHECKING:
    from embedder.store.layout import Hold, Published
    from embedder.store.publish.history import PastRun

RunId = Annotated[
    str | None, typer.Argument(metavar="[RUN_ID]", help="Of `embedder history`; by default the one before.")
]


@command
def history(
    read: ReadConfig,
    store: StoreUri = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="Also the figures of every metric.")] = False,
) -> Result:
    """List what was published, and what of it can still be read."""
    from embedder.cli.render_report import metric_lines
    from embedder.store.layout import read_current
    from embedder.store.publish.history import past_runs

    files = read_access(read({"store": store}))
    current = read_current(files)
    hold = current.hold if current is not None and current.is_held else None
    runs = past_runs(files)
    figures = dict(_figures_of(files, runs)) if metrics else {}
    data = [
        {
            "run_id": run.run_id,
            **({"metrics": figures.get(run.run_id, {})} if metrics else {}),
            "started_at": run.started_at,
            "current": run.is_current,
            "can_be_read": run.can_be_read,
            **(run.record.model_dump(exclude={"format_version", "hold"}) if run.record else {}),
        }
        for run in runs
    ]
    shown: list[RenderableType] = [_history_table(runs, hold) if runs else "nothing is published yet"]
    for run_id, found in figures.items():
        shown += [f"run {run_id}:", *metric_lines(found)]
    if hold is not None:
        shown.append(describe_hold(files.address, hold))
    return Result({"publications": data, "hold": hold.model_dump() if hold else None}, shown)


def _history_table(runs: "Sequence[PastRun]", hold: "Hold | None") -> Table:
    has_models = any(run.record is not None and run.record.models for run in runs)
    columns = ("run", "published", "kind", "model", "items", "pictures", "vectors", "rejects", "index")
    more = ("further models", "") if has_models else ("",)
    table = new_table(*columns, *more)
    for run in runs:
        further = [_further_models(run)] if has_models else []
        table.add_row(run.run_id, *_history_cells(run), *further, _state(run, hold))
    return table


def _figures_of(files: StoreFiles, runs: "list[PastRun]") -> list[tuple[str, dict[str, Any]]]:
    from embedder.store.layout import read_record, run_file
    from embedder.store.row_metrics import METRICS_FILE, RunMetrics

    run_ids = list(dict.fromkeys((run.record and run.record.interim_of) or run.run_id for run in runs))
    records = files.each(lambda run_id: read_record(files, run_file(run_id, METRICS_FILE), RunMetrics), run_ids)
    return [(run_id, record.figures) for run_id, record in zip(run_ids, records, strict=True) if record is not None]


def _history_cells(run: "PastRun") -> list[str]:
    record = run.record
    if record is None:
        return [f"started {run.started_at:%Y-%m-%d %H:%M}" if run.started_at else "", *[""] * 7]
    return [
        f"{record.published_at:%Y-%m-%d %H:%M}",
        _kind(record),
        _model_name(record.model, record.model_fingerprint),
        f"{record.num_items:,}",
        "" if record.num_pictures is None else f"{record.num_pictures:,}",
        f"{record.num_vectors:,}",
        f"{record.num_rejected:,}",
        "" if record.index is None else str(record.index),
    ]


def _further_models(run: "PastRun") -> str:
    if run.record is None:
        return ""
    found = []
    for name, own in sorted(run.record.models.items()):
        num_rows = run.record.model_counts.get(name, {}).get("num_vectors", 0)
        rows = plural(num_rows, "row" if own.has_vectors is False else "vector")
        found.append(f"{name} ({rows}{'' if own.index is None else f', index {own.index}'})")
    return ", ".join(found)


def _kind(record: "Published") -> str:
    if record.restores:
        return f"{record.kind} to {record.restores}"
    return f"{record.kind}, interim" if record.interim_of else record.kind


def _state(run: "PastRun", hold: "Hold | None") -> str:
    if run.is_current:
        return f"current, held since {hold.since:%Y-%m-%d %H:%M}" if hold else "current"
    if run.can_be_read:
        return ""
    return "can't be read" if run.record else "no record"


def _model_name(model: str | None, fingerprint: str | None) -> str:
    name = (model or "").rstrip("/").rpartition("/")[2]
    return " ".join(part for part in (name, (fingerprint or "")[:8]) if part)


@command
def rollback(
    read: ReadConfig,
    run_id: RunId = None,
    release: Annotated[bool, typer.Option("--release", help="Let `embed` and `refresh` publish again.")] = False,
    store: StoreUri = None,
) -> Result:
    """Publish again what an earlier run published, with its model and its index, and hold it until --release."""
    if release and run_id is not None:
        raise ConfigError(f"rollback {run_id} --release: one or the other; a release changes nothing that is published")
    run = read({"store": store})
    return _release(run) if release else _roll_back(run, run_id)


def _roll_back(config: RunConfig, run_id: str | None) -> Result:
    from embedder.store.maintenance.rollback import rollback as run_rollback
    from embedder.store.store_info import read_published
    from embedder.store_index.keep_index import index_choice

    with write_access(config, commits="embedder rollback") as files:
        new = run_rollback(files, run_id, index_choice(files, config.index))
        hold = read_published(files).hold
    index = "no index, search is exact" if new.index is None else f"index {new.index}"
    text = (
        f"published again what run {new.restores} published: {plural(new.num_items, 'item')}, "
        f"{plural(new.num_vectors, 'vector')}, {index}, model {_model_name(new.model, new.model_fingerprint)}; "
        f"this is run {new.run_id}"
    )
    shown: list[RenderableType] = [text]
    if hold is not None:
        shown.append(describe_hold(files.address, hold))
    return Result(new.model_dump() | {"hold": hold.model_dump() if hold else None}, shown)


def _release(config: RunConfig) -> Result:
    from embedder.store.maintenance.rollback import release

    with write_access(config) as files:
        released = release(files)
    if released is None:
        return Result({"released": False, "hold": None}, ["no rollback holds the store: there is nothing to release"])
    text = (
        f"released: it was held at run {released.to_run} since {released.since:%Y-%m-%d %H:%M}; the next refresh or "
        f"embed brings what has changed, and takes over what run {released.from_run} still holds"
    )
    return Result({"released": True, "hold": released.model_dump()}, [text])


@command
def compact(
    read: ReadConfig,
    store: StoreUri = None,
    target_rows: Annotated[int | None, typer.Option(min=1, help="Rows of a part file.")] = None,
    target_mib: Annotated[float | None, typer.Option(min=0.001, max=1e6, help="MiB of a part file.")] = None,
) -> Result:
    """Put small part files together, and files of earlier releases in pages that are read fast; no row changes."""
    run = read({"store": store})

    from embedder.store.maintenance.compact import PartTarget
    from embedder.store.maintenance.compact import compact as run_compact
    from embedder.store_index.keep_index import same_index_and_words

    default = PartTarget()
    target = PartTarget(
        num_rows=target_rows or default.num_rows,
        size_bytes=int(target_mib * MIB) if target_mib else default.size_bytes,
    )
    with write_access(run, commits="embedder compact") as files:
        choose_index = same_index_and_words(files, run.index)
        new, tables = run_compact(files, target, choose_index=choose_index, lay_out=True, vectors=run.vectors)
    shown: list[RenderableType] = [
        f"{each.model} {each.table}: ".lstrip()
        + f"{plural(each.num_files_before, 'part file')} -> {each.num_files_after:,}, "
        f"{size_text(each.bytes_rewritten)} rewritten"
        for each in tables
    ]
    shown.append("nothing to compact" if new is None else f"published as run {new.run_id}; no row changed")
    data = {"published": new.model_dump() if new else None, "tables": [asdict(each) for each in tables]}
    return Result(data, shown)


@command
def export_query_towers(
    read: ReadConfig,
    store: StoreUri = None,
    model: SearchedModel = None,
    force: Annotated[bool, typer.Option("--force", help="Write them again though they are there.")] = False,
) -> Result:
    """Write the towers that encode queries into a store of an earlier version, so that searches need no torch."""
    run = read({"store": store})

    from embedder.encoders.query_tower_export import export_query_towers as run_export
    from embedder.store.layout import MAIN
    from embedder.store.publish.query_towers import towers_path
    from embedder.store.store_info import read_published, read_store_info, served_info
    from embedder.store.tables.models import find_model

    with write_access(run) as store_files:
        publication = read_published(store_files)
        is_name = model is not None and model in (MAIN, *publication.models)
        files, current = find_model(store_files, publication, model if is_name and model is not None else MAIN)
        info = served_info(read_store_info(files), current)
        written = run_export(files, info, None if is_name else model, force=force)
    path = files.uri(towers_path(info))
    text = f"query towers are there already: {path}" if written is None else f"query towers written: {path}"
    return Result({"written": written is not None, "path": path}, [text])
