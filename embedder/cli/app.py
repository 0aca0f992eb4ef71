"""The command `embedder`: reads options, calls one function, prints. Loads nothing heavy before a command needs it.

Exit 0: done. Exit 2: the user's mistake, in one line. Exit 128 + n: broken off by signal n. Exit 1: anything else.
"""

import gc
import sys
import traceback
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer

from embedder.cli import commands, index, search, store
from embedder.cli import evaluate as evaluation_cli
from embedder.cli import refresh as refresh_cli
from embedder.cli.options import AsJson, ConfigFile, Force, ModelUri, Settings, StoreUri, print_result
from embedder.cli.terminal import MAX_LINE_CHARACTERS
from embedder.config import load_config
from embedder.engine.interrupts import SignalInterrupt, interruptible
from embedder.errors import USER_MISTAKES, RunFailedError
from embedder.storage.printable import printable

DEFAULT_NUM_ITEMS = 1_000_000  # what --what-if answers for, unless told
# Importing a million objects that all stay takes a fifth longer where Python looks for garbage after each 700.
OBJECTS_PER_COLLECTION = 100_000
USAGE_ERRORS: tuple[type[Exception], ...] = typer.BadParameter.__bases__  # of all versions of typer


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
model_app = typer.Typer(no_args_is_help=True, help="Bring a checkpoint, see what a folder holds.")
app.add_typer(model_app, name="model")
evaluation_cli.add_to(app)
index.add_to(app)
refresh_cli.add_to(app)
store.add_to(app)
search.add_to(app)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the model, the store and the picture.")] = Path("runs/demo"),
    force: Force = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Embed the shipped emoji through three stages, index them, and search."""
    from embedder.cli.demo import run_demo

    print_result(as_json, run_demo(load_config(config, settings=settings or ()), out, force or ()))


@app.command()
def embed(
    source: Annotated[str | None, typer.Argument(help="Folder, file, table, tars or URI.")] = None,
    model: ModelUri = None,
    store: StoreUri = None,
    kind: Annotated[str | None, typer.Option(help="auto, files, table or webdataset.")] = None,
    id_column: Annotated[str | None, typer.Option(help="Column of a table that becomes item_id.")] = None,
    image_column: Annotated[str | None, typer.Option(help="Column with pictures or videos: bytes or URIs.")] = None,
    caption_column: Annotated[str | None, typer.Option(help="Column with captions.")] = None,
    carryover: Annotated[list[str] | None, typer.Option(help="Column to copy into the embeddings table.")] = None,
    include: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Only such files, as '*.jpg'.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="No such files, as 'private/'.")] = None,
    engine: Annotated[str | None, typer.Option(help="auto, ray or local.")] = None,
    device: Annotated[str | None, typer.Option(help="What stages compute on: auto, cpu or cuda.")] = None,
    num_stages: Annotated[int | None, typer.Option("--stages", help="Shards that the model is cut into.")] = None,
    plan: Annotated[str | None, typer.Option(help="Plan file made by `embedder plan --out`.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or int8.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="Ray cluster to attach to.")] = None,
    retry_rejects: Annotated[bool, typer.Option(help="Embed again what was rejected before.")] = False,
    force: Force = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Stream embeddings into the store: creates it or goes on, then publishes."""
    columns = {"id": id_column, "image": image_column, "caption": caption_column}
    patterns = {"include": include or [], "exclude": exclude or []}
    sources = commands.source_override(source, kind, columns, carryover, patterns)
    run = load_config(
        config,
        {
            "model": model,
            "store": store,
            "source": sources,
            "engine": engine,
            "device": device,
            "num_stages": num_stages,
            "plan": plan,
            "dtype": dtype,
            "ray_address": ray_address,
        },
        settings or (),
    )
    print_result(as_json, commands.embed(run, retry_rejects=retry_rejects, forced=force or ()))


