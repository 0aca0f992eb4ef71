"""Description of timm models that are held whole: their tensors and their work, by one run on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shards.convert.timm_vision import check_structure, read_timm_tower
from shards.file_schema import describe, read_json
from shards.model_config import CONFIG_FILE
from shards.model_errors import ModelError
from shards.planning.devices import PASSES
from shards.tensor_shapes import BATCH_COUNTER
from shards.towers.from_transformers import one_side
from shards.towers.tower_kinds import VisionTower
from shards.towers.whole_timm import WholeCosts, WholeTimmTower, computed_buffers

PARTS_PER_LAYER = 7
"""Modules that compute in a layer of a transformer: two norms, four products, an activation."""


def read_timm_model(model: Any, folder: Path, describe_as_whole: Callable[[], WholeTimmTower]) -> VisionTower:
    """Describe a timm model by its layers, or as a whole if a cut can't keep its parts apart.

    Raises a ModelError if neither can be.
    """
    try:
        return read_timm_tower(model, folder)
    except ModelError as error:
        if type(model).__name__ == "NaFlexVit":  # as a whole it would take only squares
            raise
        try:
            return describe_as_whole()
        except ModelError as other:
            raise ModelError(f"{error}; nor can it be held whole: {other}") from None


def describe_saved(model: Any, folder: Path) -> WholeTimmTower:
    """Describe a model that timm loaded from a checkpoint; raises a ModelError unless that describes it fully."""
    tree, data = read_json(folder / CONFIG_FILE, ""), model.pretrained_cfg
    saved = tree.get("model_args")
    arguments = dict(saved) if isinstance(saved, dict) else {}
    size = arguments.get("img_size") or tuple(data["input_size"][1:])
    if data.get("global_pool") is not None:
        arguments.setdefault("global_pool", data["global_pool"])
    if data.get("fixed_input_size"):
        arguments.setdefault("img_size", size)
    side = one_side(size if isinstance(size, int) else tuple(size), "input_size", folder)
    tower = describe_whole(str(tree["architecture"]), arguments, None, side, folder)
    check_structure(model, tower, folder)
    return tower


def describe_whole(
    architecture: str, arguments: Mapping[str, Any], pool: str | None, image_size: int, where: Path
) -> WholeTimmTower:
    """Describe a model by timm's name and arguments; raises a ModelError if timm can't build or run it.

    `pool` takes the place of the model's own global pooling; `image_size` is the side of the images, px.
    """
    import torch

    fields: dict[str, Any] = {
        "architecture": architecture,
        "arguments": dict(arguments),
        "pool": pool,
        "image_size": image_size,
    }
    try:
        draft = WholeTimmTower(**fields, width=1, tensors={"-": ""}, costs=WholeCosts(flops=0, peak_values=1))
    except ValidationError as error:
        raise ModelError(f"{where}: {describe(error)}") from None
    with torch.device("meta"):
        module = draft.build().eval()
    state = {name: each for name, each in module.state_dict().items() if not name.endswith(BATCH_COUNTER)}
    if wrong := [name for name, each in state.items() if not each.is_floating_point()]:
        raise ModelError(
            f"{where}: {architecture}: the tensor {wrong[0]} holds whole numbers, which no model folder has"
        )
    width, costs = _run_once(module, image_size, f"{where}: {architecture}")
    linears = {f"{name}.weight" for name, each in module.named_modules() if isinstance(each, torch.nn.Linear)}
    tensors = {name: "x".join(map(str, each.shape)) for name, each in state.items()}
    tables = tuple(name for name, each in state.items() if each.ndim == 2 and name not in linears)
    tower = draft.model_copy(update={"width": width, "tensors": tensors, "tables": tables, "costs": costs})
    _check_buffers(tower, module, f"{where}: {architecture}")
    return tower


def _run_once(module: Any, image_size: int, where: str) -> tuple[int, WholeCosts]:
    """Run the model on one image without values: the size of its vector, and its work."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    moved: list[int] = []

    def count(part: Any, given: Any, made: Any) -> None:
        del part
        moved.append(sum(each.numel() for each in (*given, made) if isinstance(each, torch.Tensor)))

    for part in module.modules():
        if not isinstance(part, torch.nn.Identity | torch.nn.Dropout) and not any(part.children()):
            part.register_forward_hook(count)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            pooled = module(torch.empty((1, 3, image_size, image_size), device="meta"))
    except (AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{where}: timm can't run it on an image of {image_size} px ({reason})") from None
    if not isinstance(pooled, torch.Tensor) or pooled.ndim != 2:
        found = list(pooled.shape) if isinstance(pooled, torch.Tensor) else type(pooled).__name__
        raise ModelError(f"{where}: it makes {found} of one image, expected one vector; give a model that pools")
    steps = max(1, round(len(moved) / PARTS_PER_LAYER))
    return pooled.shape[1], WholeCosts(
        flops=counter.get_total_flops(),
        peak_values=max(moved, default=1) * 3 // 2,  # in addition to a part's input and output, a residual waits
        steps=steps,
        step_values=max(1, round(sum(moved) / PASSES / steps)),
    )


def _check_buffers(tower: WholeTimmTower, module: Any, where: str) -> None:
    """Raise a ModelError unless the tables that no weight file holds can be computed again, as a stage does."""
    import torch

    if not computed_buffers(module):
        return
    tower.fill_buffers(module.to_empty(device="cpu"), torch.device("cpu"))
    for (owner, names), (built, _) in zip(computed_buffers(module), computed_buffers(tower.build()), strict=True):
        for name in names:
            if not torch.equal(getattr(owner, name), getattr(built, name)):
                raise ModelError(
                    f"{where}: no weight file holds {name} of a {type(owner).__name__}, nor can timm renew it"
                )
