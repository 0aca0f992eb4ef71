"""A tiny tower of each family of the registry, and models of them whose tokeniser has a token for each word."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shards.convert.whole_models import describe_whole
from shards.fresh import init_model
from shards.model_config import ModelConfig
from shards.preprocess import PreprocessConfig
from shards.saving import write_weights
from shards.tensor_shapes import LOGIT_BIAS, LOGIT_SCALE, model_shapes
from shards.towers.albert import AlbertTower
from shards.towers.registry import MODULES
from shards.towers.tower_kinds import VisionTower
from shards.towers.vit import VitTower
from shards.weights import WEIGHTS_FILE

FAMILIES = [tower for module in MODULES for tower in getattr(module, "TOWERS", ())]
NUM_TOKENS, MAX_TOKENS, SIDE_PX = 300, 16, 32

# A tiny tower's fields, whatever its library calls them; a family takes those that it has.
TINY = {
    "image_size": SIDE_PX,
    "patch_size": 8,
    "max_patches": 16,
    "width": 32,
    "depth": 3,
    "num_heads": 2,
    "vocab_size": NUM_TOKENS,
    "embedding_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_TOKENS + 2,  # RoBERTa's positions begin at 2
    "pad_token_id": 0,
    "eos_token_id": NUM_TOKENS - 1,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "mrope_section": (3, 2, 1),
    "num_position_embeddings": (SIDE_PX // 8) ** 2,
    "deepstack_visual_indexes": (0, 1),
    "min_patches": 4,
    "ids_before": (5, 6, 7),
    "ids_between": (8,),
    "ids_after": (9, 10),
}


# What only one family has otherwise.
OWN = {family: {"hidden_size": 24} for family in ("qwen2_vl_text", "qwen2_5_vl_text")}
OWN |= {"videoprism": {"num_frames": 4, "num_spatial_layers": 2, "num_temporal_layers": 2, "num_auxiliary_layers": 2}}
OWN |= {"qwen2_5_vl": {"window_size": 32, "fullatt_block_indexes": (1,)}}


def tiny(family, **fields):
    """Give a tiny tower of a family; one that is held whole has the sizes of its architecture."""
    if getattr(family, "is_whole", False):
        side = fields.get("image_size", SIDE_PX)
        return describe_whole("test_convnext" if side == SIDE_PX else "convnext_atto", {}, None, side, Path("model"))
    fields = OWN.get(family.model_fields["family"].default, {}) | fields
    if "decoder" in family.model_fields:
        fields = {"decoder": tiny(family.model_fields["decoder"].annotation), **fields}
    return family(**{name: value for name, value in (TINY | fields).items() if name in family.model_fields})


def beside_default(family) -> ModelConfig:
    """Give a tiny model of a family, next to a tower of the default family."""
    tower = tiny(family)
    is_vision = isinstance(tower, VisionTower)
    vision, text = (tower, tiny(AlbertTower)) if is_vision else (tiny(VitTower), tower)
    if is_vision and tower.shared_decoder is not None:
        text = tower.shared_decoder
    resize = "crop" if vision.patch_px is None else "patches"
    preprocess = PreprocessConfig(image_size=vision.side_px, max_caption_tokens=MAX_TOKENS, resize=resize)
    return ModelConfig(name="tiny", trained=False, embedding_dim=24, vision=vision, text=text, preprocess=preprocess)


def captions_for(config: ModelConfig) -> list[list[int]]:
    """Give four captions as the tower takes them: of one length, where its tokeniser pads them."""
    length = config.text.max_tokens if config.text.has_fixed_length else None
    captions = [[1, *range(10, 10 + number), NUM_TOKENS - 1] for number in (1, 13, 9, 14)]
    return [ids if length is None else ids + [0] * (length - len(ids)) for ids in captions]


def save_random_model(config: ModelConfig, folder: Path, seed: int = 0) -> Path:
    """Write a model of random weights, none of them 0 or 1, so that each part of it matters."""
    init_model(config, folder, seed=seed, tokenizer_json=word_tokenizer(config))
    (folder / WEIGHTS_FILE).unlink()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in model_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            is_shift = name.endswith((".bias", ".running_mean"))
            tensors[name] = 0.2 * noise if is_shift else (0.2 * noise + 1).abs()
        else:
            tensors[name] = noise / max(1, torch.Size(shape[1:]).numel()) ** 0.5
    tensors |= {LOGIT_SCALE: torch.tensor(2.0), LOGIT_BIAS: torch.tensor(-3.0)}
    write_weights(folder, tensors.items())
    return folder


def word_tokenizer(config: ModelConfig) -> str | None:
    """Make a tokeniser whose captions are a first token, one for each word (`w3`, `w4`, ...), and the end token."""
    tower = config.text
    if tower is None:
        return None
    first, last = 1, NUM_TOKENS - 1
    vocabulary = {f"w{number}": number for number in range(NUM_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"w{first} $A w{last}", special_tokens=[(f"w{first}", first), (f"w{last}", last)]
    )
    if tower.has_fixed_length:
        tokenizer.enable_padding(length=tower.max_tokens, pad_id=tower.padding_id, pad_token=f"w{tower.padding_id}")
    return tokenizer.to_str()


def captions_of_every_length(max_tokens: int) -> list[str]:
    """Give captions of every number of words from one up to more than a tower takes."""
    lengths = range(1, max_tokens + 1)
    return [" ".join(f"w{3 + (7 * length + 5 * place) % 290}" for place in range(length)) for length in lengths]
