"""Paths of a configuration file, which are relative to the file's folder."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embedder.errors import ConfigError

INPUTS = ("model", "plan", "tokenizer")
RESULTS = ("store", "out")
LOGS = ("log_file", "runs_file", "metrics_file", "traces")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # s3://, file://, hf-hub:
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")
_WILDCARD = re.compile(r"[*?\[{]")


def follow_file(tree: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Resolve all relative paths of a configuration against the folder of its file.

    A model that has the form of a hub id stays one unless a folder of that name is there; programs that are found by
    their bare name stay as they are.

    Args:
        tree: a configuration as TOML has it; values of the wrong type are left for their check.
        file: path of the configuration.

    Raises:
        ConfigError: nothing is at a path below the file's folder, and something is below the working directory.
    """
    folder = Path(os.path.abspath(file)).parent  # noqa: PTH100 (a link to a file stands where the link stands)
    moved = dict(tree)
    for key in (*INPUTS, *RESULTS, *LOGS):
        if isinstance(value := tree.get(key), str):
            moved[key] = _followed(value, key, folder, file)
    models = tree.get("model")
    if isinstance(models, list):
        moved["model"] = [_model(each, folder, file) for each in models]
    steps = tree.get("step")
    if isinstance(steps, list):
        moved["step"] = [_step(each, folder, file) for each in steps]
    sources = tree.get("source")
    if isinstance(sources, list):
        moved["source"] = [_source(each, folder, file) for each in sources]
    joins = tree.get("join")
    if isinstance(joins, list):
        moved["join"] = [_source(each, folder, file, "join.path") for each in joins]
    match tree.get("on_failure"):
        case {"command": [str(program), *arguments]} if "/" in program:
            program = _followed(program, "on_failure.command", folder, file)
            moved["on_failure"] = tree["on_failure"] | {"command": [program, *arguments]}
    return moved


def _model(model: Any, folder: Path, file: Path) -> Any:
    """Resolve the paths of a [[model]]; a program is followed where it is a path, a class by its file."""
    if not isinstance(model, dict):
        return model
    moved = dict(model)
    for key in ("uri", "plan", "python"):
        value = model.get(key)
        if isinstance(value, str) and (key != "python" or "/" in value):
            path, colon, name = value.rpartition(":") if value.rpartition(":")[0].endswith(".py") else (value, "", "")
            moved[key] = _followed(path, "model" if key == "uri" else f"model.{key}", folder, file) + colon + name
    if isinstance(extra := model.get("extra_files"), list):
        moved["extra_files"] = [
            _followed(each, "model.extra_files", folder, file) if isinstance(each, str) else each for each in extra
        ]
    if isinstance(inputs := model.get("inputs"), dict):
        moved["inputs"] = {name: _input(each, folder, file) for name, each in inputs.items()}
    return moved


def _input(declared: Any, folder: Path, file: Path) -> Any:
    if not isinstance(declared, dict) or not isinstance(path := declared.get("tokenizer"), str):
        return declared
    return declared | {"tokenizer": _followed(path, "model.inputs.tokenizer", folder, file)}


def _step(step: Any, folder: Path, file: Path) -> Any:
    """Resolve the paths of a [[step]]: a function's file; a module or an entry point stays."""
    if not isinstance(step, dict):
        return step
    moved = dict(step)
    if isinstance(value := step.get("callable"), str) and (path := value.rpartition(":")[0]).endswith(".py"):
        moved["callable"] = f"{_followed(path, 'step.callable', folder, file)}:{value.rpartition(':')[2]}"
    if isinstance(extra := step.get("extra_files"), list):
        moved["extra_files"] = [
            _followed(each, "step.extra_files", folder, file) if isinstance(each, str) else each for each in extra
        ]
    return moved


def _source(source: Any, folder: Path, file: Path, key: str = "source.path") -> Any:
    if not isinstance(source, dict) or not isinstance(path := source.get("path"), str):
        return source
    return source | {"path": _followed(path, key, folder, file)}


def _followed(value: str, key: str, folder: Path, file: Path) -> str:
    if not value or value.startswith(("/", "~")) or _SCHEME.match(value):
        return value
    followed = str(folder / value)
    if _is_there(followed):
        return followed
    here = str(Path.cwd() / value)
    if here != followed and key not in LOGS and _is_there(here):
        raise ConfigError(
            f"{file}: {key} = {json.dumps(value, ensure_ascii=False)} means {followed}, as paths in a file follow the "
            f"file, and nothing is there; there is {here}, below the working directory: write that path in full, or "
            + ("name another to make a new one" if key in RESULTS else "move it beside the file")
        )
    return value if key == "model" and _HUB_ID.fullmatch(value) else followed


def _is_there(path: str) -> bool:
    """Whether something is at a path, or at the folder above its first wildcard."""
    if os.path.lexists(path) or not (wildcard := _WILDCARD.search(path)):
        return os.path.lexists(path)
    return os.path.isdir(path[: wildcard.start()].rpartition("/")[0])  # noqa: PTH112
