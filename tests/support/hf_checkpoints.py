"""Tiny random checkpoints of transformers for tasks: classifiers, detectors, writers of texts."""

from pathlib import Path
from typing import Any

import library_checkpoints as checkpoints
import tiny_tokenizers
from library_checkpoints import SIZE, SMALL_TEXT, WIDE_VISION, make, save_all, square

LABELS = {0: "cat", 1: "dog", 2: "car"}
NAMED = {"id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}}


def _processor() -> Any:
    from transformers import ViTImageProcessor

    return ViTImageProcessor(size=square(SIZE))


def image_classifier(folder: Path) -> None:
    from transformers import ViTConfig

    save_all(folder, make("ViTForImageClassification", ViTConfig(**WIDE_VISION, **NAMED)), _processor())


def text_classifier(folder: Path) -> None:
    from transformers import BertConfig

    tokenizer = checkpoints.limited(tiny_tokenizers.wordpiece())
    save_all(folder, make("BertForSequenceClassification", BertConfig(**SMALL_TEXT, **NAMED)), tokenizer)


def entailment(folder: Path) -> None:
    """A classifier with the labels that zero-shot classification asks for."""
    from transformers import BertConfig

    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    config = BertConfig(**SMALL_TEXT, id2label=labels, label2id={name: number for number, name in labels.items()})
    save_all(
        folder,
        make("BertForSequenceClassification", config),
        checkpoints.limited(tiny_tokenizers.wordpiece()),
    )


def detector(folder: Path) -> None:
    from transformers import YolosConfig, YolosImageProcessor

    config = YolosConfig(**(WIDE_VISION | {"image_size": [SIZE, SIZE]}), num_detection_tokens=6, **NAMED)
    processor = YolosImageProcessor(size={"height": SIZE, "width": SIZE}, do_pad=False)
    save_all(folder, make("YolosForObjectDetection", config), processor)


def captioner(folder: Path) -> None:
    """A ViT in front of a GPT-2, which writes a few words of the tokeniser."""
    from transformers import GPT2Config, VisionEncoderDecoderConfig, ViTConfig

    tokenizer = tiny_tokenizers.wordpiece()
    decoder = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=40,
        add_cross_attention=True,
        is_decoder=True,
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**WIDE_VISION), decoder)
    ids = {"decoder_start_token_id": 2, "pad_token_id": 0, "eos_token_id": 3}
    for name, value in ids.items():
        setattr(config, name, value)
    model = make("VisionEncoderDecoderModel", config)
    for name, value in ids.items():
        setattr(model.generation_config, name, value)
    save_all(folder, model, _processor(), tokenizer)


def writer(folder: Path) -> None:
    from transformers import GPT2Config

    tokenizer = tiny_tokenizers.wordpiece()
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=64, **ids)
    save_all(folder, make("GPT2LMHeadModel", config), tokenizer)


def llama_writer(folder: Path) -> None:
    """A Llama with heads of 64, which vLLM's attention on CPUs takes."""
    from transformers import LlamaConfig

    tokenizer = tiny_tokenizers.wordpiece()
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes, **ids)
    save_all(folder, make("LlamaForCausalLM", config), tokenizer)
