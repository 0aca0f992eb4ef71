"""Base of all tables of a configuration."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class ConfigSection(BaseModel):
    """Base of all sections: frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Keys that belong to another kind of configuration, and what is said of each."""
