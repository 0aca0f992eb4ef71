"""Tiny random checkpoints of SigLIP and of SigLIP 2, of fixed size and NaFlex, as transformers saves them."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tower_checks import randomise

LENGTH, SIZE, WIDTH, NUM_TOKENS = 16, 32, 48, 160
TEXT = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "projection_size": WIDTH,
}
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 8,
}
CAPTIONS = ["A red car!", "two cats,  sleep on a sofa", "Fruit."]
WORDS = ["a", "red", "car", "two", "cats", "sleep", "on", "sofa", "fruit"]
PIECES = ["<pad>", "</s>", "<unk>", "▁", *(f"▁{word}" for word in WORDS), *"abcdefghijklmnopqrstuvwxyzéςσ0123456789"]


def save_siglip(folder: Path) -> torch.nn.Module:
    """Save a SigLIP with a SentencePiece tokeniser, and give the model."""
    model = _save_model(folder)
    (folder / "spiece.model").write_bytes(_sentencepiece_model())
    settings = {"tokenizer_class": "SiglipTokenizer", "model_max_length": LENGTH, "do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def save_siglip2(folder: Path, side: str = "right") -> torch.nn.Module:
    """Save a SigLIP 2 with Gemma's tokeniser, which pads on a side, and give the model."""
    model = _save_model(folder)
    _save_gemma_tokenizer(folder, side)
    return model


def save_naflex_siglip2(folder: Path, max_num_patches: int = 36) -> torch.nn.Module:
    """Save a SigLIP 2 whose images keep their own proportions, and give the model; its table is of 5 x 5 patches."""
    from transformers import Siglip2Config, Siglip2ImageProcessor, Siglip2Model

    torch.manual_seed(0)
    vision = {key: value for key, value in VISION.items() if key != "image_size"} | {"num_patches": 25}
    model = randomise(Siglip2Model(Siglip2Config(text_config=TEXT, vision_config=vision)))
    model.save_pretrained(folder)
    Siglip2ImageProcessor(patch_size=8, max_num_patches=max_num_patches).save_pretrained(folder)
    _save_gemma_tokenizer(folder, "right")
    return model


def _save_gemma_tokenizer(folder: Path, side: str) -> None:
    from transformers import GemmaTokenizer

    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.train_from_iterator(CAPTIONS, trainers.BpeTrainer(vocab_size=80, special_tokens=special))
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    gemma = GemmaTokenizer(vocab=tokenizer.get_vocab(), merges=merges, add_bos_token=False, add_eos_token=True)
    gemma.padding_side = side
    gemma.save_pretrained(folder)


def _save_model(folder: Path) -> torch.nn.Module:
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    torch.manual_seed(0)
    model = randomise(SiglipModel(SiglipConfig(text_config=TEXT, vision_config=VISION)))
    model.save_pretrained(folder)
    SiglipImageProcessor(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return model


def _sentencepiece_model() -> bytes:
    """Unigram of a few words and of letters; words are likelier."""
    from transformers.convert_slow_tokenizer import import_protobuf

    protobuf: Any = import_protobuf()
    proto = protobuf.ModelProto()
    control, unknown = 3, 2
    for number, piece in enumerate(PIECES):
        kind = {0: control, 1: control, 2: unknown}.get(number, 1)
        proto.pieces.add(piece=piece, score=0.0 if number < 3 else -2.0 - 3.0 / len(piece), type=kind)
    proto.trainer_spec.model_type = 1
    proto.trainer_spec.pad_id, proto.trainer_spec.eos_id, proto.trainer_spec.unk_id = 0, 1, 2
    proto.trainer_spec.bos_id = -1
    proto.normalizer_spec.name = "identity"
    content: bytes = proto.SerializeToString()
    return content
