"""The whole model as a script would have it: no child process, no stages, no Ray; and two contestants made of it.

    python -m pipeline_bench.plain limit TASK      # forward passes only, all inputs decoded in memory before the first
    python -m pipeline_bench.plain loop TASK       # a careful script: `DataLoader` workers decode, Parquet at the end

The limit runs in processes of one thread each, or in one, which waits at the end of each operation for its slowest
thread. Freed memory is kept, as the stages do it: this is what the hardware allows, not what a script would reach.

`B` pairs, `S` side of the square, `T` tokens of all captions, `E` embedding size.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageOps
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from shards.activations import Batch, TowerState
from shards.model_config import TOKENIZER_FILE, load_model_config
from shards.shard import Shard, load_shard
from shards.shard_specs import whole_model

FINISHED_FILE = "finished.txt"
VECTORS_FOLDER = "vectors"
SIDES = ("image_embedding", "text_embedding")
SUFFIXES = (".jpg", ".png")

Event = tuple[float, int]
"""Unix time, and how many items were finished then: their vectors were in the memory of a CPU."""


@dataclass(frozen=True)
class Task:
    """Model and items of one contestant's run, and with which numbers it runs."""

    model: str  # model folder
    items: str  # folder of files `000000.jpg` with `000000.txt`
    num_items: int  # pairs in it
    num_distinct: int  # pairs after which the contents begin again
    dtype: str  # compute dtype
    out: str = ""  # folder to leave the results in
    batch_size: int = 32  # items of one forward pass
    num_threads: int = 1  # torch threads of one process that runs the model
    num_workers: int = 1  # processes that decode, or for the limit, that run the model
    prefetch: int = 4  # batches that each process that decodes may be ahead

    @staticmethod
    def from_command_line() -> "Task":
        return Task(**json.loads(sys.argv[-1]))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def images(self) -> list[Path]:
        """The images of all pairs, in the order of their names."""
        return sorted(path for path in Path(self.items).iterdir() if path.suffix in SUFFIXES)[: self.num_items]


def note_finished(out: str | Path, num_items: int) -> None:
    """Note that further items are finished now; several processes may write into one file."""
    with (Path(out) / FINISHED_FILE).open("a") as file:
        file.write(f"{time.time():.6f} {num_items}\n")  # one small write at the end: none falls into another


def read_finished(out: Path) -> list[Event]:
    lines = (out / FINISHED_FILE).read_text().splitlines()
    return sorted((float(time_s), int(number)) for time_s, number in map(str.split, lines))


def write_vectors(out: str | Path, name: str, ids: Sequence[str], images: np.ndarray, texts: np.ndarray) -> None:
    folder = Path(out) / VECTORS_FOLDER
    folder.mkdir(exist_ok=True)
    flat = [pa.FixedSizeListArray.from_arrays(np.ravel(each), each.shape[1]) for each in (images, texts)]
    table = pa.table([pa.array(ids), *flat], ["item_id", *SIDES])
    pq.write_table(table, folder / f"{name}.parquet", use_dictionary=["item_id"])


Pair = tuple[np.ndarray, np.ndarray]
"""Pixels uint8 (S, S, 3), token ids int32 (T,)."""

REDUCTION_MARGIN = 2  # a JPEG may be decoded at a scale that keeps twice the target, as the pipeline does


class PlainDecoder:
    """Files of a pair -> pixels and token ids, for models that squash images to a square."""

    def __init__(self, model: str | Path) -> None:
        config = load_model_config(model).preprocess
        if config.resize != "squash" or config.resampler != "pillow" or not config.reduced_decode:
            raise ValueError(f"{model}: the benchmark's own decoder only squashes, with Pillow, at reduced scales")
        self.side, self.filter = config.image_size, Image.Resampling[config.interpolation.upper()]
        self.tokenizer = Tokenizer.from_file(str(Path(model) / TOKENIZER_FILE))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(config.max_caption_tokens)

    def __call__(self, image: Path) -> Pair:
        """Read and decode one pair, whose caption stands next to its image."""
        return self.pixels(image), self.token_ids(image.with_suffix(".txt").read_text(encoding="utf-8"))

    def pixels(self, source: object) -> np.ndarray:
        """Decode an image's file or open stream; uint8 (S, S, 3)."""
        with Image.open(source) as image:  # type: ignore[arg-type]  # a path or a stream
            image.draft(None, (REDUCTION_MARGIN * self.side,) * 2)
            upright = ImageOps.exif_transpose(image)
            squashed = upright.convert("RGB").resize((self.side,) * 2, self.filter, reducing_gap=REDUCTION_MARGIN)
        return np.array(squashed)

    def token_ids(self, caption: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(caption).ids, np.int32)


