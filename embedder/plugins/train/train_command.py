"""`embedder train`: one training run, described by one TOML file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from embedder.cli.options import AsJson, Settings
from embedder.cli.results import Result, print_result
from embedder.cli.terminal import bar_with_lines
from embedder.quantities import duration_text, plural, size_text

if TYPE_CHECKING:
    from embedder.plugins.train.loop import OnStep
    from embedder.plugins.train.train_report import TrainReport


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="TOML file that describes the training.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in its `out`.")] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Align or fine-tune the towers on pairs of images and captions, through the same pipeline."""
    from embedder.plugins.train.train_config import load_train_config

    run = load_train_config(config, settings=settings or ())

    from embedder.plugins.train.train_run import train as run_training

    report = run_training(run, resume=resume, show_steps=step_bar)
    print_result(as_json, Result(report.model_dump(), train_parts(report)))


@contextmanager
def step_bar(num_steps: int, num_done: int) -> Iterator["OnStep"]:
    """Draw a bar over the steps, with loss and last R@10; yields the function that takes them after each step."""
    with bar_with_lines(num_steps, "decoding", num_done) as (update, _):

        def on_step(num_steps_done: int, epoch: int, loss: float, r_at_10: float | None) -> None:
            held_out = "" if r_at_10 is None else f", held-out R@10 {r_at_10:.3f}"
            update(num_steps_done, f"epoch {epoch}, loss {loss:.3f}{held_out}", "")

        yield on_step


def train_parts(report: "TrainReport") -> list[RenderableType]:
    """The report for the terminal."""
    from embedder.plugins.train.loop import describe

    rejected = f"{report.num_rejected:,} rejected, {report.num_unpaired:,} without an image or a caption"
    lines: list[RenderableType] = [
        f"{plural(report.num_steps, 'step')} ({plural(report.num_epochs, 'epoch')}) over "
        f"{plural(report.num_items, 'item')}; {rejected}; "
        f"{duration_text(round(report.train_s, 1))} on {report.device}; "
        f"{plural(report.num_cached, 'decoded image')} kept in memory ({size_text(report.cached_bytes)})"
    ]
    if (teacher := report.teacher) is not None:
        lines[0] = (
            f"{lines[0]}; learnt from the vectors of {plural(teacher.num_joined - teacher.num_stale, 'item')} in "
            f"{teacher.store}, {teacher.num_missing:,} not in it and {teacher.num_stale:,} stale left out"
        )
    if report.best is not None:
        lines.append(f"best at step {report.best['step']:,}: {describe(report.best)}")
    lines.append(f"model: {report.model}; the last one: {report.last}")
    if report.delta is not None:
        lines.append(f"only the trained layers: {report.delta}; a model of them, wherever the base is:")
        lines.append(f"    embedder model apply-delta {report.base} {report.delta} --out DIR")
    return lines
