"""Export of a tower to ONNX, so that queries are encoded without torch: pooling, projection and norm included.

The caller pads inputs to a rectangle; the graph masks the padding. Weights lie in a separate file next to the graph,
which ONNX Runtime maps into memory instead of reading it.

`python -m shards.onnx_export MODEL_FOLDER OUT_FOLDER` exports in a separate process; its last output line is a JSON
list of the reasons why towers can't be exported.

Legend: `R` captions, `T` tokens of the longest one, `F` images, `N` patches of one image, `P` values of one patch, `E`
embedding size.
"""

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shards.compat import silence_onnx_graphs
from shards.loading import read_sigmoid
from shards.model_config import SIGMOID_FILE, ModelConfig, load_model_config
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.shard import Shard, load_shard
from shards.shard_specs import one_tower
from shards.towers.naflex import NaFlexTower

OPSET = 18
MAX_BYTES = 2**31 - 1
"""Most bytes of a tower's weights: the exporter's graph is one protocol buffer, which can't be larger."""
INPUTS = {"text": ("ids", "lengths"), "vision": ("pixels",), "patches": ("pixels", "places")}
OUTPUT = "vectors"


def export_towers(folder: Path, out: Path) -> list[str]:
    """Write a model's `text.onnx` and `vision.onnx`, and `sigmoid.json` (scale and bias of logits, or null).

    Returns the reason for each tower that can't be exported. Raises a ModelError if it is no model folder.
    """
    failures = []
    for side in load_model_config(folder).towers:
        try:
            export_tower(folder, side, out)
        except ExportError as error:
            failures.append(str(error))
    (out / SIGMOID_FILE).write_text(json.dumps(read_sigmoid(folder)), encoding="utf-8")
    return failures


class ExportError(ModelError):
    """A tower can't be exported; torch runs it instead."""


def export_tower(folder: Path, side: str, out: Path) -> None:
    """Write one tower in float32, as `SIDE.onnx` and `SIDE.onnx.data`; raises a ModelError or an ExportError."""
    config = load_model_config(folder)
    if config.is_one_tower:
        raise ExportError(
            f"model {config.name!r}: its {side} tower ({config.towers[side].label}) shares layers with the other, and "
            "such are not exported; torch encodes its queries"
        )
    shard = load_shard(folder, one_tower(side, LayerRange(0, config.num_layers[side])))
    if shard.weight_bytes > MAX_BYTES:
        raise ExportError(
            f"model {config.name!r}: its {side} tower has {shard.weight_bytes / 2**30:.1f} GiB of weights, and those "
            "of 2 GiB or more are not exported; torch encodes its queries"
        )
    module, inputs, names, axes = _text(shard, config) if side == "text" else _vision(shard, config)
    with tempfile.TemporaryDirectory(dir=out) as stage:
        whole, reasons = Path(stage) / "whole.onnx", []
        # Tracing takes a tenth of the other exporter's time and makes a smaller graph; the other knows more operators.
        for export in (_trace, _capture):
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about fixed shapes and the tracer's age
                    export(module.eval(), inputs, names, axes, whole)
            except Exception as error:  # noqa: BLE001  # exporters fail in many ways, and torch remains
                reasons.append(" ".join(str(error).split())[:150])
            else:
                _save(whole, out / f"{side}.onnx")
                return
    raise ExportError(
        f"model {config.name!r}: its {side} tower ({config.towers[side].label}) can't be exported "
        f"({'; '.join(reasons)}); torch encodes its queries"
    )


def _trace(module: nn.Module, inputs: Any, names: Any, axes: Any, path: Path) -> None:
    silence_onnx_graphs()
    torch.onnx.export(
        module,
        inputs,
        str(path),
        input_names=list(names),
        output_names=[OUTPUT],
        dynamic_axes=axes,
        opset_version=OPSET,
        dynamo=False,
    )


