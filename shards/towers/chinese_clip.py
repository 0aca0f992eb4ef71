"""Towers of transformers' ChineseCLIPModel: a BERT pooled at [CLS] without its pooler, and CLIP's ViT.

Source: transformers 5.23, modeling_chinese_clip.py; its modules have the names of `BertModel` and `CLIPVisionModel`,
and its configurations their defaults.
"""

from shards.towers import clip
from shards.towers.base import ModelClass
from shards.towers.bert import BertTower
from shards.towers.text_encoder import encoder_import

IMPORTS = {
    "chinese_clip_text_model": encoder_import(BertTower, "ChineseCLIPTextConfig", pool="cls"),
    "chinese_clip_vision_model": clip.IMPORTS["clip_vision_model"],
}
CLASSES = {"chinese_clip": ModelClass("chinese_clip_vision_model", "chinese_clip_text_model")}
