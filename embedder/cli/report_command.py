"""`embedder report`: the report of an earlier run, shown as it was at its end, and its plot."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from embedder.cli.options import ReadConfig, StoreUri, command
from embedder.cli.results import Result
from embedder.cli.store_access import read_access
from embedder.errors import ConfigError, StoreError
from embedder.quantities import plural

if TYPE_CHECKING:
    from pydantic import BaseModel

    from embedder.store.files import StoreFiles

ParsedT = TypeVar("ParsedT", bound="BaseModel")

MAX_LISTED = 5  # runs that an error message names

RunOfReport = Annotated[
    str | None, typer.Argument(metavar="[RUN_ID]", help="A run in STORE/runs; by default the last one with a report.")
]


@command
def report(
    read: ReadConfig,
    run_id: RunOfReport = None,
    store: StoreUri = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw queues, tasks and rows a second.")] = None,
) -> Result:
    """Show the report of a run: steps, operators, bottleneck, nodes, events, cost; or draw it over time."""
    from embedder.cli.render_report import report_parts
    from embedder.report.report_schema import Report
    from embedder.report.timeline import TIMELINE_FILE, Timeline, draw_timeline
    from embedder.store.journal.runs import REPORT_FILE, all_runs
    from embedder.store.layout import run_file

    files = read_access(read({"store": store}))
    known = [run.run_id for run in all_runs(files) if files.exists(run_file(run.run_id, REPORT_FILE))]
    if not known or (run_id is not None and run_id not in known):
        raise ConfigError(
            f"store {files.address}: no report of {f'run {run_id}' if run_id else 'any run'}; {_reports(known)}"
        )
    chosen = run_id or known[-1]
    found = _parse(files, run_file(chosen, REPORT_FILE), Report)
    shown = report_parts(found)
    if plot is not None:
        path = run_file(chosen, TIMELINE_FILE)
        if not files.exists(path):
            raise ConfigError(
                f"--plot {plot}: run {chosen} has no {TIMELINE_FILE}, as it embedded nothing, or in one process of an "
                "earlier release; name another run"
            )
        timeline = _parse(files, path, Timeline)
        try:
            draw_timeline(plot, timeline, found.events, f"run {chosen}")
        except OSError as error:
            raise ConfigError(f"--plot {plot}: {error.strerror}; name a file in a folder that is there") from None
        shown = [*shown, f"plot: {plot}"]
    return Result(json.loads(files.read(run_file(chosen, REPORT_FILE))), shown)


def _parse(files: "StoreFiles", path: str, kind: type[ParsedT]) -> ParsedT:
    """Parse a file of a run; raises `StoreError` if it is damaged."""
    from pydantic import ValidationError

    try:
        return kind.model_validate_json(files.read(path))
    except ValidationError as error:
        raise StoreError(
            f"{files.uri(path)}: not a whole {path.rpartition('/')[2]} ({plural(error.error_count(), 'mistake')}); "
            "restore the file from a backup, or name another run"
        ) from None


def _reports(known: list[str]) -> str:
    """Return the newest runs with a report, in a line of bounded length."""
    if not known:
        return "only runs that end leave one: run `embedder embed` to its end"
    more = f", and of {plural(len(known) - MAX_LISTED, 'earlier run')}" if len(known) > MAX_LISTED else ""
    return f"there are reports of {', '.join(known[-MAX_LISTED:])}{more}"
