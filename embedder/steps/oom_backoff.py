"""Halves batches that don't fit into memory until they do; later batches start at that size."""

from collections.abc import Callable, Iterator

import pyarrow as pa
import torch

from embedder.errors import RunFailedError

# Torch has a specific type only for its own allocator of devices. Its CPU allocator, pinned memory, kernels that are
# loaded (compiled ones by the driver), cuBLAS, cuDNN, Triton and oneDNN raise RuntimeErrors; oneDNN's doesn't say that
# memory was the cause.
MESSAGES = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "[CUDA]: out of memory",
    "STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "could not create a primitive",
    "could not create a memory",
)
MAX_MESSAGE_CHARACTERS = 200

Encode = Callable[..., pa.Table]
"""Takes a batch, and what the caller passes on with it."""


class OomBackoffEncoder:
    """Encodes batches in pieces that fit into memory.

    Rows are independent, so the pieces give the same result as the whole batch.
    """

    def __init__(self, name: str, encode: Encode) -> None:
        self.max_rows: int | None = None
        self._problem = ""
        self._name, self._encode = name, encode

    def __call__(self, batch: pa.RecordBatch, *arguments: object) -> Iterator[pa.Table]:
        """Yield the batch's tables in order; a RunFailedError if even a single row doesn't fit."""
        start = 0
        while start < batch.num_rows:
            piece = batch.slice(start, self.max_rows)
            table = self._try(piece, *arguments)
            if table is None:
                self._shrink(piece.num_rows)
            else:
                start += piece.num_rows
                yield table

    def _try(self, batch: pa.RecordBatch, *arguments: object) -> pa.Table | None:
        """Encode; None if out of memory. The error is freed first, and with it the tensors that its frames hold."""
        try:
            return self._encode(batch, *arguments)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._problem = " ".join(str(error).split())[:MAX_MESSAGE_CHARACTERS] or type(error).__name__
        return None

    def _shrink(self, num_rows: int) -> None:
        if num_rows == 1:
            raise RunFailedError(
                f"{self._name}: one item alone needs more memory than there is; give the stage more memory, cut the "
                f"model into more stages (num_stages), or lower frames_per_segment ({self._problem})"
            )
        half = -(-num_rows // 2)
        self.max_rows = (
            half if self.max_rows is None else min(self.max_rows, half)
        )  # another thread may have been first
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # pieces of another size can't use the cached blocks


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the machine or a device is out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES)
