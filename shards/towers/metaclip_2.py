"""Towers of transformers' MetaClip2Model: CLIP's, but captions end with the token that its configuration names.

CLIP's own class treats the id 2 as a mistake of old configurations; MetaCLIP 2 has the tokeniser of XLM-RoBERTa, whose
captions do end with it.

Source: transformers 5.23, modular_metaclip_2.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from shards.towers import clip
from shards.towers.base import ModelClass, TowerImport
from shards.towers.clip import ClipTextTower
from shards.towers.from_transformers import own_names, read_settings


class MetaClip2TextTower(ClipTextTower):
    """MetaCLIP 2's text transformer."""

    label = "MetaCLIP 2 text"
    library_class = "MetaClip2TextModel"

    family: Literal["metaclip_2_text"] = "metaclip_2_text"  # type: ignore[assignment]


def _read_text(theirs: Any, names: frozenset[str], where: Path) -> MetaClip2TextTower:
    del names
    padding = theirs.eos_token_id  # no token sees what follows the end
    return read_settings(MetaClip2TextTower, where, theirs, {}, pad_token_id=padding)


TOWERS = (MetaClip2TextTower,)
IMPORTS = {
    "metaclip_2_text_model": TowerImport(
        "MetaClip2TextConfig", _read_text, own_names, ignored=("embeddings.position_ids",)
    ),
    "metaclip_2_vision_model": clip.IMPORTS["clip_vision_model"],
}
CLASSES = {"metaclip_2": ModelClass("metaclip_2_vision_model", "metaclip_2_text_model")}
