"""Tiny random checkpoints with their own processors and tokenisers, as transformers, timm and open_clip save them.

Each function fills a folder, and gives the library's own features as the library computes them from that folder.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
import torch
from PIL import Image
from siglip_checkpoints import LENGTH, save_siglip, save_siglip2
from tiny_tokenizers import NUM_TOKENS
from tokenizers import pre_tokenizers
from tower_checkpoints import edit_json
from tower_checks import randomise

SIZE = 32
MAX_TOKENS = 24
"""Limit of the tokenisers, below that of the towers."""

SMALL_TEXT = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
SMALL_VISION = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 8,
}
WIDE_VISION = SMALL_VISION | {"intermediate_size": 96}


@dataclass(frozen=True)
class Library:
    """A library's own features of images and of captions; None of what its model can't embed."""

    images: Callable[[list[Image.Image]], torch.Tensor] | None = None
    texts: Callable[[list[str]], torch.Tensor] | None = None


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def limited(tokenizer: Any) -> Any:
    tokenizer.model_max_length = MAX_TOKENS
    return tokenizer


def make(class_name: str, config: Any, **arguments: Any) -> Any:
    """Make a random model of a class of transformers."""
    import transformers

    return randomise(getattr(transformers, class_name)(config, **arguments))


def save_all(folder: Path, *parts: Any) -> None:
    for part in parts:
        part.save_pretrained(folder)


def read_pair(folder: Path, **padding: Any) -> Library:
    """Read a saved model of two towers."""
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder).eval()
    processor, tokenizer = AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    def texts(captions: list[str]) -> torch.Tensor:
        inputs = tokenizer(captions, truncation=True, return_tensors="pt", **({"padding": True} | padding))
        inputs.pop("token_type_ids", None)
        found: torch.Tensor = model.get_text_features(**inputs).pooler_output
        return found

    return Library(
        lambda images: model.get_image_features(**processor(images, return_tensors="pt")).pooler_output, texts
    )


CLIP_MERGES = [("c", "a"), ("ca", "r</w>"), ("r", "e"), ("re", "d</w>")]


def _clip_tokens() -> list[str]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ("".join(pair) for pair in CLIP_MERGES)
    return [*letters, *(f"{letter}</w>" for letter in letters), *pairs, "<|startoftext|>", "<|endoftext|>"]


def clip(folder: Path) -> Library:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPTokenizer

    tokens = _clip_tokens()
    ids = {"vocab_size": len(tokens), "bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}
    text = SMALL_TEXT | ids | {"max_position_embeddings": MAX_TOKENS}
    save_all(
        folder,
        make("CLIPModel", CLIPConfig(text_config=text, vision_config=WIDE_VISION, projection_dim=24)),
        CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=square(SIZE)),
        limited(CLIPTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=CLIP_MERGES)),
    )
    return read_pair(folder)


def aimv2(folder: Path) -> Library:
    from transformers import Aimv2Config, CLIPImageProcessor

    clip(folder)  # has the tokeniser
    text = SMALL_TEXT | {"vocab_size": len(_clip_tokens()), "eos_token_id": len(_clip_tokens()) - 1}
    save_all(
        folder,
        make("Aimv2Model", Aimv2Config(text_config=text, vision_config=WIDE_VISION, projection_dim=24)),
        CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=square(SIZE)),
    )
    return read_pair(folder)


def metaclip_2(folder: Path) -> Library:
    from transformers import CLIPImageProcessor, MetaClip2Config

    text = SMALL_TEXT | {"bos_token_id": 0, "eos_token_id": 2}
    save_all(
        folder,
        make("MetaClip2Model", MetaClip2Config(text_config=text, vision_config=WIDE_VISION, projection_dim=24)),
        CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=square(SIZE)),
        limited(tiny_tokenizers.unigram()),
    )
    return read_pair(folder)


def siglip(folder: Path) -> Library:
    pytest.importorskip("sentencepiece")
    save_siglip(folder)
    return _read_unmasked(folder)


def siglip2(folder: Path) -> Library:
    save_siglip2(folder)
    return _read_unmasked(folder)


def _read_unmasked(folder: Path) -> Library:
    """Read a model whose tokeniser gives no mask of the padding, as the published ones say in their configurations."""
    edit_json(folder / "tokenizer_config.json", model_input_names=["input_ids"])
    return read_pair(folder, padding="max_length", max_length=LENGTH)


def tipsv2(folder: Path, **vision: Any) -> Library:
    """Its images are smaller than its table of positions, so that transformers resamples that at each call."""
    from transformers import Tipsv2Config, Tipsv2ImageProcessor

    sizes = SMALL_VISION | {"hidden_size": 32, "image_size": 48, "mlp_ratio": 2, "num_register_tokens": 2} | vision
    save_all(
        folder,
        make("Tipsv2Model", Tipsv2Config(text_config=SMALL_TEXT, vision_config=sizes)),
        Tipsv2ImageProcessor(size=square(SIZE)),
        limited(tiny_tokenizers.pieces_alone()),
    )
    return read_pair(folder, padding="max_length", max_length=MAX_TOKENS)


def tipsv2_gated(folder: Path) -> Library:
    return tipsv2(folder, use_swiglu_ffn=True)


def videoprism(folder: Path) -> Library:
    """A picture is a clip of one frame for it, with the times' positions resampled to one."""
    return read_clips(save_videoprism(folder))


