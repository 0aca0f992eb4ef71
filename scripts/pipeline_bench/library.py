"""A careful script around the own CLIP or SigLIP of transformers: `DataLoader` workers prepare, Parquet at the end.

    python -m pipeline_bench.library TASK

Workers decode with Pillow and prepare images and captions with the checkpoint's own image processor and tokeniser; the
model runs in the dtype of the task with torch's fused attention. Batch, threads, workers, batches ahead and the backend
of the processor are what tuning found best.

The models have random weights, saved as that library saves them, and made into model folders. Fresh weights send all
inputs to nearly one place, where equal vectors prove nothing. With these, vectors of different inputs differ by more
than bfloat16 rounds off: attention is sharper for captions, its values are larger, and no bias adds the same to all.

`B` pairs, `S` side of the square, `T` tokens of the longest caption, `E` embedding size.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoTokenizer,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTokenizer,
    GemmaTokenizer,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
)

from pipeline_bench.task import Task, note_finished, write_vectors
from shards.convert import import_checkpoint

NUM_TOKENS = 512  # of the tokenisers; the full-sized towers' tables keep the published size
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY_VISION = TINY | {"image_size": 32, "patch_size": 8}
TINY_TEXT = TINY | {"vocab_size": NUM_TOKENS}


def make_library_model(name: str, folder: Path, captions: Sequence[str]) -> tuple[Path, Path]:
    """Save a model as its library does, and import it.

    Returns:
        The checkpoint and the model folder.
    """
    kind, _, size = name.partition("-")
    checkpoint = folder / "checkpoint"
    vision, text = (TINY_VISION, TINY_TEXT) if size == "tiny" else ({}, {})
    model = (_save_clip if kind == "clip" else _save_siglip)(checkpoint, vision, text, captions)
    fill_weights(model, seed=0)
    model.save_pretrained(checkpoint)
    import_checkpoint(checkpoint, folder / "model", name=name)
    return checkpoint, folder / "model"


def fill_weights(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter random values of a size that matters, but for scale and bias of the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module, _, leaf = name.rpartition(".")
            noise = torch.randn(parameter.shape, generator=generator)
            if name.startswith("logit_"):
                continue
            if name.endswith(("class_embedding", "probe", "token_embedding.weight")):
                parameter.copy_(noise)
            elif name.endswith("position_embedding.weight"):
                parameter.copy_(0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(torch.zeros(()) if leaf.endswith("bias") else 1 + 0.1 * noise)
            else:
                gain = 2.0 if module.endswith("v_proj") else 1.0
                if name.startswith("text_model.") and module.endswith(("q_proj", "k_proj")):
                    gain = 1.5
                parameter.copy_(gain * noise / parameter[0].numel() ** 0.5)


def _save_clip(folder: Path, vision: dict[str, Any], text: dict[str, Any], captions: Sequence[str]) -> torch.nn.Module:
    """Save a tokeniser, byte-level BPE, and an image processor; the model that goes with them."""
    backend = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_TOKENS - 2, initial_alphabet=alphabet, end_of_word_suffix="</w>")
    backend.train_from_iterator([caption.lower() for caption in captions], trainer)
    vocabulary = backend.get_vocab()
    start, end = len(vocabulary), len(vocabulary) + 1
    vocabulary |= {"<|startoftext|>": start, "<|endoftext|>": end}
    config = CLIPConfig(
        text_config=text | {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end},
        vision_config=vision,
        projection_dim=vision.get("hidden_size", 512),
    )
    size = config.vision_config.image_size
    limit = config.text_config.max_position_embeddings
    CLIPTokenizer(vocab=vocabulary, merges=_merges(backend), model_max_length=limit).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size}).save_pretrained(folder)
    return CLIPModel(config)


def _save_siglip(
    folder: Path, vision: dict[str, Any], text: dict[str, Any], captions: Sequence[str]
) -> torch.nn.Module:
    """Save a tokeniser, as SigLIP 2 has it, and an image processor; the model that goes with them."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=NUM_TOKENS - 1, special_tokens=["<pad>", "<eos>", "<bos>", "<unk>"])
    backend.train_from_iterator(captions, trainer)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = SiglipConfig(text_config=text | ids, vision_config=vision)
    limit, size = config.text_config.max_position_embeddings, config.vision_config.image_size
    tokenizer = GemmaTokenizer(
        vocab=backend.get_vocab(), merges=_merges(backend), add_bos_token=False, add_eos_token=True,
        padding_side="right", model_max_length=limit,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    SiglipImageProcessor(size={"height": size, "width": size}).save_pretrained(folder)
    return SiglipModel(config)


def _merges(tokenizer: Tokenizer) -> list[tuple[str, ...]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


Row = tuple[str, torch.Tensor, str]
"""Name of the image's file, pixels (3, S, S), caption."""
Inputs = tuple[torch.Tensor, torch.Tensor]
"""Pixels (B, 3, S, S), token ids (B, T)."""


class LibraryPairs(Dataset):
    """Decodes a pair when it is asked for."""

    def __init__(self, task: Task, images: list[Path]) -> None:
        self.processor = AutoImageProcessor.from_pretrained(task.checkpoint, backend=task.backend)
        self.dtype, self.images = getattr(torch, task.dtype), images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Row:
        path = self.images[index]
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        pixels = self.processor(upright, return_tensors="pt")["pixel_values"][0]
        return path.name, pixels.to(self.dtype), path.with_suffix(".txt").read_text(encoding="utf-8")


def collator(task: Task) -> Callable[[list[Row]], tuple[list[str], Inputs]]:
    """Function that makes a batch of rows, with the captions padded as the model was trained with."""
    tokenizer = AutoTokenizer.from_pretrained(task.checkpoint)
    is_fixed = AutoConfig.from_pretrained(task.checkpoint).model_type == "siglip"

    def collate(rows: list[Row]) -> tuple[list[str], Inputs]:
        names, pixels, captions = zip(*rows, strict=True)
        padding = "max_length" if is_fixed else "longest"
        encoded = tokenizer(list(captions), padding=padding, truncation=True, return_tensors="pt")
        return list(names), (torch.stack(pixels), encoded["input_ids"])

    return collate


def load_model(task: Task) -> Any:
    """The whole model, and as many threads for it."""
    torch.set_num_threads(task.num_threads)
    dtype = getattr(torch, task.dtype)
    return AutoModel.from_pretrained(task.checkpoint, dtype=dtype, attn_implementation="sdpa").eval()


def embed_batch(model: Any, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of the images and of the captions; float32 (B, E) each, of length 1.

    No mask is given: CLIP's captions are causal and pooled where they end, SigLIP's are attended to with their padding.
    """
    pixels, token_ids = inputs
    with torch.inference_mode():
        features = model.get_image_features(pixels).pooler_output, model.get_text_features(token_ids).pooler_output
        images, texts = (torch.nn.functional.normalize(each.float(), dim=-1).numpy() for each in features)
    return images, texts


def run_loop(task: Task, images: list[Path]) -> None:
    loader = DataLoader(
        LibraryPairs(task, images), batch_size=task.batch_size, num_workers=task.num_workers,
        prefetch_factor=task.prefetch if task.num_workers else None, collate_fn=collator(task),
    )  # fmt: skip
    model = load_model(task)
    ids, images_, texts = [], [], []
    for names, inputs in loader:
        image, text = embed_batch(model, inputs)
        note_finished(task.out, len(names))
        ids.extend(names)
        images_.append(image)
        texts.append(text)
    write_vectors(task.out, "all", ids, np.concatenate(images_), np.concatenate(texts))


def main() -> None:
    task = Task.from_command_line()
    run_loop(task, task.images())


if __name__ == "__main__":
    main()
