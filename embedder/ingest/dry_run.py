"""What a refresh would do, and why, without doing it: no lock, no file written, no model loaded."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict
from rich.console import RenderableType
from rich.table import Table

from embedder.batch_schema import carried_schema
from embedder.config import RunConfig
from embedder.ingest.diff import CONTENT_CHANGED
from embedder.ingest.eta import RunEstimate, estimate_s
from embedder.ingest.guards import Verdict, check_forced, force, judge_hold
from embedder.ingest.inputs import Inputs, open_inputs
from embedder.ingest.judging import judge_listing
from embedder.ingest.known_items import NOTHING_FINISHED, left_out_before, published_items
from embedder.ingest.takeover import find_held
from embedder.ingest.work import IngestOptions, WorkPlan, count_by_source, outdated_by, plan_work
from embedder.store.files import StoreFiles
from embedder.store.layout import STORE_FILE, Current, StoreInfo, read_current, read_record
from embedder.store.purge.tombstones import without_purged
from embedder.store.runs import Run, finished_items, resumable_run
from embedder.store.store_info import check_writable, served_info
from embedder.store.tables import RecordTable

MIB = 1 << 20


class EmbedReason(BaseModel):
    """Why some items would be embedded."""

    model_config = ConfigDict(frozen=True)

    reason: str
    num_items: int
    size_bytes: int
    """Of their files, where the listing tells."""


class Forecast(BaseModel):
    """What a refresh would do."""

    model_config = ConfigDict(frozen=True)

    reasons: tuple[EmbedReason, ...]
    num_unchanged: int
    num_retired: int
    retired_by_source: dict[str, int]
    held: str | None = None
    """What holds the store, so that a refresh would do nothing."""
    num_taken_over: int = 0
    """Items that a rolled back publication holds: no model would see them."""
    num_to_embed: int
    """Within the limit."""
    num_left: int
    """Beyond it."""
    replaces_all: bool
    """Another model or preprocessing: the old vectors are served until all new ones are there."""
    rewrite_bytes: int
    """Part files of embeddings that hold replaced or retired items, which are written anew; at most."""
    estimate: RunEstimate
    retire_guard: Verdict
    left_out: tuple[str, ...] = ()
    """What the sources hold beside items, in lines for a person."""


def forecast(config: RunConfig, options: IngestOptions) -> Forecast:
    """Compare the sources with the store as `refresh` would.

    Raises:
        ConfigError, SourceError, StoreError: as `embedder.ingest.flow.refresh`.
    """
    check_forced(options.forced)
    inputs = open_inputs(config, may_be_empty=True)
    files = inputs.files
    bound, current = read_record(files, STORE_FILE, StoreInfo), read_current(files)
    if bound is not None:
        check_writable(files, bound)
    outdated = outdated_by(served_info(bound, current), inputs.info) if bound and current else None
    published = published_items(files, current)
    listing, _ = without_purged(inputs.listing, files)
    work = plan_work(config, options, listing, published, _finished_before(inputs), outdated)
    changing = work.difference.to_embed
    held = find_held(files, current, inputs.info, changing)
    left = replace(work.difference, to_embed=held.left(changing))
    num_taken_over, work = changing.num_rows - left.to_embed.num_rows, replace(work, difference=left)
    chosen = left.first(options.limit).to_embed
    hold = judge_hold(files.address, current)
    return Forecast(
        reasons=_reasons(work),
        num_unchanged=work.difference.num_unchanged,
        num_retired=work.retired.num_rows,
        retired_by_source=count_by_source(work.retired),
        held=hold.message if hold is not None and force(hold, options.forced).blocks else None,
        num_taken_over=num_taken_over,
        num_to_embed=chosen.num_rows,
        num_left=left.to_embed.num_rows - chosen.num_rows,
        replaces_all=outdated is not None,
        rewrite_bytes=_rewrite_bytes(files, current, work, changing if num_taken_over else chosen),
        estimate=estimate_s(files, inputs.info.model_fingerprint, chosen.num_rows),
        retire_guard=judge_listing(work, published, config, options),
        left_out=tuple(inputs.left_out.with_read(left_out_before(files, current, published, listing)).lines()),
    )


def _finished_before(inputs: Inputs) -> pa.Table:
    """What the unfinished run has done that `refresh` would go on with."""
    last = resumable_run(inputs.files, inputs.info, carried_schema(inputs.listing.schema))
    return finished_items(Run(inputs.files, last, session="")) if last is not None else NOTHING_FINISHED


def _reasons(work: WorkPlan) -> tuple[EmbedReason, ...]:
    sizes = work.difference.to_embed.group_by("reason").aggregate([("item_id", "count"), ("size_bytes", "sum")])
    rows = sorted(sizes.to_pylist(), key=lambda row: -row["item_id_count"])
    return tuple(
        EmbedReason(reason=row["reason"], num_items=row["item_id_count"], size_bytes=row["size_bytes_sum"] or 0)
        for row in rows
    )


def _rewrite_bytes(files: StoreFiles, current: Current | None, work: WorkPlan, chosen: pa.Table) -> int:
    """Bytes of the published part files in which a row may change; found file by file."""
    if current is None or work.outdated is not None or not (chosen.num_rows or work.retired.num_rows):
        return 0
    ids = pa.chunked_array([*chosen["item_id"].chunks, *work.retired["item_id"].chunks], pa.string()).combine_chunks()
    table = RecordTable(files, "embeddings", current.embeddings)
    touched = {
        path
        for path in table.paths()
        if pc.any(pc.is_in(table.read(["item_id"], [path])["item_id"], value_set=ids)).as_py()
    }
    return table.size_bytes(touched)


def forecast_parts(found: Forecast) -> list[RenderableType]:
    """The forecast as a person reads it."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("what", "items", "MiB to read", "why"):
        table.add_column(name, justify="left" if name in ("what", "why") else "right")
    for each in found.reasons:
        action = "compare, then embed" if each.reason == CONTENT_CHANGED else "embed"
        table.add_row(action, f"{each.num_items:,}", f"{each.size_bytes / MIB:,.1f}", each.reason)
    if found.num_taken_over:
        table.add_row("take over", f"{found.num_taken_over:,}", "", "held by a publication that was rolled back")
    for source, num in found.retired_by_source.items():
        table.add_row("retire", f"{num:,}", "", f"gone from source {source}" if source else "gone from the source")
    table.add_row("leave alone", f"{found.num_unchanged:,}", "", "unchanged, or finished before")
    lines: list[RenderableType] = [table] if found.held is None else [found.held, "then:", table]
    if found.replaces_all:
        lines.append("nothing is published until all items are done under the new model or preprocessing")
    lines.append(
        f"{found.num_to_embed:,} items now, {found.num_left:,} left for later; "
        f"at most {found.rewrite_bytes / MIB:,.1f} MiB of part files rewritten; {found.estimate.text()}"
        + ("; less where contents turn out equal" if any(r.reason == CONTENT_CHANGED for r in found.reasons) else "")
    )
    lines += found.left_out
    if not found.retire_guard.passed:
        word = "overridden" if found.retire_guard.forced else "would refuse this"
        lines.append(f"guard retire {word}: {found.retire_guard.message}; --force retire does it all the same")
    return lines
