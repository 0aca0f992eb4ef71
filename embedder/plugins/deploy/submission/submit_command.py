"""`embedder submit` and `embedder jobs`: runs as jobs of a Ray cluster, by HTTP."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import RenderableType
from rich.text import Text

from embedder.cli.options import AsJson, Settings
from embedder.cli.refresh_command import CONFIG_HELP
from embedder.cli.results import Result, new_table, print_result
from embedder.cli.terminal import Terminal, error_terminal
from embedder.config import load_config
from embedder.errors import ConfigError
from embedder.executors.interrupts import SignalInterrupt
from embedder.quantities import duration_text
from embedder.storage.printable import printable
from embedder.store.layout import utc_now

if TYPE_CHECKING:
    from embedder.plugins.deploy.submission.job_server import JobInfo, JobServer
    from embedder.plugins.deploy.submission.submit import JobKind

API_SERVER_ADDRESS = "RAY_API_SERVER_ADDRESS"

Address = Annotated[
    str | None,
    typer.Option(metavar="URL", help=f"Dashboard of the cluster, as http://head:8265; else {API_SERVER_ADDRESS}."),
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job, as `embedder jobs list` names it.")]
Follow = Annotated[bool, typer.Option("--follow", help="Print the job's log until it ends; Ctrl-C leaves it running.")]

app = typer.Typer(no_args_is_help=True, help="List, follow and stop the jobs of a Ray cluster.")


def submit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help=CONFIG_HELP)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTION...]", help="Further options of the command, after --.")
    ] = None,
    address: Address = None,
    kind: Annotated[str, typer.Option("--command", help="refresh or embed.")] = "refresh",
    follow: Follow = False,
    install: Annotated[
        bool, typer.Option("--install", help="Have pip install the libraries on each node; else they are checked.")
    ] = False,
    python: Annotated[str, typer.Option(help="Interpreter on the head.")] = "python",
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Run refresh or embed as a job of a Ray cluster; this machine needs neither Ray nor torch."""
    from embedder.plugins.deploy.submission.submit import local_paths
    from embedder.plugins.deploy.submission.submit import submit as submit_job

    run = load_config(config, settings=settings or ())
    checked = check_arguments(kind, arguments or (), _all_commands())
    job = submit_job(run, address_of(address), kind=checked, arguments=arguments or (), install=install, python=python)
    data = {"job_id": job.job_id, "address": job.server.url, "command": kind}
    shown: list[RenderableType] = [f"job {job.job_id} at {job.server.url}"]
    if local := local_paths(run):
        shown.append(f"every node must see what this machine sees at {', '.join(local)}")
    if follow:
        error_terminal().print(*shown, sep="\n", style="dim", soft_wrap=True)
        _follow(job.server, job.job_id)
        print_result(as_json, Result(data | {"status": "SUCCEEDED"}, [f"job {job.job_id} succeeded"]))
        return
    given = "" if address is None else f" --address {shlex.quote(address)}"
    shown.append(f"follow it: embedder jobs logs {job.job_id} --follow{given}")
    print_result(as_json, Result(data, shown))


@app.command("list")
def list_jobs(
    address: Address = None,
    everything: Annotated[bool, typer.Option("--all", help="Those that other programs submitted, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the jobs that embedder submitted, the newest first."""
    from embedder.plugins.deploy.submission.submit import OUR_KEY

    infos = [info for info in job_server(address).jobs() if everything or OUR_KEY in info.metadata]
    table = new_table("job", "status", "started", "took", "store", left=("job", "status", "started", "store"))
    for info in infos:
        started = f"{info.started_at:%Y-%m-%d %H:%M:%S}" if info.started_at else ""
        table.add_row(info.job_id, info.status, started, _took(info), info.metadata.get("store", ""))
    data = {"jobs": [_data(info) for info in infos]}
    print_result(as_json, Result(data, [table if infos else "no jobs"]))


@app.command("logs")
def logs(job: JobId, address: Address = None, follow: Follow = False) -> None:
    """Print what a job has printed."""
    server = job_server(address)
    if follow:
        _follow(server, job)
        return
    _print_log(server.log(job))


@app.command("stop")
def stop(job: JobId, address: Address = None, as_json: AsJson = False) -> None:
    """Stop a job as Ctrl-C would; what is finished is kept, and the same submission continues it."""
    server = job_server(address)
    is_stopped = server.stop(job)
    answer = "is asked to stop; what is finished is kept" if is_stopped else "was not running"
    print_result(as_json, Result({"job_id": job, "stopped": is_stopped}, [f"job {job} {answer}"]))


def address_of(given: str | None) -> str:
    """Address of the dashboard: the option's, or the environment's; ConfigError if there is neither."""
    if address := given or os.environ.get(API_SERVER_ADDRESS):
        return address
    raise ConfigError(f"no cluster: give --address http://HEAD:8265, or set {API_SERVER_ADDRESS}")


def job_server(address: str | None) -> "JobServer":
    """Client of the cluster that the option or the environment names."""
    from embedder.plugins.deploy.submission.job_server import JobServer

    return JobServer(address_of(address))


def check_arguments(kind: str, arguments: Sequence[str], commands: Mapping[str, Any]) -> "JobKind":
    """Check a job's command line here, so that a mistake costs no job.

    Raises:
        ConfigError: it is another command.
        click.UsageError: it has no such option, or a value that breaks its rule.
    """
    if kind not in ("refresh", "embed"):
        raise ConfigError(f"--command {kind}: a job runs refresh or embed")
    command = commands[kind]
    named = ["run.toml"] if kind == "refresh" else ["--config", "run.toml"]
    command.make_context(kind, [*named, *arguments])
    return cast("JobKind", kind)


def _all_commands() -> Mapping[str, Any]:
    from embedder.cli.run_command import whole_app

    commands: Mapping[str, Any] = typer.main.get_command(whole_app()).commands  # type: ignore[attr-defined]
    return commands


def _follow(server: "JobServer", job_id: str) -> None:
    """Print a job's log until it ends; SignalInterrupt ends only this command, and says how to find the job again."""
    from embedder.plugins.deploy.submission.follow import follow_log

    try:
        for piece in follow_log(server, job_id):
            _print_log(piece)
    except SignalInterrupt as error:
        error.args = (
            f"no longer following; job {job_id} continues: `embedder jobs logs {job_id} --follow` follows it, "
            f"`embedder jobs stop {job_id}` stops it",
        )
        raise


def _print_log(text: str) -> None:
    """Print a log as it is, except for characters that control the terminal."""
    terminal = Terminal()
    for line in text.splitlines():
        terminal.print(Text(printable(line)), soft_wrap=True)  # whole, as it may be a line of JSON


def _took(info: "JobInfo") -> str:
    if info.started_at is None:
        return ""
    return duration_text(round(((info.ended_at or utc_now()) - info.started_at).total_seconds()))


def _data(info: "JobInfo") -> dict[str, Any]:
    return {**vars(info), "metadata": dict(info.metadata)}