def save_videoprism(folder: Path, num_frames: int = 4, **vision: Any) -> Path:
    from transformers import (
        LlavaOnevisionVideoProcessor,
        VideoPrismConfig,
        VideoPrismProcessor,
        VideoPrismTextConfig,
        VideoPrismVisionConfig,
    )

    layers = {"num_spatial_layers": 3, "num_temporal_layers": 2, "num_auxiliary_layers": 2}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_frames": num_frames}
    sizes |= layers | {"image_size": SIZE, "tubelet_size": (1, 8, 8)} | vision
    side = square(sizes["image_size"])
    tokenizer = limited(tiny_tokenizers.pieces_without_end())
    known = {"max_position_embeddings": MAX_TOKENS, "vocab_size": len(tokenizer) - 100}
    text = SMALL_TEXT | known | {"hidden_size": sizes["hidden_size"]}
    config = VideoPrismConfig(vision_config=VideoPrismVisionConfig(**sizes), text_config=VideoPrismTextConfig(**text))
    model = make("VideoPrismClipModel", config)
    processor = LlavaOnevisionVideoProcessor(
        size=side, do_normalize=False, do_sample_frames=True, num_frames=num_frames
    )
    save_all(folder, model, VideoPrismProcessor(processor, tokenizer))
    return folder


def read_clips(folder: Path) -> Library:
    """Read a saved model of clips; each of its pictures is a clip of one frame."""
    from transformers import AutoModel, AutoProcessor

    model, processor = AutoModel.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)

    def images(given: list[Image.Image]) -> torch.Tensor:
        found = []
        for image in given:
            frame = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None]
            pixels = processor(videos=[frame], do_sample_frames=False, return_tensors="pt")["pixel_values_videos"]
            found.append(model.get_video_features(pixels, interpolate_pos_encoding=True).pooler_output[:, 0])
        return torch.cat(found)

    def texts(captions: list[str]) -> torch.Tensor:
        inputs = processor(text=captions, max_length=MAX_TOKENS, return_tensors="pt")
        features: torch.Tensor = model.get_text_features(**inputs).pooler_output
        return features

    return Library(images, texts)


def chinese_clip(folder: Path) -> Library:
    from transformers import ChineseCLIPConfig, ChineseCLIPImageProcessor

    config = ChineseCLIPConfig(vision_config=WIDE_VISION, text_config=SMALL_TEXT, projection_dim=20)
    save_all(
        folder,
        make("ChineseCLIPModel", config),
        ChineseCLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=square(SIZE)),
        limited(tiny_tokenizers.wordpiece()),
    )
    return read_pair(folder)


def altclip(folder: Path) -> Library:
    from transformers import AltCLIPConfig, CLIPImageProcessor

    text = SMALL_TEXT | {"project_dim": 28, "pad_token_id": 1}
    save_all(
        folder,
        make("AltCLIPModel", AltCLIPConfig(text_config=text, vision_config=WIDE_VISION, projection_dim=20)),
        CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=square(SIZE)),
        limited(tiny_tokenizers.unigram()),
    )
    return read_pair(folder)


def _dual_encoder(folder: Path, vision: Any, text: Any, processor: Any, tokenizer: Any) -> Library:
    from transformers import VisionTextDualEncoderConfig

    config = VisionTextDualEncoderConfig.from_vision_text_configs(vision, text, projection_dim=20)
    save_all(folder, make("VisionTextDualEncoderModel", config), processor, limited(tokenizer))
    return read_pair(folder)


