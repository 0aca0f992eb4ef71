"""Daft with a class UDF of the same weights, as its documentation shows; in an environment that has `daft`.

    python -m pipeline_bench.daft_udf TASK      # with this project's shards on Python's path

Decoding is its own UDF, so that it runs along with the model; Daft's own decoder and resize give other pixels. The
vectors of a row come back as one list, the image's before the caption's.
"""

import io
from pathlib import Path
from typing import Any

import daft
import numpy as np
import pyarrow as pa
from daft import DataType, Series, col

from pipeline_bench.plain import VECTORS_FOLDER, Task, note_finished


@daft.cls
class Decode:
    """Bytes of an image, and its path, next to which the caption stands -> pixels and token ids."""

    def __init__(self, task: Task) -> None:
        from pipeline_bench.plain import PlainDecoder

        self.decode = PlainDecoder(task.model)

    @daft.method(return_dtype=DataType.struct({"pixels": DataType.binary(), "token_ids": DataType.binary()}))
    def pair(self, encoded: bytes, path: str) -> dict[str, bytes]:
        caption = Path(path).with_suffix(".txt").read_text(encoding="utf-8")
        pixels, token_ids = self.decode.pixels(io.BytesIO(encoded)), self.decode.token_ids(caption)
        return {"pixels": pixels.tobytes(), "token_ids": token_ids.tobytes()}


class DaftEmbed:
    """The whole model."""

    def __init__(self, task: Task) -> None:
        from pipeline_bench.plain import load_whole

        self.task = task
        self.model = load_whole(task.model, task.dtype, task.num_threads)
        self.side = self.model.config.preprocess.image_size

    def embed(self, pixels: Series, token_ids: Series) -> Any:
        import torch

        from pipeline_bench.plain import embed_batch, packed_batch

        torch.set_num_threads(self.task.num_threads)  # of this thread: OpenMP counts for each by itself
        shape = (-1, self.side, self.side, 3)
        rows = np.frombuffer(b"".join(pixels.to_pylist()), np.uint8).reshape(shape)
        batch = packed_batch(rows.copy(), [np.frombuffer(ids, np.int32) for ids in token_ids.to_pylist()])
        both = np.concatenate(embed_batch(self.model, batch), axis=1)
        note_finished(self.task.out, len(both))
        offsets = np.arange(0, both.size + 1, both.shape[1])
        return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(both.reshape(-1)))


def main() -> None:
    task = Task.from_command_line()
    in_batches = daft.method.batch(return_dtype=DataType.list(DataType.float32()), batch_size=task.batch_size)
    DaftEmbed.embed = in_batches(DaftEmbed.embed)  # type: ignore[method-assign]  # the batch size is known only now
    decode, embed = Decode(task), daft.cls(max_concurrency=1)(DaftEmbed)(task)
    paths = [str(image) for image in task.images()]
    frame = daft.from_pydict({"path": paths, "item_id": [Path(path).name for path in paths]})
    frame = frame.with_column("pair", decode.pair(col("path").download(), col("path")))
    frame = frame.with_column("vectors", embed.embed(col("pair")["pixels"], col("pair")["token_ids"]))
    frame.select("item_id", "vectors").write_parquet(str(Path(task.out) / VECTORS_FOLDER))


if __name__ == "__main__":
    main()
