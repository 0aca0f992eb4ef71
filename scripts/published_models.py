"""Published models and the configurations that they are published with: enough to describe and plan each without it.

Sizes are those of the config.json on the Hugging Face hub; models of open_clip and timm have them in those libraries.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.config import ModelConfig
from shards.convert import import_config


@dataclass(frozen=True)
class PublishedModel:
    """One model."""

    source: str  # hub id, or what stands for a folder of one's own
    config: Mapping[str, Any] | None = None  # what is in its config.json, of a model of transformers
    open_clip: str | None = None  # name of open_clip's configuration of it
    timm: str | None = None  # timm's name of it, with its weights' tag

    def write(self, folder: Path) -> None:
        """Write its configuration as the hub has it."""
        folder.mkdir(parents=True)
        name, tree = "config.json", self.config
        if self.open_clip is not None:
            import open_clip

            name, tree = "open_clip_config.json", {"model_cfg": open_clip.get_model_config(self.open_clip)}
        elif self.timm is not None:
            import timm

            settings = timm.get_pretrained_cfg(self.timm).to_dict()
            tree = {
                "architecture": self.timm.partition(".")[0],
                "pretrained_cfg": {key: value for key, value in settings.items() if value is not None},
            }
        (folder / name).write_text(json.dumps(tree), encoding="utf-8")

    def describe(self, folder: Path) -> ModelConfig:
        """Write its configuration into `folder/checkpoint`, and ours into `folder/model`."""
        self.write(folder / "checkpoint")
        return import_config(folder / "checkpoint", folder / "model", name=self.source.rpartition("/")[2])


def _layers(width: int, mlp: int, depth: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": depth, "num_attention_heads": heads}
    return sizes | others


def _clip(vision: Mapping[str, Any], text: Mapping[str, Any], width: int, kind: str = "clip") -> dict[str, Any]:
    return {"model_type": kind, "projection_dim": width, "vision_config": vision, "text_config": text}


def _siglip(vision: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": "siglip", "vision_config": vision, "text_config": text}


_BASE = _layers(768, 3072, 12, 12)
_SO400M = _layers(1152, 4304, 27, 16)
_GEMMA_TOKENS = {"vocab_size": 256_000}
_ALBERT = _layers(768, 3072, 12, 12, model_type="albert", vocab_size=30_000, embedding_size=128)

PUBLISHED = {
    "CLIP ViT-B/32": PublishedModel(
        "openai/clip-vit-base-patch32", _clip(_BASE | {"patch_size": 32}, _layers(512, 2048, 12, 8), 512)
    ),
    "CLIP ViT-L/14": PublishedModel(
        "openai/clip-vit-large-patch14",
        _clip(_layers(1024, 4096, 24, 16, patch_size=14), _layers(768, 3072, 12, 12), 768),
    ),
    "SigLIP B/16": PublishedModel(
        "google/siglip-base-patch16-224", _siglip(_BASE | {"image_size": 224, "patch_size": 16}, _BASE)
    ),
    "SigLIP so400m/14-384": PublishedModel(
        "google/siglip-so400m-patch14-384", _siglip(_SO400M | {"image_size": 384, "patch_size": 14}, _SO400M)
    ),
    "SigLIP 2 B/16-256": PublishedModel(
        "google/siglip2-base-patch16-256", _siglip(_BASE | {"image_size": 256, "patch_size": 16}, _BASE | _GEMMA_TOKENS)
    ),
    "SigLIP 2 g/16-384": PublishedModel(
        "google/siglip2-giant-opt-patch16-384",
        _siglip(
            _layers(1536, 6144, 40, 16, image_size=384, patch_size=16),
            _SO400M | _GEMMA_TOKENS | {"projection_size": 1536},
        ),
    ),
    "SigLIP 2 B/16 NaFlex": PublishedModel(
        "google/siglip2-base-patch16-naflex",
        _clip(_BASE | {"patch_size": 16, "num_patches": 256}, _BASE | _GEMMA_TOKENS, 768, "siglip2"),
    ),
    "MetaCLIP 2 H/14": PublishedModel(
        "facebook/metaclip-2-worldwide-huge-quickgelu",
        _clip(
            _layers(1280, 5120, 32, 16, patch_size=14, hidden_act="quick_gelu"),
            _layers(1024, 4096, 24, 16, vocab_size=901_629, hidden_act="quick_gelu"),
            1024,
            "metaclip_2",
        ),
    ),
    "Chinese-CLIP ViT-B/16": PublishedModel(
        "OFA-Sys/chinese-clip-vit-base-patch16",
        _clip(_BASE | {"patch_size": 16}, _BASE | {"vocab_size": 21_128}, 512, "chinese_clip"),
    ),
    "ViT-B/16 + ALBERT-base": PublishedModel(
        "path/to/vit-albert",
        _clip(_BASE | {"model_type": "vit", "patch_size": 16}, _ALBERT, 512, "vision-text-dual-encoder"),
    ),
    "open_clip ViT-bigG/14": PublishedModel("laion/CLIP-ViT-bigG-14-laion2B-39B-b160k", open_clip="ViT-bigG-14"),
    "open_clip EVA-02-E/14+": PublishedModel(
        "timm/eva02_enormous_patch14_plus_clip_224.laion2b_s9b_b144k", open_clip="EVA02-E-14-plus"
    ),
    "open_clip CLIPA H/14-336": PublishedModel(
        "UCSC-VLAA/ViT-H-14-CLIPA-336-datacomp1B", open_clip="ViT-H-14-CLIPA-336"
    ),
    "open_clip SigLIP so400m/14-384": PublishedModel(
        "timm/ViT-SO400M-14-SigLIP-384", open_clip="ViT-SO400M-14-SigLIP-384"
    ),
    "DINOv3 ViT-B/16": PublishedModel(
        "facebook/dinov3-vitb16-pretrain-lvd1689m", _BASE | {"model_type": "dinov3_vit", "num_register_tokens": 4}
    ),
    "DINOv3 ViT-7B/16": PublishedModel(
        "facebook/dinov3-vit7b16-pretrain-lvd1689m",
        _layers(4096, 8192, 40, 32)
        | {"model_type": "dinov3_vit", "num_register_tokens": 4, "use_gated_mlp": True, "hidden_act": "silu"}
        | {"query_bias": False, "value_bias": False},
    ),
    "DINOv2 ViT-L/14": PublishedModel("timm/vit_large_patch14_dinov2.lvd142m", timm="vit_large_patch14_dinov2.lvd142m"),
    "EVA-02 L/14-448": PublishedModel(
        "timm/eva02_large_patch14_448.mim_m38m_ft_in22k_in1k", timm="eva02_large_patch14_448.mim_m38m_ft_in22k_in1k"
    ),
    "ViT-B/16": PublishedModel("google/vit-base-patch16-224", _BASE | {"model_type": "vit", "patch_size": 16}),
    "ALBERT-base": PublishedModel("albert/albert-base-v2", _ALBERT),
    "BERT-base": PublishedModel("google-bert/bert-base-uncased", {"model_type": "bert"}),
    "ModernBERT-base": PublishedModel("answerdotai/ModernBERT-base", {"model_type": "modernbert"}),
    "XLM-RoBERTa-base": PublishedModel(
        "FacebookAI/xlm-roberta-base",
        _BASE
        | {"model_type": "xlm-roberta", "vocab_size": 250_002, "max_position_embeddings": 514}
        | {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    ),
    "DistilBERT-base": PublishedModel("distilbert/distilbert-base-uncased", {"model_type": "distilbert"}),
}
