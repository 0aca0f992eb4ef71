"""Random small checkpoints of decoders with eyes, saved by transformers with its own processor."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tower_checks import randomise
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
INSTRUCTION = "Represent the user's input."
QUERY_INSTRUCTION = "Retrieve images or text relevant to the user's query."
# The published models' template, for the parts that an embedding needs.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for content in message.content %}"
    "{%- if content.type == 'image' or 'image' in content %}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif 'text' in content %}{{- content.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WIDTH = 32


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level tokeniser with the published models' splitting and special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(__import__("tokenizers").Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [INSTRUCTION, "system user assistant", "a red car in the snow", "two cats on a sofa\n\n"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )


def make_processor(**size: int) -> Qwen3VLProcessor:
    """Make the processor of images of 4 px patches; `size` has shortest_edge and longest_edge, in pixels."""
    settings = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    settings |= {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.4]}
    images = Qwen2VLImageProcessor(size={"shortest_edge": 256, "longest_edge": 4096} | size, **settings)
    return Qwen3VLProcessor(images, byte_tokenizer(), Qwen3VLVideoProcessor(), chat_template=CHAT_TEMPLATE)


def make_config(tokenizer: PreTrainedTokenizerFast, **text: object) -> Qwen3VLConfig:
    """Make a small configuration in which no two sizes are equal by chance."""
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    vision = {"depth": 4, "hidden_size": 24, "num_heads": 2, "intermediate_size": 40, "patch_size": 4}
    vision |= {"out_hidden_size": WIDTH, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 2, 1], "mrope_interleaved": True}
    return Qwen3VLConfig(
        vision_config=vision,
        text_config={
            "vocab_size": 400,
            "hidden_size": WIDTH,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 56,
            "max_position_embeddings": 4096,
            "rope_parameters": rope,
        }
        | text,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def save_checkpoint(folder: Path, **size: int) -> Path:
    """Save a random model with its processor, as transformers does."""
    processor = make_processor(**size)
    torch.manual_seed(3)
    randomise(Qwen3VLForConditionalGeneration(make_config(processor.tokenizer))).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
