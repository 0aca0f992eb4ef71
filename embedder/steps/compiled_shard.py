"""Shard with compiled layers, which runs them eagerly after the first error of the compiled ones."""

import logging
import platform
import re
import threading

import torch

from embedder.steps.oom_backoff import is_out_of_memory
from embedder.storage.user_cache import cache_folder
from shards.activations import Arranged, Batch
from shards.compiled import compile_layers, keep_compiled
from shards.shard import Shard

LOG = logging.getLogger(__name__)
MAX_CAUSE_CHARACTERS = 300


class CompiledShard:
    """Runs a shard on arranged batches; concurrent threads wait for each other, or each would compile."""

    def __init__(self, index: int, shard: Shard) -> None:
        self._index, self._shard = index, shard
        keep_compiled(cache_folder("compiled") / folder_name(shard.device))
        self._undo = compile_layers(shard)
        self.is_compiled = True
        self._problem = ""
        self._lock = threading.Lock()

    def __call__(self, arranged: Arranged) -> Batch:
        """Compute a batch; if compiled layers fail, retry without them."""
        with self._lock:
            return self._compute(arranged)

    def _compute(self, arranged: Arranged) -> Batch:
        if self.is_compiled:
            try:
                return self._shard.compute(arranged)
            except Exception as error:  # noqa: BLE001  # of the compiler, a C++ compiler, Triton or what they made
                if is_short_of_memory(error):
                    # Don't give the first error a name: it would reference itself, and with it the tensors of its
                    # frames.
                    raise MemoryError(str(error)) from None
                message = " ".join(str(error).partition("\n\n")[0].split())  # hints for torch's developers follow
                cause = f"{type(error).__name__}: {message}"[:MAX_CAUSE_CHARACTERS]
            # At this point the error is gone, and with it the tensors that its frames held.
            self._launch_eagerly(cause)
        return self._shard.compute(arranged)

    def take_problem(self) -> str:
        """Return why the layers are not compiled any more, once; else an empty string."""
        found, self._problem = self._problem, ""
        return found

    def _launch_eagerly(self, cause: str) -> None:
        self._undo()
        self.is_compiled = False
        self._problem = (
            f"stage {self._index} on node {platform.node()}: compiled layers failed ({cause}); it continues without "
            "compiling, this batch included, and nothing is lost; compiling takes a C++ compiler, and on a GPU "
            "Triton: install them there, or write compile = false"
        )
        LOG.warning(self._problem)


def is_short_of_memory(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes means that memory ran out, so compilation isn't at fault."""
    while error is not None and not is_out_of_memory(error):
        error = error.__cause__
    return error is not None


def folder_name(device: torch.device) -> str:
    """Name the folder for code compiled for a device: a kind of GPU, or the CPUs of this node."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {platform.node()}"
    return re.sub(r"[^A-Za-z0-9.+]+", "-", f"torch-{torch.__version__}-{name}")
