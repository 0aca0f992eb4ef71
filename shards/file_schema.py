"""Sections of JSON files: read strictly, with one line for each broken rule."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shards.model_errors import ModelError

FAMILY_TAG = "family "
"""Prefix of the tags of a union's members, which messages leave out."""


class ModelSection(BaseModel):
    """Base of all sections: frozen, no unknown keys, no infinite numbers; each is built when it is first used."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


def parse_json(text: str | bytes) -> Any:
    """Parse untrusted JSON; raises ValueError if it isn't JSON or UTF-8, or too deeply nested for Python's parser."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, cure: str) -> dict[str, object]:
    """Read one JSON object; raises a ModelError if the file is missing, not JSON, or no object."""
    try:
        tree = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}; {cure}") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError both are
        raise ModelError(f"{path}: this is no valid JSON ({error}); repair or fetch it again") from None
    if not isinstance(tree, dict):
        raise ModelError(f"{path}: found {type(tree).__name__}, expected a JSON object; repair or fetch it again")
    return tree


def describe(error: ValidationError) -> str:
    """Describe each broken rule in one clause: the key, the value, the rule."""
    return "; ".join(
        f"{_key(item['loc'])}: {item['msg'].removeprefix('Value error, ')}{_describe_value(item['input'])}"
        for item in error.errors()
    )


def _key(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location if not str(part).startswith(FAMILY_TAG)) or "configuration"


def _describe_value(value: object) -> str:
    """Describe the offending value, unless it is a whole section."""
    return "" if isinstance(value, BaseModel | dict) else f" (found {value!r:.60})"


def require_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise ValueError unless the division leaves no remainder."""
    if value % divisor:
        raise ValueError(f"{name} ({value}) is no multiple of {divisor_name} ({divisor})")