@cache
def decoder_of(model: str) -> PlainDecoder:
    """The process's decoder, for tasks that are plain functions: the tokeniser is read once."""
    return PlainDecoder(model)


def as_batch(pairs: Iterable[Pair]) -> Batch:
    pixels, token_ids = zip(*pairs, strict=True)
    return packed_batch(np.stack(pixels), token_ids)


def packed_batch(pixels: np.ndarray, token_ids: Sequence[np.ndarray]) -> Batch:
    lengths = torch.tensor([len(ids) for ids in token_ids])
    vision = TowerState(torch.from_numpy(pixels), torch.ones(len(pixels), dtype=torch.int64))
    return Batch(vision, TowerState(torch.from_numpy(np.concatenate(token_ids)), lengths))


def load_whole(model: str, dtype: str, num_threads: int) -> Shard:
    """The whole model in one piece, and as many threads for it."""
    torch.set_num_threads(num_threads)
    return load_shard(model, whole_model(load_model_config(model)), dtype=dtype)


def embed_batch(model: torch.nn.Module, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of the images and of the captions; float32 (B, E) each."""
    with torch.inference_mode():
        encoded = model(batch)
    return encoded.vision.values.float().numpy(), encoded.text.values.float().numpy()


def embed_all(task: Task, name: str, batches: Iterable[tuple[list[str], Batch]]) -> None:
    model = load_whole(task.model, task.dtype, task.num_threads)
    ids, images, texts = [], [], []
    for names, batch in batches:
        image, text = embed_batch(model, batch)
        note_finished(task.out, len(names))
        ids.extend(names)
        images.append(image)
        texts.append(text)
    if ids:
        write_vectors(task.out, name, ids, np.concatenate(images), np.concatenate(texts))


def decode_batch(images: list[Path], *, model: str) -> tuple[list[str], Batch]:
    return [image.name for image in images], as_batch(map(decoder_of(model), images))


def run_loop(task: Task, images: list[Path]) -> None:
    loader = DataLoader(
        images, batch_size=task.batch_size, num_workers=task.num_workers,
        prefetch_factor=task.prefetch if task.num_workers else None, collate_fn=partial(decode_batch, model=task.model),
    )  # fmt: skip
    embed_all(task, "all", loader)


def run_limit(task: Task) -> int:
    """Embed all pairs, decoded before, in `num_workers` processes; gives the exit code."""
    pairs = list(map(PlainDecoder(task.model), task.images()[: task.num_distinct]))
    children = []
    for number in range(1, task.num_workers):
        pid = os.fork()  # before this process has started any thread of torch
        if pid == 0:
            embed_share(task, pairs, number)
            os._exit(0)
        children.append(pid)
    embed_share(task, pairs, 0)
    return int(any(os.waitpid(pid, 0)[1] for pid in children))


def embed_share(task: Task, pairs: list[Pair], number: int) -> None:
    """Embed the batches of one of `num_workers` processes, which take turns."""
    from embedder.compat.malloc import keep_freed_memory

    keep_freed_memory()
    names = [image.name for image in task.images()]

    def batches() -> Iterator[tuple[list[str], Batch]]:
        for start in range(number * task.batch_size, len(names), task.num_workers * task.batch_size):
            mine = names[start : start + task.batch_size]
            yield mine, as_batch([pairs[at % len(pairs)] for at in range(start, start + len(mine))])

    embed_all(task, str(number), batches())


def main() -> None:
    task = Task.from_command_line()
    if sys.argv[1] == "limit":
        sys.exit(run_limit(task))
    run_loop(task, task.images())


if __name__ == "__main__":
    main()
