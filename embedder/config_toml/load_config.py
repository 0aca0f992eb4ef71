"""Loads a configuration from a file, then options, then `--set`; records origins; reports all mistakes at once."""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from embedder.config_paths import follow_file
from embedder.config_toml import values
from embedder.config_toml.fields import listed_tables, value_at
from embedder.config_toml.mistakes import ConfigMistakesError, Mistake, mistakes_of, path_of
from embedder.config_toml.own_code_sections import with_declared
from embedder.config_toml.read import ConfigFile, parse, read_file
from embedder.config_toml.values import dotted_key, toml_key
from embedder.errors import ConfigError

SomeConfig = TypeVar("SomeConfig", bound=BaseModel)


@dataclass(frozen=True)
class Setting:
    """One `--set`; `value` is parsed as TOML, or the text itself if it isn't TOML."""

    path: values.Path
    value: Any

    def __str__(self) -> str:
        return f"--set {dotted_key(self.path)}"


@dataclass(frozen=True)
class Origins:
    """Where the values of a configuration are from.

    Attributes:
        file: the file; None for none.
        options: keys given by options of the command, or arguments of a function.
        settings: the `--set`, in their order.
    """

    file: ConfigFile | None
    options: frozenset[str]
    settings: tuple[Setting, ...]

    def setting_of(self, path: values.Path) -> Setting | None:
        """Return the last `--set` that gave a value; None if none did."""
        found = (each for each in reversed(self.settings) if path[: len(each.path)] == each.path)
        return next(found, None)

    def line_of(self, path: values.Path) -> int | None:
        """Return the line of the file with a value; None if it isn't in the file."""
        if self.file is None or self.setting_of(path) or (path and path[0] in self.options):
            return None
        return self.file.lines.get(path)

    def of(self, path: values.Path) -> str:
        """Return the origin of a value: `line 3`, `--set`, `option` or `default`."""
        if self.setting_of(path):
            return "--set"
        if path and path[0] in self.options:
            return "option"
        if self.file is not None and value_at(self.file.tree, path) is not None:
            line = self.line_of(path)
            return "file" if line is None else f"line {line}"
        return "default"

    def line(self, mistake: Mistake) -> str:
        """Format a mistake as one line: its place, what it is, and the fix."""
        path, name = mistake.path, dotted_key(mistake.path)
        setting = self.setting_of(path) if path else None
        if setting is None or setting.path != path:
            cure = f": write {toml_key(str(path[-1]))} = {mistake.instead}" if mistake.instead else ""
            return f"{self._where(path, mistake.text)}: {mistake.text}{cure}"
        cure = f": write --set {shlex.quote(f'{name}={mistake.instead}')}" if mistake.instead else ""
        repeats = mistake.text.startswith(f"{name} = ")
        return f"--set {mistake.text}{cure}" if repeats else f"{setting}: {mistake.text}{cure}"

    def _where(self, path: values.Path, text: str) -> str:
        if not path:
            return self._where_named(text)
        if setting := self.setting_of(path):
            return str(setting)
        below = next((each for each in self.settings if each.path[: len(path)] == path), None)
        if self.file is None or path[0] in self.options:
            return str(below) if below else "the command line"
        for length in range(len(path), 0, -1):
            if (line := self.line_of(path[:length])) is not None:
                return f"{self.file.path}, line {line}"
        return str(below) if below else str(self.file.path)

    def _where_named(self, text: str) -> str:
        """Name the place of a combination: the lines and the `--set` of the keys that its message names."""
        settings = [str(each) for each in self.settings if _is_named(each.path, text)]
        if self.file is None:
            return " and ".join(settings) or "the command line"
        named = (path for path in self.file.lines if _is_named(path, text) and not self.setting_of(path))
        lines = sorted({line for path in named if (line := self.line_of(path)) is not None})[:3]
        where = f"{self.file.path}" + (
            f", line{'s' * (len(lines) > 1)} {' and '.join(map(str, lines))}" if lines else ""
        )
        return f"{where} with {' and '.join(settings)}" if settings else where


@dataclass(frozen=True)
class Loaded(Generic[SomeConfig]):
    """A configuration, and where its values are from."""

    config: SomeConfig
    origins: Origins


