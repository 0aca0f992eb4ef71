"""A careful script by hand: `DataLoader` workers decode, the model runs in the main process, Parquet at the end.

python -m pipeline_bench.loop TASK
"""

from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, Dataset

from pipeline_bench.plain import Pair, PlainDecoder, as_batch, embed_batch, load_whole
from pipeline_bench.task import FinishLog, Task, write_vectors
from shards.activations import Batch

PREFETCH = 4  # batches that each worker may be ahead


class Pairs(Dataset):
    """Decodes a pair when it is asked for."""

    def __init__(self, model: str, pictures: list[Path]) -> None:
        self.decode, self.pictures = PlainDecoder(model), pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[str, Pair]:
        return self.pictures[index].name, self.decode(self.pictures[index])


def collate(rows: list[tuple[str, Pair]]) -> tuple[list[str], Batch]:
    return [name for name, _ in rows], as_batch([pair for _, pair in rows])


def main() -> None:
    task = Task.from_command_line()
    embed_all(task, task.pictures())


def embed_all(task: Task, pictures: list[Path]) -> None:
    """Embed the pairs of these pictures."""
    loader = DataLoader(
        Pairs(task.model, pictures),
        batch_size=task.batch_size,
        num_workers=task.num_workers,
        prefetch_factor=PREFETCH if task.num_workers else None,
        collate_fn=collate,
    )
    model, log = load_whole(task.model, task.dtype, task.num_threads), FinishLog(task.out)
    ids, images, texts = [], [], []
    for names, batch in loader:
        image, text = embed_batch(model, batch)
        log.note(len(names))
        ids.extend(names)
        images.append(image)
        texts.append(text)
    write_vectors(task, "all", ids, np.concatenate(images), np.concatenate(texts))


if __name__ == "__main__":
    main()
