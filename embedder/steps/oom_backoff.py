"""Batches that don't fit into memory: halved until they do, and no such batch is tried whole again."""

from collections.abc import Callable, Iterator

import pyarrow as pa
import torch

from embedder.errors import RunFailedError

# Torch has a type of its own for devices only; its allocator for the CPU and oneDNN raise plain RuntimeErrors, and
# oneDNN doesn't say that it was memory it lacked.
CPU_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "could not create a primitive",
    "could not create a memory",
)
MAX_MESSAGE_CHARACTERS = 200

Encode = Callable[[pa.RecordBatch], pa.Table]


class OomBackoffEncoder:
    """Encodes batches with a function, in as many pieces as its memory asks for.

    Rows don't depend on their neighbours, so the pieces give what the whole batch would have given.
    """

    def __init__(self, name: str, encode: Encode) -> None:
        """Begin with whole batches.

        Args:
            name: of the stage, for the message.
            encode: one batch in, one table out.
        """
        self.max_rows: int | None = None
        self._problem = ""
        self._name, self._encode = name, encode

    def __call__(self, batch: pa.RecordBatch) -> Iterator[pa.Table]:
        """The batch's table, or the tables of its pieces in order.

        Raises:
            RunFailedError: one row alone does not fit.
        """
        start = 0
        while start < batch.num_rows:
            piece = batch.slice(start, self.max_rows)
            table = self._try(piece)
            if table is None:
                self._shrink(piece.num_rows)
            else:
                start += piece.num_rows
                yield table

    def _try(self, batch: pa.RecordBatch) -> pa.Table | None:
        """Encode; None where memory did not suffice. The error is gone by then, and with it what its frames hold."""
        try:
            return self._encode(batch)
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
        self.max_rows = -(-num_rows // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # pieces of another size find no use for the blocks that are kept


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory, of the machine or of a device, did not suffice."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in CPU_MESSAGES)