def vit_and_bert(folder: Path) -> Library:
    from transformers import BertConfig, ViTConfig, ViTImageProcessor

    processor = ViTImageProcessor(size=square(SIZE))
    return _dual_encoder(
        folder, ViTConfig(**WIDE_VISION), BertConfig(**SMALL_TEXT), processor, tiny_tokenizers.wordpiece()
    )


def clip_and_xlm_roberta(folder: Path) -> Library:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, XLMRobertaConfig

    processor = CLIPImageProcessor(size={"shortest_edge": 40}, crop_size=square(SIZE))
    vision, text = CLIPVisionConfig(**WIDE_VISION), XLMRobertaConfig(**SMALL_TEXT, pad_token_id=1)
    return _dual_encoder(folder, vision, text, processor, tiny_tokenizers.unigram())


def dinov2_and_bert(folder: Path) -> Library:
    """A tower whose positions are for larger images than its processor makes."""
    from transformers import BertConfig, BitImageProcessor, Dinov2Config

    processor = BitImageProcessor(size={"shortest_edge": 40}, crop_size=square(SIZE))
    vision = Dinov2Config(**(SMALL_VISION | {"mlp_ratio": 2, "image_size": 56}))
    return _dual_encoder(folder, vision, BertConfig(**SMALL_TEXT), processor, tiny_tokenizers.wordpiece())


def read_vision(folder: Path, processor: Any = None) -> Library:
    """Read a saved vision tower."""
    from transformers import AutoImageProcessor, AutoModel

    model = AutoModel.from_pretrained(folder).eval()
    processor = processor or AutoImageProcessor.from_pretrained(folder)
    return Library(lambda images: model(**processor(images, return_tensors="pt")).pooler_output)


def _save_vision(folder: Path, name: str, settings: dict[str, Any], processor: Any) -> Library:
    import transformers

    save_all(folder, make(f"{name}Model", getattr(transformers, f"{name}Config")(**settings)), processor)
    return read_vision(folder)


def vit(folder: Path) -> Library:
    from transformers import ViTImageProcessor

    return _save_vision(folder, "ViT", WIDE_VISION, ViTImageProcessor(size=square(SIZE)))


def deit(folder: Path) -> Library:
    from transformers import DeiTImageProcessor

    return _save_vision(folder, "DeiT", WIDE_VISION, DeiTImageProcessor(size=square(37), crop_size=square(SIZE)))


def _dinov2(folder: Path, name: str, image_size: int, **settings: Any) -> Library:
    from transformers import BitImageProcessor

    processor = BitImageProcessor(size={"shortest_edge": 37}, crop_size=square(SIZE))
    return _save_vision(folder, name, SMALL_VISION | {"mlp_ratio": 2, "image_size": image_size} | settings, processor)


def dinov2(folder: Path) -> Library:
    return _dinov2(folder, "Dinov2", 56)


def dinov2_for_smaller_images(folder: Path) -> Library:
    return _dinov2(folder, "Dinov2", 16)


def dinov2_with_registers(folder: Path) -> Library:
    return _dinov2(folder, "Dinov2WithRegisters", 56, num_register_tokens=3)


def dinov3(folder: Path) -> Library:
    """Its own processor resizes floats; this project's rounds to 8 bits, as transformers' other processors do."""
    from transformers import DINOv3ViTImageProcessor, ViTImageProcessor

    settings = WIDE_VISION | {"num_register_tokens": 2, "image_size": 48}
    own = DINOv3ViTImageProcessor(size=square(SIZE))
    _save_vision(folder, "DINOv3ViT", settings, own)
    in_8_bits = ViTImageProcessor(size=square(SIZE), image_mean=own.image_mean, image_std=own.image_std)
    return read_vision(folder, in_8_bits)


def timm_images(model: Any, **data: Any) -> Callable[[list[Image.Image]], torch.Tensor]:
    """Make timm's own features, after its own transforms."""
    from timm.data import create_transform, resolve_data_config

    transform = create_transform(**resolve_data_config(data, model=model))

    def images(given: list[Image.Image]) -> torch.Tensor:
        pixels = torch.stack([transform(image) for image in given])
        found: torch.Tensor = model.forward_head(model.forward_features(pixels), pre_logits=True)
        return found

    return images


def save_timm(model: Any, folder: Path, **settings: Any) -> None:
    """Save as timm does for the hub, with the settings of the model, which timm before 1.0.31 doesn't keep itself."""
    from timm.models import save_for_hf

    save_for_hf(model, str(folder), model_args=settings, safe_serialization=True)


