"""Published models and the configurations that they are published with: enough to describe and plan each without it.

Sizes are those of the config.json on the Hugging Face hub; models of open_clip and timm have them in those libraries.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.convert import import_config
from shards.model_config import ModelConfig


@dataclass(frozen=True)
class PublishedModel:
    """One model."""

    source: str  # hub id, or what stands for a folder of one's own
    config: Mapping[str, Any] | None = None  # what is in its config.json, of a model of transformers
    open_clip: str | None = None  # name of open_clip's configuration of it
    timm: str | None = None  # timm's name of it, with its weights' tag
    licence: str = ""  # of the weights
    languages: str = ""  # that its captions were in

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        name, tree = "config.json", self.config
        if self.open_clip is not None:
            import open_clip

            name, tree = "open_clip_config.json", {"model_cfg": open_clip.get_model_config(self.open_clip)}
        elif self.timm is not None:
            import timm

            settings = timm.get_pretrained_cfg(self.timm).to_dict()
            known = {key: value for key, value in settings.items() if value is not None}
            tree = {"architecture": self.timm.partition(".")[0], "pretrained_cfg": known}
        (folder / name).write_text(json.dumps(tree), encoding="utf-8")

    def describe(self, folder: Path) -> ModelConfig:
        """Write its configuration into `folder/checkpoint`, and this project's into `folder/model`."""
        self.write(folder / "checkpoint")
        return import_config(folder / "checkpoint", folder / "model", name=self.source.rpartition("/")[2])


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PUBLISHED = {name: PublishedModel(**each) for name, each in _TABLES.items()}
