"""`embedder train`: one training run, described by one TOML file."""

from pathlib import Path
from typing import Annotated

import typer

from embedder.cli.options import AsJson, Settings
from embedder.cli.results import Result, print_result


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="TOML file that describes the training.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in its `out`.")] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Align or fine-tune the towers on pairs of pictures and captions, through the same pipeline."""
    from embedder.training.config import load_train_config

    run = load_train_config(config, settings=settings or ())

    from embedder.cli.render_training import TrainingWatcher, train_parts
    from embedder.training.run import train as run_training

    report = run_training(run, TrainingWatcher(), resume=resume)
    print_result(as_json, Result(report.model_dump(), train_parts(report)))