def timm_vit(folder: Path, name: str = "vit_base_patch16_clip_224", **settings: Any) -> Library:
    import timm

    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4} | settings
    model = randomise(timm.create_model(name, num_classes=7, **sizes))
    data = {"input_size": (3, SIZE, SIZE), "crop_pct": 0.9}
    model.pretrained_cfg |= data
    save_timm(model, folder, **sizes)
    return Library(timm_images(model, **data))


def timm_convnext(folder: Path) -> Library:
    return timm_whole(folder, "test_convnext")


def timm_resnet(folder: Path) -> Library:
    return timm_whole(folder, "test_resnet")


def timm_swin(folder: Path) -> Library:
    """Tables of places in windows that no weight file holds."""
    sizes = {"img_size": SIZE, "patch_size": 2, "window_size": 4, "embed_dim": 16}
    return timm_whole(folder, "swin_tiny_patch4_window7_224", **sizes, depths=(2, 2), num_heads=(2, 4))


def timm_whole(folder: Path, name: str, **sizes: Any) -> Library:
    import timm

    model = randomise(timm.create_model(name, num_classes=7, **sizes))
    data = {"input_size": (3, SIZE, SIZE), "crop_pct": 0.9}
    model.pretrained_cfg |= data
    save_timm(model, folder, **sizes)
    return Library(timm_images(model, **data))


def timm_eva(folder: Path) -> Library:
    return timm_vit(folder, "eva02_tiny_patch14_224")


def timm_aimv2(folder: Path) -> Library:
    return timm_vit(folder, "aimv2_large_patch14_224")


def timm_tipsv2(folder: Path) -> Library:
    return timm_vit(folder, "vit_base_patch14_reg1_tipsv2")


def timm_pe(folder: Path) -> Library:
    return timm_vit(folder, "vit_pe_core_tiny_patch16_384", ref_feat_shape=(4, 4))


def text_tower(folder: Path, name: str, tokenizer: Any, **settings: Any) -> Library:
    """Save a text tower of transformers, and read it."""
    import transformers
    from transformers import AutoModel, AutoTokenizer

    config = getattr(transformers, f"{name}Config")(**settings)
    save_all(folder, make(f"{name}Model", config), limited(tokenizer))
    model, tokens = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    def texts(captions: list[str]) -> torch.Tensor:
        inputs = tokens(captions, padding=True, truncation=True, return_tensors="pt")
        out, mask = model(**inputs), inputs["attention_mask"][..., None]
        mean = (out.last_hidden_state * mask).sum(1) / mask.sum(1)
        pooled = getattr(out, "pooler_output", None)
        return mean if pooled is None else pooled  # a DistilBERT, a ModernBERT and others have none

    return Library(texts=texts)


def albert(folder: Path) -> Library:
    return text_tower(folder, "Albert", tiny_tokenizers.wordpiece(), **SMALL_TEXT, embedding_size=16)


def bert(folder: Path) -> Library:
    return text_tower(folder, "Bert", tiny_tokenizers.wordpiece(), **SMALL_TEXT)


def roberta(folder: Path) -> Library:
    return text_tower(folder, "Roberta", tiny_tokenizers.byte_level_bpe(), **SMALL_TEXT, pad_token_id=1)


def modernbert(folder: Path) -> Library:
    ids = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
    windows = {"local_attention": 8, "global_attn_every_n_layers": 2, "classifier_pooling": "mean"}
    return text_tower(folder, "ModernBert", tiny_tokenizers.wordpiece(), **SMALL_TEXT, **ids, **windows)


def nomic_bert(folder: Path) -> Library:
    return text_tower(folder, "NomicBert", tiny_tokenizers.wordpiece(), **SMALL_TEXT)


def jina_embeddings_v3(folder: Path) -> Library:
    return text_tower(folder, "JinaEmbeddingsV3", tiny_tokenizers.unigram(), **SMALL_TEXT, pad_token_id=1)


def eurobert(folder: Path) -> Library:
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "mask_token_id": 4, "num_key_value_heads": 2}
    return text_tower(folder, "EuroBert", tiny_tokenizers.byte_level_bpe(), **SMALL_TEXT, **ids)


def distilbert(folder: Path) -> Library:
    sizes = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 40}
    return text_tower(folder, "DistilBert", tiny_tokenizers.wordpiece(), vocab_size=NUM_TOKENS, **sizes)


