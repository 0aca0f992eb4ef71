"""`embedder deploy`: a plan becomes what starts a cluster; the subcommands are plug-ins, too."""

from typing import Annotated

import typer

from embedder.cli.options import ReadConfig, add_plugins, command
from embedder.cli.results import Result
from embedder.entry_points import TARGETS, find_plugins

app = typer.Typer(no_args_is_help=True, help="Make a cluster of a plan: manifests of KubeRay, a script for Slurm.")
add_plugins(app, find_plugins(TARGETS))


@app.command()
@command
def drain(
    read: ReadConfig,
    within_s: Annotated[float, typer.Option(min=1, help="Seconds that it may take.")] = 120.0,
) -> Result:
    """Stop the run of this machine or pod and take its node out of the Ray cluster, before it ends."""
    read()

    from embedder.plugins.deploy.drain import drain as drain_here

    done = drain_here(within_s)
    return Result({"done": done}, done)
