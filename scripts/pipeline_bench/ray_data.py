"""Ray Data as its documentation shows batch inference: read, map, one actor with the whole model, write Parquet.

    python -m pipeline_bench.ray_data TASK      # dtype float32: the libraries' own forward functions

In any other dtype the model is this project's unsplit one, since a library's model cast as a whole would normalise its
outputs in that dtype too. Torch gets all cores; left alone, Ray gives an actor of one CPU one thread. Ray fuses the
decoding, a plain function of a row, into the actor behind it.
"""

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embedder.executors.ray_session import start_ray
from pipeline_bench.plain import SIDES, VECTORS_FOLDER, Task, note_finished

Row = dict[str, Any]
Columns = dict[str, np.ndarray]


def decode(row: Row, *, model: str) -> Row:
    """Bytes of an image -> pixels, and the caption next to it -> token ids."""
    from pipeline_bench.plain import decoder_of

    decoder, path = decoder_of(model), Path(row["path"])
    token_ids = decoder.token_ids(path.with_suffix(".txt").read_text(encoding="utf-8"))
    return {"item_id": path.name, "pixels": decoder.pixels(io.BytesIO(row["bytes"])), "token_ids": token_ids}


class RayDataEmbed:
    """The whole model."""

    def __init__(self, task: Task) -> None:
        import torch

        from pipeline_bench.plain import load_whole

        if task.dtype == "float32":
            from shards.reference import load_towers

            self.model: torch.nn.Module = load_towers(task.model)
        else:
            self.model = load_whole(task.model, task.dtype, task.num_threads)
        torch.set_num_threads(task.num_threads)
        self.out = task.out

    def __call__(self, batch: Columns) -> Columns:
        from pipeline_bench.plain import embed_batch, packed_batch

        images, texts = embed_batch(self.model, packed_batch(np.array(batch["pixels"]), list(batch["token_ids"])))
        note_finished(self.out, len(images))
        return {"item_id": batch["item_id"], **dict(zip(SIDES, (images, texts), strict=True))}


def main() -> None:
    task = Task.from_command_line()
    start_ray()
    import ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    images = [str(image) for image in task.images()]
    dataset = ray.data.read_binary_files(images, include_paths=True).map(partial(decode, model=task.model))
    embedded = dataset.map_batches(
        RayDataEmbed, fn_constructor_args=(task,), batch_size=task.batch_size,
        compute=ray.data.ActorPoolStrategy(size=1),
    )  # fmt: skip
    embedded.write_parquet(str(Path(task.out) / VECTORS_FOLDER))
    ray.shutdown()


if __name__ == "__main__":
    main()
