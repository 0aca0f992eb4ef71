"""Layers of a shard compiled by torch: the same kernels for every number of rows and tokens.

Each layer is compiled separately. Those of a tower share their code, so it is compiled once for each kind of layer,
with and without a mask. Sizes are dynamic from the first batch on, except a size of one, which would need other
kernels: such a group runs eagerly, because the last row of a block isn't worth compiling for.

Legend: `F` frames or captions, `L` tokens of one of them, `D` width.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shards.compat import mark_any_rows
from shards.shard import Shard

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
THREADS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"


def compile_layers(shard: Shard) -> Callable[[], None]:
    """Compile the layers of both towers in place (same weights and names) on first use; returns what undoes it."""
    layers: list[Any] = []
    for side, tower in shard.config.towers.items():
        module = getattr(shard, side)
        for number in tower.weight_numbers(shard.spec.layers_of(side)) if module is not None else ():
            layers.append(module.get_submodule(tower.prefix_of(number).removesuffix(".")))
    for layer in layers:
        layer.forward = partial(_run, layer.forward, torch.compile(layer.forward, dynamic=True))

    def undo() -> None:
        for layer in layers:
            vars(layer).pop("forward", None)

    return undo


def _run(
    eager: Callable[..., Any], compiled: Callable[..., Any], x_FLD: torch.Tensor, *others: Any, **named: Any
) -> Any:
    if 1 in x_FLD.shape[:2]:
        return eager(x_FLD, *others, **named)
    mark_any_rows(x_FLD)
    return compiled(x_FLD, *others, **named)


def keep_compiled(folder: Path) -> None:
    """Let torch keep what it compiles in a folder, and compile in this process, leaving no child processes behind.

    The environment takes precedence. If the folder can't be made, torch keeps files in a temporary one.
    """
    os.environ.setdefault(THREADS_VARIABLE, "1")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault(CACHE_VARIABLE, str(folder))
