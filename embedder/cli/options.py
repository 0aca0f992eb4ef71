"""Options that commands share, and the configuration that they make."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import update_wrapper
from importlib.metadata import EntryPoint
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from embedder.cli.results import Result, print_result
from embedder.config import RunConfig, load_config
from embedder.errors import ConfigError, RunFailedError

LOG = logging.getLogger(__name__)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file that describes the run.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of it.")]
AsJson = Annotated[bool, typer.Option("--json", help="The last line of standard output is one JSON document.")]
StoreUri = Annotated[str | None, typer.Option("--store", help="Folder that holds the results.")]
ModelUri = Annotated[str | None, typer.Option("--model", help="Model folder: local, s3:// or hub id.")]
SearchedModel = Annotated[
    str | None, typer.Option("--model", help="Model of the store by its name; or a model folder, if that has moved.")
]
AllowStoreCode = Annotated[
    bool, typer.Option("--allow-store-code", help="Run the code that the store names, as its writer wants it.")
]
ModelName = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="A further model of the store; else its main one.")
]
ModelFolder = Annotated[Path, typer.Option("--out", help="The model folder to make.")]
NumStages = Annotated[int | None, typer.Option("--stages", help="Shards that the model is cut into.")]
PlanFile = Annotated[str | None, typer.Option("--plan", help="Plan file made by `embedder plan --out`.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16, float16 or int8.")]
PublishedBy = Annotated[
    str | None, typer.Option("--version", metavar="RUN_ID", help="As it was published by that run.")
]
RetryRejects = Annotated[
    bool, typer.Option("--retry-rejects/--no-retry-rejects", help="Embed again what was rejected before.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and why; change nothing.")]
Repair = Annotated[
    bool, typer.Option("--repair", help="Embed again what `store check` finds without its vectors, or with others.")
]
Force = Annotated[
    list[str] | None, typer.Option("--force", metavar="GUARD", help="Publish although this guard fails; repeatable.")
]

ReadConfig = Callable[..., RunConfig]
"""Function that reads the configuration from `--config`, a mapping of values by key, texts `key=value`, and `--set`."""


def command(function: Callable[..., Result]) -> Callable[..., None]:
    """Make a command from a function that takes options and returns what is printed.

    The function's first parameter is a `ReadConfig`, its others are the command's own options; `--config`, `--set` and
    `--json` are added to them. A parameter that is a dataclass is a record of options, one for each of its fields.

    Raises:
        RunFailedError: the result is a failure.
    """
    _, *parameters = signature(function).parameters.values()
    records = {each.name: each.annotation for each in parameters if _is_record(each)}

    def run(config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False, **given: Any) -> None:
        def read(overrides: Mapping[str, Any] | None = None, options: Iterable[str] = ()) -> RunConfig:
            return load_config(config, overrides, [*options, *(settings or ())])

        filled = {name: _fill_record(record, given) for name, record in records.items()}
        result = function(read, **filled, **given)
        print_result(as_json, result)
        if result.afterwards is not None:
            result.afterwards()
        if result.failure:
            raise RunFailedError(result.failure)

    own = [option for each in parameters for option in _options_of(each)]
    *shared, _ = signature(run).parameters.values()
    update_wrapper(run, function)
    vars(run)["__signature__"] = Signature([*own, *shared])  # typer reads it, and the annotations
    run.__annotations__ = {each.name: each.annotation for each in (*own, *shared)}
    return run


def _options_of(parameter: Parameter) -> list[Parameter]:
    """Return the options that a parameter stands for: those of its record, or itself."""
    if _is_record(parameter):
        return list(signature(parameter.annotation).parameters.values())
    return [parameter.replace(kind=Parameter.POSITIONAL_OR_KEYWORD)]


def _is_record(parameter: Parameter) -> bool:
    return is_dataclass(parameter.annotation)


def _fill_record(record: Any, given: dict[str, Any]) -> Any:
    """Make a record of its options, which leave `given`."""
    names = [each.name for each in fields(record) if each.name in given]
    return record(**{name: given.pop(name) for name in names})


def add_command(to: typer.Typer, name: str, found: Any) -> None:
    """Add a command, or an application of subcommands, under a name."""
    to.add_typer(found, name=name) if isinstance(found, typer.Typer) else to.command(name)(found)


def add_plugins(to: typer.Typer, points: Mapping[str, EntryPoint]) -> None:
    """Add the commands of plug-ins by name; one that can't be imported or made is left out, with a warning."""
    for name, point in points.items():
        try:
            add_command(trial := typer.Typer(), name, found := point.load())
            typer.main.get_command(trial)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - another package's code: whatever it raises, the other commands work
            LOG.warning("command %s (%s) can't be loaded: %s; reinstall its package", name, point.value, error)
        else:
            add_command(to, name, found)


def source_override(path: str | None, **described: Any) -> list[dict[str, Any]] | None:
    """Return the one source that the command line describes, in the form of a configuration file.

    A `path` (or URI) of None keeps the sources of the file. `described` are other keys of a `[[source]]`; empty or None
    means not given. Raises `ConfigError` if options describe a source that is not given.
    """
    given = {key: value for key, value in described.items() if value}
    if path is not None:
        return [{"path": path, **given}]
    if given:
        raise ConfigError(
            "--kind, the column options, --include and --exclude describe SOURCE; give SOURCE, or use the file's "
            "[[source]]"
        )
    return None


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGTP]?)(i?)B?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def parse_size(option: str, text: str | None) -> int | None:
    """Parse `2GiB`, `500MB`, `200TB` as bytes; None for None. Raises `ConfigError` if it is no size."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"{option} {text!r}: this is no size; write it as 2GiB, 500MB or 200TB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[match[2]])
