"""Paths in a configuration file, which are relative to the file's folder."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embedder.errors import ConfigError

RESULTS = ("store", "out")
LOGS = ("log_file", "runs_file", "metrics_file", "traces", "tracker.folder")
PATHS = {
    *RESULTS, *LOGS, "model", "plan", "tokenizer", "model.uri", "model.plan", "model.extra_files",
    "model.inputs.tokenizer", "step.extra_files", "source.path", "join.path", "serve.reranker", "teacher.store",
    "teacher.model",
}  # fmt: skip
"""Keys that hold paths, without indexes of list entries."""

PROGRAMS = ("model.python", "on_failure.command")
"""Keys that hold a path if it includes a folder, else a name that is looked up."""

CODE = ("model.uri", "step.callable", "metric.callable")
"""Keys that hold FILE.py:NAME, or a module."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # s3://, file://, hf-hub:
_MODEL_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?|rapidocr|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""Models that are no path unless there is one of the name: an id of the hub, `rapidocr`, `package.module:Class`."""

_WILDCARD = re.compile(r"[*?\[{]")

Replace = Callable[[str, str], str]


def follow_file(tree: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Resolve all relative paths of a configuration (TOML) against the folder of its file.

    A model in the form of a hub id, a package or a module stays one unless a folder of that name exists; bare names of
    programs stay as they are. Values of the wrong type are left for their check.

    Raises:
        ConfigError: nothing is at a path below the file's folder, but something is below the working directory.
    """
    folder = Path(os.path.abspath(file)).parent  # noqa: PTH100 (a link to a file stands where the link stands)
    return replace_paths(tree, lambda key, path: _follow(path, key, folder, file))


def replace_paths(tree: Mapping[str, Any], replace: Replace) -> dict[str, Any]:
    """Copy a configuration (TOML) with other paths.

    `replace` takes a key, such as `source.path` or `model`, and its path or address (for a function or class in its own
    file, that file), and returns the new path. Values of the wrong type are left for their check.
    """
    return {key: _replace(key, value, replace) for key, value in tree.items()}


def _replace(key: str, value: Any, replace: Replace) -> Any:
    match value:
        case dict():  # inputs may have any names
            inner = {name: f"{key}.{name}" for name in value}
            inner |= {name: key for name in value if key == "model.inputs" and isinstance(value[name], dict)}
            return {name: _replace(inner[name], each, replace) for name, each in value.items()}
        case [str(program), *arguments] if key in PROGRAMS:
            return [_replace(key, program, replace), *arguments]
        case list():
            is_files = key.endswith("extra_files")
            return [_replace(key, each, replace) if is_files or isinstance(each, dict) else each for each in value]
        case str():
            file, _, name = value.rpartition(":")
            if key in CODE and file.endswith(".py"):
                return f"{_replace_path(key, file, replace)}:{name}"
            is_path = key in PATHS or (key in PROGRAMS and "/" in value)
            return _replace_path(key, value, replace) if is_path else value
    return value


def _replace_path(key: str, path: str, replace: Replace) -> str:
    return replace("model" if key == "model.uri" else key, path)


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
            + ("name another to make a new one" if key in RESULTS else "move it next to the file")
        )
    return value if key in ("model", "serve.reranker", "teacher.model") and _MODEL_NAME.fullmatch(value) else followed


def _is_there(path: str) -> bool:
    """Return whether something is at a path, or at the folder above its first wildcard."""
    if os.path.lexists(path) or not (wildcard := _WILDCARD.search(path)):
        return os.path.lexists(path)
    return os.path.isdir(path[: wildcard.start()].rpartition("/")[0])  # noqa: PTH112
