"""All families of towers; a new one is a module in `MODULES`."""

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Tag

from shards.file_schema import FAMILY_TAG
from shards.towers import (
    aimv2,
    albert,
    altclip,
    bert,
    chinese_clip,
    clip,
    dino_imports,
    distilbert,
    embedding_gemma2,
    eva,
    metaclip_2,
    modernbert,
    naflex,
    qwen2_vl,
    qwen3_vl,
    rotary_text,
    siglip,
    tipsv2,
    videoprism,
    vit,
    vit_imports,
    whole_timm,
)
from shards.towers.albert import AlbertTower
from shards.towers.base import ModelClass, OneTowerImport, Tower, TowerImport
from shards.towers.tower_kinds import TextTower, VisionTower
from shards.towers.vit import VitTower

MODULES = (
    aimv2,
    albert,
    altclip,
    bert,
    chinese_clip,
    clip,
    dino_imports,
    distilbert,
    embedding_gemma2,
    eva,
    metaclip_2,
    modernbert,
    naflex,
    qwen2_vl,
    qwen3_vl,
    rotary_text,
    siglip,
    tipsv2,
    videoprism,
    vit,
    vit_imports,
    whole_timm,
)

DEFAULT_VISION, DEFAULT_TEXT = VitTower(), AlbertTower()

IMPORTS: dict[str, TowerImport] = {
    model_type: found for module in MODULES for model_type, found in getattr(module, "IMPORTS", {}).items()
}
"""Readers of towers of transformers' checkpoints, by `model_type`."""

CLASSES: dict[str, ModelClass] = {
    model_type: found for module in MODULES for model_type, found in getattr(module, "CLASSES", {}).items()
}
CLASSES["vision-text-dual-encoder"] = ModelClass()
"""transformers' two-tower classes, by `model_type`; the last one joins towers of any families."""

ONE_TOWERS: dict[str, OneTowerImport] = {
    model_type: found for module in MODULES for model_type, found in getattr(module, "ONE_TOWERS", {}).items()
}
"""Readers of models with one tower for pictures and texts, by `model_type`."""


def _any_of(kind: type[Tower], default: type[Tower]) -> Any:
    """Make the type of a section of any family of a kind; without a family name it is the default's."""
    families = [tower for module in MODULES for tower in getattr(module, "TOWERS", ()) if issubclass(tower, kind)]
    if len(families) == 1:
        return default

    def find(section: Any) -> str:
        family = section.get("family") if isinstance(section, dict) else getattr(section, "family", None)
        return FAMILY_TAG + str(family or family_name(default))

    return Annotated[
        reduce(or_, [Annotated[family, Tag(FAMILY_TAG + family_name(family))] for family in families]),
        Discriminator(find),
    ]


def family_name(tower: type[Tower]) -> str:
    """Return the name of a family, as in config.json."""
    return str(tower.model_fields["family"].default)


if TYPE_CHECKING:
    AnyVisionTower = VisionTower
    AnyTextTower = TextTower
else:
    AnyVisionTower = _any_of(VisionTower, VitTower)
    AnyTextTower = _any_of(TextTower, AlbertTower)
