"""Paths of a configuration file, which are relative to the file's folder."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embedder.errors import ConfigError

INPUTS = ("model", "plan", "tokenizer")
RESULTS = ("store", "out")
TEACHER = {"store": "teacher.store", "model": "teacher.model"}
LOGS = ("log_file", "runs_file", "metrics_file", "traces")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # s3://, file://, hf-hub:
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")
_WILDCARD = re.compile(r"[*?\[{]")

Replace = Callable[[str, str], str]


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
    return replace_paths(tree, lambda key, path: _follow(path, key, folder, file))


def replace_paths(tree: Mapping[str, Any], replace: Replace) -> dict[str, Any]:
    """Copy a configuration with other paths.

    Args:
        tree: a configuration as TOML has it; values of the wrong type are left for their check.
        replace: the new path for a key, as `source.path` or `model`, and its path or address; of a function or class in
            a file of its own, that file.
    """
    moved = dict(tree)
    for key in (*INPUTS, *RESULTS, *LOGS):
        if isinstance(value := tree.get(key), str):
            moved[key] = replace(key, value)
    for key, section in (("model", _model), ("step", _step), ("metric", _metric), ("source", _source), ("join", _join)):
        if isinstance(entries := tree.get(key), list):
            moved[key] = [section(each, replace) if isinstance(each, dict) else each for each in entries]
    if isinstance(teacher := tree.get("teacher"), dict):
        given = [key for key in ("store", "model") if isinstance(teacher.get(key), str)]
        moved["teacher"] = teacher | {key: replace(TEACHER[key], teacher[key]) for key in given}
    match tree.get("on_failure"):
        case {"command": [str(program), *arguments]} if "/" in program:
            program = replace("on_failure.command", program)
            moved["on_failure"] = tree["on_failure"] | {"command": [program, *arguments]}
    return moved


def _model(model: dict[str, Any], replace: Replace) -> dict[str, Any]:
    """Replace the paths of a [[model]]; a program is one where it has a folder."""
    moved = dict(model)
    for key in ("uri", "plan", "python"):
        value = model.get(key)
        if isinstance(value, str) and (key != "python" or "/" in value):
            moved[key] = _in_file("model" if key == "uri" else f"model.{key}", value, replace)
    if isinstance(extra := model.get("extra_files"), list):
        moved["extra_files"] = _each("model.extra_files", extra, replace)
    if isinstance(inputs := model.get("inputs"), dict):
        moved["inputs"] = {name: _input(each, replace) for name, each in inputs.items()}
    return moved


def _input(declared: Any, replace: Replace) -> Any:
    if not isinstance(declared, dict) or not isinstance(path := declared.get("tokenizer"), str):
        return declared
    return declared | {"tokenizer": replace("model.inputs.tokenizer", path)}


def _step(step: dict[str, Any], replace: Replace) -> dict[str, Any]:
    """Replace the paths of a [[step]]: a function's file; a module or an entry point stays."""
    moved = dict(step)
    if isinstance(value := step.get("callable"), str) and ".py:" in value:
        moved["callable"] = _in_file("step.callable", value, replace)
    if isinstance(extra := step.get("extra_files"), list):
        moved["extra_files"] = _each("step.extra_files", extra, replace)
    return moved


def _metric(metric: dict[str, Any], replace: Replace) -> dict[str, Any]:
    """Replace the path of a [[metric]]: a class's file; a module stays."""
    moved = dict(metric)
    if isinstance(value := metric.get("callable"), str) and ".py:" in value:
        moved["callable"] = _in_file("metric.callable", value, replace)
    return moved


def _source(source: dict[str, Any], replace: Replace, key: str = "source.path") -> dict[str, Any]:
    return source | {"path": replace(key, source["path"])} if isinstance(source.get("path"), str) else source


def _join(join: dict[str, Any], replace: Replace) -> dict[str, Any]:
    return _source(join, replace, "join.path")


def _in_file(key: str, value: str, replace: Replace) -> str:
    """Replace the file of FILE.py:NAME, else the value itself."""
    path, colon, name = value.rpartition(":")
    return f"{replace(key, path)}:{name}" if colon and path.endswith(".py") else replace(key, value)


def _each(key: str, paths: list[Any], replace: Replace) -> list[Any]:
    return [replace(key, each) if isinstance(each, str) else each for each in paths]


def _follow(value: str, key: str, folder: Path, file: Path) -> str:
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
    return value if key in ("model", TEACHER["model"]) and _HUB_ID.fullmatch(value) else followed


def _is_there(path: str) -> bool:
    """Whether something is at a path, or at the folder above its first wildcard."""
    if os.path.lexists(path) or not (wildcard := _WILDCARD.search(path)):
        return os.path.lexists(path)
    return os.path.isdir(path[: wildcard.start()].rpartition("/")[0])  # noqa: PTH112