OPEN_CLIP_VISION = {"image_size": SIZE, "patch_size": 8, "layers": 3, "width": 48, "head_width": 12, "mlp_ratio": 2.0}
OPEN_CLIP_TEXT = {"context_length": MAX_TOKENS, "width": 32, "heads": 4, "layers": 3, "mlp_ratio": 2.0}


def _save_open_clip(folder: Path, cfg: dict[str, Any], tokenizer: Any = None, **preprocess: Any) -> Library:
    import open_clip
    from open_clip.push_to_hf_hub import save_config_for_hf
    from safetensors.torch import save_model

    folder.mkdir()
    settings = {key: value for key, value in cfg.items() if key != "custom_text"}
    torch.manual_seed(0)
    model = randomise((open_clip.CustomTextCLIP if cfg.get("custom_text") else open_clip.CLIP)(**settings))
    model.visual.preprocess_cfg = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)} | preprocess
    model.visual.image_mean, model.visual.image_std = model.visual.preprocess_cfg["mean"], (0.2, 0.3, 0.4)
    save_config_for_hf(model, folder / "open_clip_config.json", cfg)
    save_model(model, str(folder / "open_clip_model.safetensors"))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    loaded, transform = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")

    def images(given: Iterable[Image.Image]) -> torch.Tensor:
        found: torch.Tensor = loaded.eval().encode_image(torch.stack([transform(image) for image in given]))
        return found

    return Library(images, lambda captions: loaded.eval().encode_text(tokens(captions)))


def open_clip_native(folder: Path) -> Library:
    return _save_open_clip(folder, {"embed_dim": 24, "vision_cfg": OPEN_CLIP_VISION, "text_cfg": OPEN_CLIP_TEXT})


def open_clip_with_timm(folder: Path) -> Library:
    vision = {"timm_model_name": "test_vit", "timm_pool": "avg", "timm_proj": "linear", "image_size": 160}
    cfg = {"embed_dim": 24, "custom_text": True, "vision_cfg": vision, "text_cfg": OPEN_CLIP_TEXT}
    return _save_open_clip(folder, cfg, resize_mode="longest")


def open_clip_convnext(folder: Path) -> Library:
    """LAION's large ConvNeXts: a whole model of timm, two layers behind its pooling."""
    vision = {"timm_model_name": "test_convnext", "timm_pool": "", "timm_proj": "mlp", "image_size": 64}
    cfg = {"embed_dim": 24, "custom_text": True, "vision_cfg": vision, "text_cfg": OPEN_CLIP_TEXT}
    return _save_open_clip(folder, cfg)


def open_clip_mobileclip(folder: Path) -> Library:
    """MobileCLIP's form: a FastViT whose classifier is the projection, captions that see their padding."""
    vision = {"timm_model_name": "fastvit_t8", "timm_pool": "avg", "timm_proj": None, "image_size": 64}
    text = OPEN_CLIP_TEXT | {"no_causal_mask": True}
    cfg = {"embed_dim": 24, "custom_text": True, "vision_cfg": vision, "text_cfg": text}
    return _save_open_clip(folder, cfg, interpolation="bilinear", mean=(0, 0, 0), std=(1, 1, 1))


def open_clip_pe(folder: Path) -> Library:
    """PE-Core's form: an Eva with attention pooling, whose classifier is the projection."""
    vision = {
        "timm_model_name": "vit_pe_core_tiny_patch16_384",
        "timm_pool": "map",
        "timm_proj": None,
        "image_size": 384,
    }
    cfg = {"embed_dim": 24, "custom_text": True, "vision_cfg": vision, "text_cfg": OPEN_CLIP_TEXT}
    return _save_open_clip(folder, cfg, resize_mode="squash", interpolation="bilinear")


def open_clip_with_roberta(folder: Path) -> Library:
    from transformers import RobertaConfig

    named = folder.parent / "roberta"
    RobertaConfig(**SMALL_TEXT, pad_token_id=1).save_pretrained(named)
    text = {
        "hf_model_name": str(named),
        "hf_model_pretrained": False,
        "hf_tokenizer_name": str(named),
        "hf_pooler_type": "mean_pooler",
        "context_length": MAX_TOKENS,
    }
    cfg = {"embed_dim": 24, "custom_text": True, "vision_cfg": OPEN_CLIP_VISION, "text_cfg": text}
    return _save_open_clip(folder, cfg, tiny_tokenizers.byte_level_bpe(), resize_mode="squash")
