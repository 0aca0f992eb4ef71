"""Read the tensors that a shard owns, and only those, from a model folder's safetensors files."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch

from shards.config import ModelConfig
from shards.errors import ModelError
from shards.parameters import Shape, body_shapes, head_shapes
from shards.ranges import ShardSpec
from shards.weights import check_names, check_shape, find_weights

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """Find torch's dtype of a name.

    Raises:
        ModelError: it is none that we compute in.
    """
    if name not in TORCH_DTYPES:
        raise ModelError(f"dtype = {name!r}: expected one of {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[name]


def load_tensors(
    folder: Path, config: ModelConfig, spec: ShardSpec, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Read a shard's tensors, cast and moved one by one, so that no second copy of the shard is ever held.

    Raises:
        ModelError: a tensor is missing, unknown or of another shape, or a file is broken.
    """
    body, head = body_shapes(config, spec), head_shapes(config, spec)
    files = find_weights(folder)
    check_names(files, folder, body | head, config)
    with TensorFiles(files) as source:
        # A copy always: what safetensors gives is mapped from the file, so it would lie there at any address (the last
        # bit of a matrix product may depend on it), and end the process if the file were cut off.
        return {
            name: source.read(name, shape).to(device, dtype if name in body else torch.float32, copy=True)
            for name, shape in (body | head).items()
        }


class TensorFiles:
    """Tensors of several safetensors files, read by name; a file is opened when its first tensor is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, shape: Shape) -> torch.Tensor:
        """Read one tensor.

        Raises:
            ModelError: no file has it, the file is missing or broken, or the tensor has another shape.
        """
        from safetensors import SafetensorError, safe_open

        if name not in self._files:
            raise ModelError(f"the weight files lack the tensor {name}, expected one of shape {list(shape)}")
        path = self._files[name]
        try:
            if path not in self._open:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            check_shape(path, name, self._open[path].get_slice(name).get_shape(), shape)
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: the tensor {name} can't be read ({error}); fetch the file again") from None
        return tensor
