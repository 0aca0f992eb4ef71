"""Linear layers with int8 weights: a quarter of float32's bytes, and integer products if the processor has them.

Weights have one scale per output channel; activations are quantised on the fly, with one scale per token, so that no
token depends on its neighbours or on the batch. Both are symmetric. Integer sums are exact in any order.

Why torch's own integer product (`int8_product`, on CPUs and CUDA) and nothing more: `torch.ao.quantization` is
deprecated, and its dynamic layers have one scale for a whole batch. torchao 0.18 installs next to torch 2.15 and calls
the same product, but took 1.2 to 2.2 times as long as `Int8Linear` without compilation (one core with AVX512-VNNI,
widths 192 to 4096), and our loading would have to support its tensor subclass.

Source: Dettmers et al. 2022, "LLM.int8()", section 2.1: row-wise times column-wise absmax quantisation. Legend: `R`
rows (tokens), `I` and `O` input and output channels.
"""

from collections.abc import Collection

import torch
from torch import nn

from shards.compat import int8_product
from shards.tensor_shapes import SCALE_SUFFIX

MAX_INT8 = 127  # -128 stays unused, so that the range is symmetric
# A block of rows stays in the cache between quantising, product and scaling: 2 to 3 times faster than all rows at once.
BLOCK_ROWS = 256
# cuBLAS doesn't accept fewer.
MIN_CUDA_ROWS = 17
TINY = 1e-12  # for a row of zeros


class Int8Linear(nn.Module):
    """Linear layer with float32 activations and int8 weights; its tensors come from `quantise_weight`."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        """Make an empty layer of the same shape, on the same device."""
        super().__init__()
        device = linear.weight.device
        self.register_buffer("weight", torch.empty(linear.weight.shape, dtype=torch.int8, device=device))
        self.register_buffer("weight_scale", torch.empty(linear.out_features, device=device))
        self.register_buffer(
            "bias", torch.empty(linear.out_features, device=device) if linear.bias is not None else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float32 (..., I) to float32 (..., O)."""
        x_RI = x.reshape(-1, x.shape[-1])
        y_RO = x_RI.new_empty((len(x_RI), len(self.weight)))
        block_rows = max(1, len(x_RI)) if x.is_cuda else BLOCK_ROWS
        for start in range(0, len(x_RI), block_rows):
            self._map_block(x_RI[start : start + block_rows], y_RO[start : start + block_rows])
        return y_RO.view(*x.shape[:-1], -1)

    def _map_block(self, x_RI: torch.Tensor, y_RO: torch.Tensor) -> None:
        x_int8_RI, scale_R1 = quantise_rows(x_RI)
        products_RO = _integer_product(x_int8_RI, self.weight).to(torch.float32).mul_(scale_R1)
        if self.bias is None:
            torch.mul(products_RO, self.weight_scale, out=y_RO)
        else:
            torch.addcmul(self.bias, products_RO, self.weight_scale, out=y_RO)


def quantise_rows(x_RI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row by its largest value: int8 (R, I) in [-127, 127], and float32 (R, 1), the scales."""
    scale_R1 = x_RI.abs().amax(dim=1, keepdim=True).clamp_(min=TINY).div_(MAX_INT8)
    return (x_RI / scale_R1).round_().to(torch.int8), scale_R1


def quantise_weight(name: str, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantise one layer's weight, (O, I): int8 values under its name, float32 scales (O,) under that of the scale.

    Works by blocks of rows: copies as large as the weight fragment the allocator's memory, and the process was seen to
    hold three times its shard.
    """
    values_OI = torch.empty(weight_OI.shape, dtype=torch.int8, device=weight_OI.device)
    scale_O1 = torch.empty((len(weight_OI), 1), device=weight_OI.device)
    for start in range(0, len(weight_OI), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        values_OI[rows], scale_O1[rows] = quantise_rows(weight_OI[rows].to(torch.float32))
    return {name: values_OI, name + SCALE_SUFFIX: scale_O1.squeeze(1)}


def make_linears_int8(module: nn.Module, names: Collection[str]) -> None:
    """Replace the linear layers whose weights have these names by empty `Int8Linear`s."""
    for path, part in list(module.named_modules()):
        if isinstance(part, nn.Linear) and f"{path}.weight" in names:
            module.set_submodule(path, Int8Linear(part))


def _integer_product(x_RI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Multiply int8 (R, I) by the transposed int8 (O, I); int32 (R, O)."""
    num_rows = len(x_RI)
    if x_RI.is_cuda and num_rows < MIN_CUDA_ROWS:
        x_RI = nn.functional.pad(x_RI, (0, 0, 0, MIN_CUDA_ROWS - num_rows))
    return int8_product(x_RI, weight_OI)[:num_rows]