@app.command()
def plan(
    model: ModelUri = None,
    num_stages: Annotated[int | None, typer.Option("--stages", help="Shards that the model is cut into.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or int8.")] = None,
    devices: Annotated[str | None, typer.Option(help="A fleet, as 2xA100:80GB, 4xT4@0.5, 8xCPU.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan file, for `embed --plan`.")] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="By operations and bandwidth: measure nothing.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="How busy each stage is, who spends CPU, why.")] = False,
    what_if: Annotated[bool, typer.Option("--what-if", help="Hours, cost, ratios; what one more device buys.")] = False,
    num_items: Annotated[int | None, typer.Option(min=1, help="Items to embed, for --what-if.")] = None,
    data: Annotated[str | None, typer.Option("--bytes", help="Data to embed instead, as 200TB.")] = None,
    item: Annotated[str | None, typer.Option("--item-bytes", help="Mean size of an item, as 150kB.")] = None,
    images_per_item: Annotated[float, typer.Option(help="Pictures and video frames of an item, on average.")] = 1.0,
    captions_per_item: Annotated[float, typer.Option(help="Captions of an item, on average.")] = 1.0,
    caption_tokens: Annotated[int, typer.Option(help="Tokens of a caption, on average.")] = 16,
    memory_cap: Annotated[str | None, typer.Option(help="The most memory of one replica, as 8GiB.")] = None,
    weights_cap: Annotated[str | None, typer.Option(help="The most weights of one replica, as 2GiB.")] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Plan the cut and where its stages run, and say why."""
    from embedder.planning.options import PlanOptions, items_in, parse_size
    from shards.planning.workload import DataMix

    asked = items_in(num_items, data, item)
    options = PlanOptions(
        mix=DataMix(images_per_item, captions_per_item, caption_tokens),
        devices=devices,
        estimate=estimate,
        memory_cap_bytes=parse_size("--memory-cap", memory_cap),
        weights_cap_bytes=parse_size("--weights-cap", weights_cap),
        explain=explain,
        num_items=asked or DEFAULT_NUM_ITEMS if what_if else asked,
        out=out,
    )
    run = load_config(config, {"model": model, "num_stages": num_stages, "dtype": dtype}, settings or ())
    print_result(as_json, commands.plan(run, options))


@app.command()
def verify(
    source: Annotated[str | None, typer.Argument(help="What to verify with; the shipped pictures else.")] = None,
    model: ModelUri = None,
    plan: Annotated[str | None, typer.Option(help="Plan file made by `embedder plan --out`.")] = None,
    num_stages: Annotated[int | None, typer.Option("--stages", help="Shards that the model is cut into.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or int8.")] = None,
    num_items: Annotated[int, typer.Option("--items", min=1, help="Items to take, evenly spaced.")] = 64,
    tolerance: Annotated[float | None, typer.Option(min=0, help="Largest absolute difference allowed.")] = None,
    min_cosine: Annotated[float | None, typer.Option(max=1, help="Least cosine allowed.")] = None,
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda.")] = "cpu",
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Compare the stages' output with the unsplit towers'; exit 1 where they are too far apart."""
    sources = commands.source_override(source, None, {}, None)
    overrides = {"model": model, "source": sources, "plan": plan, "num_stages": num_stages, "dtype": dtype}
    run = load_config(config, overrides, settings or ())
    result = commands.verify(run, num_items, tolerance, min_cosine, device)
    print_result(as_json, result)
    if not result.data["passed"]:
        raise RunFailedError(f"verify: {'; '.join(result.data['failures'])}")


@model_app.command("import")
def model_import(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Hugging Face ViT + ALBERT folder, or timm checkpoint.")],
    out: Annotated[Path, typer.Option(help="The model folder to make.")],
    albert: Annotated[str | None, typer.Option(help="ALBERT folder that joins a timm checkpoint.")] = None,
    embedding_dim: Annotated[int, typer.Option(help="Width of the shared space, for fresh projections.")] = 256,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Turn a checkpoint into a model folder."""
    load_config(config, settings=settings or ())
    print_result(as_json, commands.model_import(source, out, albert, embedding_dim))


@model_app.command("info")
def model_info(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Model folder, or a delta over one.")],
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Print towers, parameters, bytes and fingerprints."""
    run = load_config(config, {"model": folder}, settings or ())
    print_result(as_json, commands.model_info(run))


@model_app.command("apply-delta")
def model_apply_delta(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Model folder that the delta was trained over.")],
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="Folder that `embedder train` wrote the layers into.")],
    out: Annotated[Path, typer.Option(help="The model folder to make.")],
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Make a model folder of a base and the layers that somebody trained over it; both stay as they are."""
    load_config(config, settings=settings or ())
    print_result(as_json, commands.model_apply_delta(base, delta, out))


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="TOML file that describes the training.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in its `out`.")] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Align or fine-tune the towers on pairs of pictures and captions, through the same pipeline."""
    from embedder.training.config import load_train_config

    print_result(as_json, commands.train(load_train_config(config, settings=settings or ()), resume=resume))


@app.command()
def doctor(config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Print versions, devices, memory, and what would be chosen."""
    print_result(as_json, commands.doctor(load_config(config, settings=settings or ())))


def main() -> None:
    """Run the command, and turn what goes wrong into the exit code that it deserves."""
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    sys.excepthook = _show_traceback
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal that knows no Unicode shows escapes, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    with interruptible():
        try:
            # Typer itself would print mistakes as they came, and take the hook for tracebacks.
            sys.exit(typer.main.get_command(app)(standalone_mode=False))
        except USAGE_ERRORS as error:
            sys.exit(_show_usage_error(error))
        except typer.Abort:
            sys.exit(_fail("aborted", 1))
        except USER_MISTAKES as error:
            sys.exit(_fail(str(error), 2))
        except RunFailedError as error:
            sys.exit(_fail(str(error), 1))
        except SignalInterrupt as error:
            sys.exit(_fail(str(error), error.exit_code))


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"embedder: {printable(message, MAX_LINE_CHARACTERS)}\n")
    return code


def _show_usage_error(error: Any) -> int:
    """Say what is wrong with the command line, and where its options are explained."""
    if type(error).__name__ == "NoArgsIsHelpError":  # a command without arguments, which has printed its help
        return 2
    message = " ".join(error.format_message().split()).rstrip(".")
    see = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
    return _fail(message + see, 2)


def _show_traceback(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Print a traceback whose messages don't control the terminal."""
    for piece in traceback.format_exception(kind, error, where):
        for line in piece.rstrip("\n").split("\n"):
            sys.stderr.write(printable(line) + "\n")
