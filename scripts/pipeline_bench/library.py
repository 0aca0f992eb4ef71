"""A careful script around transformers' own CLIP or SigLIP: `DataLoader` workers prepare, Parquet at the end.

    python -m pipeline_bench.library TASK

Workers decode with Pillow and prepare images and captions with the checkpoint's own image processor and tokeniser; the
model runs in the task's dtype with torch's fused attention. Batch, threads, workers, batches ahead and the processor's
backend are what tuning found best.

`B` pairs, `S` side of the square, `T` tokens of the longest caption, `E` embedding size.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer

from pipeline_bench.task import Task, note_finished, write_vectors

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
        LibraryPairs(task, images),
        batch_size=task.batch_size,
        num_workers=task.num_workers,
        prefetch_factor=task.prefetch if task.num_workers else None,
        collate_fn=collator(task),
    )
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