def _capture(module: nn.Module, inputs: Any, names: Any, axes: Any, path: Path) -> None:
    torch.onnx.export(
        module,
        inputs,
        str(path),
        input_names=list(names),
        output_names=[OUTPUT],
        dynamic_shapes=tuple(dict.fromkeys(axes[name], torch.export.Dim.DYNAMIC) for name in names),
        opset_version=OPSET,
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def _save(whole: Path, path: Path) -> None:
    """Rewrite the graph with its weights in a separate file next to it."""
    import onnx

    data = path.with_name(f"{path.name}.data")
    data.unlink(missing_ok=True)  # onnx would append
    onnx.save_model(
        onnx.load(whole), path, save_as_external_data=True, all_tensors_to_one_file=True, location=data.name
    )


class _Captions:
    """Layout of captions that are already padded; the counterpart of `shards.layouts.Padding` in a graph."""

    def __init__(self, lengths: torch.Tensor, num_tokens: Any) -> None:
        self.captions, self.num_tokens = self, lengths
        self.is_token = torch.arange(num_tokens)[None] < lengths[:, None]
        self.mask = self.is_token[:, None, None, :]

    def pad(self, values: torch.Tensor, fill: int = 0) -> torch.Tensor:
        del fill
        return values


class _Patches:
    """Layout of images of one grid, without padding; the counterpart of `shards.layouts.PatchGrids`."""

    def __init__(self, positions: Callable[[], torch.Tensor]) -> None:
        self.patches, self.is_patch = self, None
        self._positions = positions

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def add_positions(self, x_FND: torch.Tensor, positions: object) -> None:
        del positions
        x_FND.add_(self._positions())

    def added_mask(self, x_FLD: torch.Tensor) -> None:
        del x_FLD


class _WholeTower(nn.Module):
    """A tower from its inputs to vectors of length 1."""

    def __init__(self, shard: Shard, side: str) -> None:
        super().__init__()
        self.shard, self.side = shard, side

    def embed(self, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Embed inputs, to float32 (R or F, E)."""
        shard, side = self.shard, self.side
        tower, module = shard.config.towers[side], getattr(shard, side)
        x_FLD = tower.front(module, values, layout)
        x_FLD = tower.run(module, shard.spec.layers_of(side), x_FLD, layout)
        head: Callable[[torch.Tensor], torch.Tensor] = getattr(shard, f"{side}_head")
        return nn.functional.normalize(head(tower.pool_tokens(module, x_FLD, layout)).float(), dim=-1)


class _Text(_WholeTower):
    def forward(self, ids_RT: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.embed(ids_RT, _Captions(lengths, ids_RT.shape[1]))


class _Vision(_WholeTower):
    def forward(self, pixels_FHWC: torch.Tensor) -> torch.Tensor:
        return self.embed(self.shard.front_input(self.side, pixels_FHWC), None)


class _PatchVision(_WholeTower):
    def __init__(self, shard: Shard, positions: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(shard, "vision")
        self._positions = positions

    def forward(self, pixels_FNP: torch.Tensor, places_N2: torch.Tensor) -> torch.Tensor:
        normalised = self.shard.front_input(self.side, pixels_FNP.flatten(0, 1))
        return self.embed(normalised.view(pixels_FNP.shape), _Patches(partial(self._positions, places_N2)))


Export = tuple[_WholeTower, tuple[torch.Tensor, ...], tuple[str, ...], dict[str, dict[int, str]]]


def _text(shard: Shard, config: ModelConfig) -> Export:
    """Return module, example, names of the inputs and their free axes; captions of fixed length keep it."""
    tower = config.required_text
    num_tokens = config.preprocess.max_caption_tokens
    ids, lengths = torch.ones((3, num_tokens), dtype=torch.int32), torch.tensor([num_tokens, num_tokens - 1, 1])
    tokens = {} if tower.has_fixed_length else {1: "tokens"}
    axes = {"ids": {0: "captions"} | tokens, "lengths": {0: "captions"}}
    return _Text(shard, "text"), (ids, lengths), INPUTS["text"], axes


def _vision(shard: Shard, config: ModelConfig) -> Export:
    tower = config.required_vision
    if not isinstance(tower, NaFlexTower):
        tower.prepare_export(shard.vision)
        pixels = torch.zeros((2, tower.side_px, tower.side_px, 3), dtype=torch.uint8)
        return _Vision(shard, "vision"), (pixels,), INPUTS["vision"], {"pixels": {0: "images"}}
    places = torch.from_numpy(tower.filter_places(2, 3))
    pixels = torch.zeros((2, len(places), tower.patch_values), dtype=torch.uint8)
    axes = {"pixels": {0: "images", 1: "patches"}, "places": {0: "patches"}}
    return _PatchVision(shard, tower.filtered_positions(shard.vision)), (pixels, places), INPUTS["patches"], axes


def main() -> None:
    """Export a model's towers, as described in the module's docstring."""
    parser = argparse.ArgumentParser(description="Export a model's towers to ONNX.")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    try:
        print(json.dumps(export_towers(arguments.model, arguments.out)))
    except ModelError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