def load(
    kind: type[SomeConfig],
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    settings: Iterable[str] = (),
) -> Loaded[SomeConfig]:
    """Load a configuration: the file first, then the command line's options, then its `--set key=value`.

    Relative paths in the file are relative to it, those of the command line to the working directory.

    Args:
        kind: class of the configuration.
        path: a TOML file, or none.
        overrides: values of options by key; None values are left out.
        settings: `key=value` texts; the key may be dotted (`decode.timeout_s=5`), the value is read as TOML.

    Raises:
        ConfigError: the file is missing or isn't TOML, a key is unknown, or a value breaks its rule; all such mistakes
            are reported.
    """
    lists = [key for key, field in kind.model_fields.items() if listed_tables(field.annotation)]
    file = read_file(Path(path)) if path is not None else None
    tree = follow_file(file.tree, file.path) if file else {}
    if "model" in lists and isinstance(tree.get("model"), Mapping):  # [model] is one [[model]]
        tree["model"] = [tree["model"]]
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    _refuse_given_twice(path, tree, given)
    tree |= given
    parsed = tuple(map(parse_setting, settings))
    for setting in parsed:
        _apply(tree, setting, lists)
    if isinstance(steps := tree.get("step"), list):
        tree["step"] = [with_declared(each) for each in steps]
    origins = Origins(file, frozenset(given), parsed)
    try:
        return Loaded(_validate(kind, tree), origins)
    except ValidationError as error:
        mistakes = mistakes_of(kind, tree, error)
    ordered = sorted(mistakes, key=lambda each: origins.line_of(each.path) or 0)
    raise ConfigMistakesError(list(map(origins.line, ordered)))


def _refuse_given_twice(path: str | Path | None, tree: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if an option gives one value where the file has a list of tables."""
    for key in given.keys() & tree.keys():
        if isinstance(given[key], str) and isinstance(tree[key], list):
            raise ConfigError(
                f"{path}: [[{key}]] stands there, and an option gives {key} = "
                f"{values.format_value((key,), given[key])}, too; leave one of the two out"
            )


def _validate(kind: type[SomeConfig], tree: Any) -> SomeConfig:
    """Check all values strictly (text isn't a number), except that lists are tuples, and 4.0 is the integer 4."""
    try:
        return kind.model_validate(_as_python(tree), strict=True)
    except ValidationError as error:
        integers = [each for each in error.errors() if each["type"] == "int_type"]
    whole = {
        path_of(tree, each) for each in integers if isinstance(each["input"], float) and each["input"].is_integer()
    }
    return kind.model_validate(_as_python(tree, whole), strict=True)


def _as_python(value: Any, whole: Collection[values.Path] = (), path: values.Path = ()) -> Any:
    """Convert values for the classes; an integer beyond TOML's 64 bits becomes a decimal, which none takes."""
    if isinstance(value, Mapping):
        return {key: _as_python(each, whole, (*path, key)) for key, each in value.items()}
    if hasattr(value, "tolist"):  # NumPy values of a caller in Python
        value = value.tolist()
    if isinstance(value, list | tuple | Set):
        return tuple(_as_python(each, whole, (*path, number)) for number, each in enumerate(value))
    if path in whole:
        return int(value)
    return Decimal(value) if values.is_too_long(value) else value


def parse_setting(text: str) -> Setting:
    """Parse one `key=value` (else `ConfigError`); a value that isn't TOML is taken as a string."""
    key, separator, written = text.partition("=")
    keys = _keys_of(key)
    if not separator or not all(keys):
        shown = values.format_value((), f"{key}=..." if separator else key)
        raise ConfigError(f"--set {shown}: write it as NAME=VALUE, for example --set dtype=bfloat16")
    try:
        tree = parse(f"value = {written}")
    except ValueError:
        return Setting(keys, written)
    return Setting(keys, tree["value"] if len(tree) == 1 else written)


def _keys_of(dotted: str) -> tuple[str, ...]:
    """Split a dotted key, whose parts may stand in quotes; one that TOML would not take is cut at each point."""
    keys: tuple[str, ...] = ()
    try:
        tree: Any = parse(f"{dotted} = 0")
        while isinstance(tree, dict):
            ((key, tree),) = tree.items()
            keys = (*keys, key)
    except ValueError:
        return tuple(part.strip() for part in dotted.split("."))
    return keys


def _apply(tree: dict[str, Any], setting: Setting, lists: Collection[str]) -> None:
    *parents, leaf = (str(part) for part in setting.path)
    for depth, parent in enumerate(parents, 1):
        inner = tree.get(parent, {})
        name = dotted_key(setting.path[:depth])
        if isinstance(inner, list | tuple) or (depth == 1 and parent in lists):
            raise ConfigError(
                f"{setting}: {name} is a list, and --set goes into tables only; change it in the file, or write the "
                f"whole list, as --set '{name}=[{{...}}]'"
            )
        if isinstance(inner, BaseModel):
            inner = inner.model_dump(exclude_unset=True)
        if not isinstance(inner, Mapping):
            shown = values.format_value(setting.path[:depth], inner)
            raise ConfigError(f"{setting}: {name} = {shown} is no table and has no keys; write [{name}] in the file")
        tree[parent] = dict(inner)  # don't modify the file's own values
        tree = tree[parent]
    tree[leaf] = setting.value


def _is_named(path: values.Path, text: str) -> bool:
    """Return whether a message names a key as TOML writes it: `key = `, `[key]`, or in backticks."""
    name = re.escape(dotted_key(path))
    return isinstance(path[-1], str) and bool(re.search(rf"(?<![\w.]){name} = |\[{name}\]|`{name}`", text))
