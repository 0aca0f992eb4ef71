"""Tiny random checkpoints of CLIP, with its tokeniser and image processor, as transformers saves them."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tower_checks import randomise

NUM_TOKENS, SIZE = 300, 32
START, END = NUM_TOKENS - 2, NUM_TOKENS - 1
TEXT = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "bos_token_id": START,
    "eos_token_id": END,
    "pad_token_id": END,
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 8,
}
CAPTIONS = ["A red car", "two cats sleep on a sofa", "fruit"]


def byte_level_bpe(num_tokens: int = NUM_TOKENS) -> Tokenizer:
    """Tokeniser as CLIP has it: byte-level BPE in lower case, between a start and an end token."""
    start, end = num_tokens - 2, num_tokens - 1
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CAPTIONS, trainers.BpeTrainer(vocab_size=start, initial_alphabet=alphabet))
    for number in range(tokenizer.get_vocab_size(), start):
        tokenizer.add_tokens([f"word{number}"])
    tokenizer.add_special_tokens(["<|startoftext|>", "<|endoftext|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|endoftext|>",
        special_tokens=[("<|startoftext|>", start), ("<|endoftext|>", end)],
    )
    return tokenizer


def save_clip(folder: Path) -> torch.nn.Module:
    """Save a CLIP, and give the model."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    torch.manual_seed(0)
    model = randomise(CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=24)))
    model.save_pretrained(folder)
    size = {"height": SIZE, "width": SIZE}
    CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=size).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(byte_level_bpe().to_str())
    return model


def edit_json(path: Path, **changes: Any) -> None:
    """Change values of a JSON file; two underscores lead into a section, as `vision_config__image_size`."""
    tree = json.loads(path.read_text())
    for key, value in changes.items():
        *sections, leaf = key.split("__")
        part = tree
        for section in sections:
            part = part[section]
        part[leaf] = value
    path.write_text(json.dumps(tree))
