"""`embedder config`: the values that hold and where they are from, or the reference of all keys."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from embedder.cli.options import AsJson, Settings
from embedder.cli.results import Result, new_table, print_result
from embedder.config import OF_TRAINING, RunConfig
from embedder.config_toml.load_config import Loaded, load, parse_setting
from embedder.config_toml.read import read_file
from embedder.config_toml.sections import ConfigSection
from embedder.entry_points import CONFIGURATIONS, find_plugins, load_plugin
from embedder.errors import ConfigError
from embedder.storage.printable import printable

if TYPE_CHECKING:
    from embedder.config_toml.config_reference import Section

RUN, TRAINING = "run", "training"
TITLES = {RUN: "A run: all commands but `embedder train`", TRAINING: "A training run: `embedder train`"}


def config(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE.toml]", help="TOML file of a run or of a training run.")
    ] = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Print every key with its type, default, unit and meaning.")
    ] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Print the values that hold, and where each is from; or, with --reference, every key there is."""
    if reference:
        if file is not None or settings:
            raise ConfigError("--reference prints the keys of every file; leave FILE.toml and --set out")
        print_result(as_json, _reference())
    else:
        print_result(as_json, _effective(file, settings or ()))


def _effective(file: Path | None, settings: Sequence[str]) -> Result:
    from embedder.config_toml.effective import as_data, effective, lines_of

    kind = _kind(file, settings)
    loaded: Loaded[Any] = load(_class_of(kind), file, settings=settings)
    table = effective(loaded.config, loaded.origins, _environment(loaded.config))
    source = "the defaults" if file is None else str(file)
    head = f"# Effective configuration: {source}{' and --set' if settings else ''}; paths are written in full."
    data = {"file": None if file is None else str(file), "kind": kind, "keys": as_data(table)}
    lines = [printable(line) for line in (head, *lines_of(table))]
    return Result(data, [Text("\n".join(lines))])


def _kind(file: Path | None, settings: Sequence[str]) -> str:
    """Return the kind of a configuration, judged by its top-level keys."""
    keys = set() if file is None else set(read_file(file).tree)
    keys |= {str(parse_setting(setting).path[0]) for setting in settings}
    return TRAINING if keys & set(OF_TRAINING) else RUN


def _class_of(kind: str) -> type[ConfigSection]:
    if kind == RUN:
        return RunConfig
    found: type[ConfigSection] = load_plugin(CONFIGURATIONS, kind, "a training run")
    return found


def _environment(config: Any) -> dict[str, tuple[Any, str]]:
    """Return the values that the environment overrides, by key, with the variables' names."""
    from embedder.executors.cluster_address import RAY_ADDRESS
    from shards.compat import FAST_START_VARIABLE, is_fast_start

    found: dict[str, tuple[Any, str]] = {}
    if config.engine != "local" and config.ray_address in (None, "auto") and os.environ.get(RAY_ADDRESS):
        found["ray_address"] = (os.environ[RAY_ADDRESS], RAY_ADDRESS)
    if getattr(config, "fast_start", False) and not is_fast_start():
        found["fast_start"] = (False, FAST_START_VARIABLE)
    return found


def _reference() -> Result:
    from embedder.config_toml.config_reference import kinds_of, sections_of

    found = {RUN: sections_of(RunConfig)}
    found |= {kind: sections_of(_class_of(kind), known=kinds_of(RunConfig)) for kind in find_plugins(CONFIGURATIONS)}
    shown: list[RenderableType] = []
    for kind, sections in found.items():
        shown.append(TITLES.get(kind, kind))
        shown += [part for section in sections for part in _section_parts(section)]
    data = {kind: [asdict(section) for section in sections] for kind, sections in found.items()}
    return Result(data, shown)


def _section_parts(section: "Section") -> list[RenderableType]:
    rows = [
        (key.name, key.type, key.default, key.unit, key.meaning + (f"; see {key.table}" if key.table else ""))
        for key in section.keys
    ]
    parts: list[RenderableType] = [""]
    if section.heading:
        family = f' with family = "{section.family}"' if section.family else ""
        default = " (meant where none is named)" if section.is_default else ""
        parts.append(f"{section.heading}{family}{default}: {section.summary}")
    return [*parts, new_table("key", "type", "default", "unit", "meaning", rows=rows)]
