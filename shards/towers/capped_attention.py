"""Attention with capped scores, as VideoPrism has it, in parts that fit into memory.

Source: transformers 5.23, `eager_attention_forward` of modeling_videoprism.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ATTENTION = "softcap_in_parts"
"""Name under which transformers finds `attend_in_parts`."""
MAX_SCORES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Most attention scores at once, by kind of device: the auxiliary layers of a clip of 16 x 256 patches have 200 M."""


def attend_in_parts(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the library's capped attention, some queries at a time; (R, heads, L, width) to (R, L, heads, width)."""
    import torch

    del module, attention_mask, options
    most = MAX_SCORES.get(query.device.type, 1 << 27) // (query.shape[0] * query.shape[1] * key.shape[2])
    scaled = query * (scaling / (softcap or 1.0))
    if most >= query.shape[2]:  # apart from the loop, of which the compiler makes a graph for each number of queries
        attended = _attend(scaled, key, value, softcap)
    else:
        starts = range(0, query.shape[2], num_queries := max(1, most))
        parts = [_attend(scaled[:, :, start : start + num_queries], key, value, softcap) for start in starts]
        attended = torch.cat(parts, 2)
    return attended.transpose(1, 2).contiguous(), None


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: float | None) -> torch.Tensor:
    import torch

    scores = query @ key.transpose(2, 3)
    if softcap is not None:
        # Without gradients, in place: each further copy costs as much as the product.
        scores = scores.tanh() * softcap if torch.is_grad_enabled() else scores.tanh_().mul_(softcap)
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
