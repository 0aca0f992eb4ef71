"""Towers: one file for each family, which is all that knows it."""

from shards.towers.albert import AlbertTower
from shards.towers.vit import VitTower

AnyVisionTower = VitTower
AnyTextTower = AlbertTower
