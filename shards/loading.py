"""Read only the tensors that a shard owns from a model folder's safetensors files."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from shards.model_config import ModelConfig
from shards.model_errors import ModelError
from shards.quantised import quantise_weight
from shards.shard_specs import ShardSpec
from shards.tensor_shapes import LOGIT_BIAS, LOGIT_SCALE, held_dtype, shard_shapes
from shards.towers.base import Shape
from shards.weights import CHECKPOINT_CURE, check_names, check_shape, find_weights, read_header

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Dtypes of activations by compute dtype; int8 applies only to weights.
ACTIVATION_DTYPES = TORCH_DTYPES | {"int8": torch.float32}

MAPPED_BYTES = 8 << 20


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for the name of a stored dtype; raises a ModelError if it is unknown."""
    return _find_dtype(name, TORCH_DTYPES)


def activation_dtype(name: str) -> torch.dtype:
    """Return the dtype of activations for a compute dtype; raises a ModelError if it is unknown."""
    return _find_dtype(name, ACTIVATION_DTYPES)


def _find_dtype(name: str, known: Mapping[str, torch.dtype]) -> torch.dtype:
    if name not in known:
        raise ModelError(f"dtype = {name!r}: expected one of {', '.join(known)}")
    return known[name]


def load_tensors(
    folder: Path, config: ModelConfig, spec: ShardSpec, dtype: str, device: torch.device
) -> dict[str, torch.Tensor]:
    """Read a shard's tensors, cast or quantised and moved one by one, so that the shard is never in memory twice.

    Raises a ModelError if a tensor is missing, unknown, of another shape or of integers, or a file is broken.
    """
    activation_dtype(dtype)
    shapes = shard_shapes(config, spec)
    files = find_weights(folder)
    check_names(files, folder, shapes, config)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in read_tensors(files, shapes):
        if not tensor.is_floating_point():
            raise ModelError(
                f"{files[name]}: the tensor {name} has dtype {str(tensor.dtype).removeprefix('torch.')}, expected one "
                f"of {', '.join(TORCH_DTYPES)}; import the model again"
            )
        held = held_dtype(config, name, shapes[name], dtype)
        if held == "int8":
            tensors |= quantise_weight(name, tensor.to(device))
        else:
            # Always a copy: safetensors maps the file, so the tensor could be at any address (the last bit of a matrix
            # product may depend on it), and a truncated file would end the process.
            tensors[name] = tensor.to(device, TORCH_DTYPES[held], copy=True)
    return tensors


def stored_shape(files: Mapping[str, Path], name: str) -> Shape | None:
    """Return the shape of a tensor in its file; None if no file has it or the file is broken."""
    try:
        return read_header(files[name])[name].shape
    except (KeyError, ModelError):
        return None


def read_tensor(files: Mapping[str, Path], name: str, shape: Shape) -> torch.Tensor:
    """Read one tensor of a given shape from its file, which maps it; no other file is opened.

    Raises a ModelError if no file has the tensor, the file is missing or broken, or the shape differs.
    """
    return next(read_tensors(files, {name: shape}))[1]


def read_tensors(files: Mapping[str, Path], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, torch.Tensor]]:
    """Read tensors, each mapped, in their order.

    A file is opened again after `MAPPED_BYTES`, because what was read through one mapping counts as memory of the
    process until the mapping is closed: a shard would be held twice.
    """
    from safetensors import SafetensorError, safe_open

    path, mapped_bytes = None, 0
    with ExitStack() as mapping:
        for name, shape in shapes.items():
            found = _find_file(files, name, shape)
            try:
                if found != path or mapped_bytes > MAPPED_BYTES:
                    mapping.close()
                    path, mapped_bytes = found, 0
                    file = mapping.enter_context(safe_open(path, framework="pt", device="cpu"))
                check_shape(path, name, file.get_slice(name).get_shape(), shape)
                tensor: torch.Tensor = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path}: the tensor {name} can't be read ({error}); fetch the file again") from None
            mapped_bytes += tensor.nbytes
            yield name, tensor


def _find_file(files: Mapping[str, Path], name: str, shape: Shape) -> Path:
    if name not in files:
        folder = next(iter(files.values())).parent if files else "empty"
        raise ModelError(
            f"{folder}: the weight files lack the tensor {name}, expected one of shape {list(shape)}; {CHECKPOINT_CURE}"
        )
    return files[name]


def read_sigmoid(folder: Path) -> tuple[float, float] | None:
    """Read scale and bias of the logits whose sigmoid is the probability that a caption fits an image, as in SigLIP.

    None for a model without a bias: CLIP's softmax compares candidates, and says nothing about one pair.
    """
    files = find_weights(folder)
    if LOGIT_SCALE not in files or LOGIT_BIAS not in files:
        return None
    scale, bias = (read_tensor(files, name, ()).float().item() for name in (LOGIT_SCALE, LOGIT_BIAS))
    return math.exp(scale), bias


def check_values(path: Path, name: str, tensor: torch.Tensor) -> None:
    """Raise a ModelError unless a tensor can be stored in a model folder: floating-point, all values finite."""
    if tensor.dtype not in TORCH_DTYPES.values():
        raise ModelError(
            f"{path}: the tensor {name} has dtype {str(tensor.dtype).removeprefix('torch.')}, expected one of "
            f"{', '.join(TORCH_DTYPES)}; save the model in one of them"
        )
    num_broken = tensor.numel() - int(tensor.isfinite().sum())
    if num_broken:
        raise ModelError(
            f"{path}: the tensor {name} has {num_broken} of {tensor.numel()} values that are NaN or infinite, expected "
            "finite ones; fetch the file again, or a model whose training did not diverge"
        )
