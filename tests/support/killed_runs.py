"""Runs of `embedder embed` in small parts, each in a process that tests can kill, and the rows that they leave."""

import sys

from command_runs import run_apart, run_here

import embedder

SETTINGS = (
    *("rows_per_part=8", "batch_size=4", "decode.items_per_task=8", "segment_s=1.0"),
    *("no_progress_timeout_s=90", "min_vector_spread=0"),
)


def arguments_of(source, model, store, engine="local", *settings) -> list[str]:
    options = [part for setting in (*SETTINGS, *settings) for part in ("--set", setting)]
    return ["embed", str(source), "--model", str(model), "--store", str(store), "--engine", engine, *options]


def command(*arguments) -> list[str]:
    return [sys.executable, "-m", "embedder", *arguments_of(*arguments)]


def run_to_the_end(*arguments) -> dict:
    """Run, and give the rows; with Ray in its own process, as Ray's driver."""
    run = run_apart if "ray" in arguments else run_here
    ended = run(*arguments_of(*arguments))
    assert ended.code == 0, ended.stderr
    return rows_of(arguments[2])


def rows_of(store, model=None) -> dict:
    table = embedder.open_store(store, model=model).to_arrow()
    rows = {(row["item_id"], row["segment"]): row for row in table.to_pylist()}
    assert len(rows) == table.num_rows, "no (item_id, segment) stands twice"
    return rows
