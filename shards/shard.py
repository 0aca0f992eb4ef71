"""Shard: a contiguous range of layers of both towers, loaded with only its own weights.

Legend: `F` frames or captions, `L` tokens of one of them, `D` width, `E` embedding size.
"""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shards.activations import Arranged, Arrangement, Batch, Output, TowerState
from shards.heads import build_head, unit_rows
from shards.layouts import Layout, Normalise
from shards.length_groups import CPU_GROUPS, GroupCosts
from shards.loading import activation_dtype, load_tensors
from shards.model_config import ModelConfig, load_model_config
from shards.quantised import make_linears_int8
from shards.shard_specs import ShardSpec, check_spec
from shards.tensor_shapes import BATCH_COUNTER, SCALE_SUFFIX, held_dtype, model_shapes, shard_shapes
from shards.towers.base import Tower
from shards.towers.tower_kinds import VisionTower

NO_COSTS: Mapping[str, GroupCosts] = {}
_LISTS = (nn.ModuleList, nn.Sequential)


def load_shard(folder: str | Path, spec: ShardSpec, *, dtype: str = "float32", device: str = "cpu") -> "Shard":
    """Build a shard on the meta device, then load the tensors that it owns.

    The heads and a conv stem stay in float32, whatever `dtype`. With "int8", the weights of linear layers are int8, and
    everything else, activations included, is float32. A spec of one whole tower encodes queries. Raises a ModelError if
    the folder or the spec doesn't fit, or a tensor is missing, unknown or of another shape.
    """
    config = load_model_config(folder)
    check_spec(spec, config)
    torch_device = torch.device(device)
    with torch.device("meta"):
        shard = Shard(config, spec, activation_dtype(dtype), is_int8=dtype == "int8")
    shard.load_state_dict(load_tensors(Path(folder), config, spec, dtype, torch_device), strict=True, assign=True)
    return shard.finish(torch_device)


class Shard(nn.Module):
    """Modules of one shard, under the names that their tensors have in the model folder.

    A shard imports only the libraries of the towers that it has layers of.
    """

    # None if the shard doesn't own it; precise types would import libraries that this shard may not need.
    vision: Any
    vision_head: Any
    normalise: Normalise | None
    text: Any
    text_head: Any

    def __init__(self, config: ModelConfig, spec: ShardSpec, dtype: torch.dtype, *, is_int8: bool = False) -> None:
        """Build the modules on torch's current default device; `dtype` is that of activations."""
        super().__init__()
        self.config, self.spec, self.dtype = config, spec, dtype
        self.device = torch.device("meta")
        self.vision = self.vision_head = self.normalise = self.text = self.text_head = None
        own = shard_shapes(config, spec)
        others = model_shapes(config).keys() - own.keys()
        for side, tower in config.towers.items():
            if len(spec.layers_of(side)) or (side == "text" and len(config.shared_layers(spec.vision))):
                self._build(side, tower, others)
        if is_int8:
            held = {name: held_dtype(config, name, shape, "int8") for name, shape in own.items()}
            make_linears_int8(self, {name for name, dtype in held.items() if dtype == "int8"})
        if config.vision is not None and len(config.shared_layers(spec.vision)):
            config.vision.join(self.vision, self.text)

    def _build(self, side: str, tower: Tower, others: Collection[str]) -> None:
        layers = self.spec.layers_of(side)
        module = tower.build()
        _remove_tensors(module, others, f"{side}.", f"{side}.{tower.layer_prefix}")
        setattr(self, side, module)
        if layers.holds_front() and isinstance(tower, VisionTower):
            self.normalise = Normalise(self.config.preprocess)
            tower.set_dtype(module, self.dtype)
        if self.output_of(side) == "embedding":
            setattr(self, f"{side}_head", build_head(self.config, side))

    def finish(self, device: torch.device) -> "Shard":
        """Move buffers that no weight file holds to the device, and freeze the weights."""
        self.device = device
        if self.normalise is not None:
            self.normalise.to(device)
        for side, tower in self.config.towers.items():
            if (module := getattr(self, side)) is not None:
                tower.fill_buffers(module, device)
        return self.eval().requires_grad_(False)

    def output_of(self, side: str) -> Output | None:
        """Return the kind of output on one side; None if the side passes through."""
        layers = self.spec.layers_of(side)
        if not len(layers):
            return None
        return "embedding" if layers.holds_head(self.config.towers[side].num_layers) else "activation"

    @property
    def num_parameters(self) -> int:
        """Number of values of all weights; scales of int8 weights don't count."""
        return sum(
            tensor.numel() for name, tensor in self._weights().items() if not name.endswith(f".weight{SCALE_SUFFIX}")
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self._weights().values())

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return parameters and BatchNorm's running statistics, without its batch counter, which no file holds."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.endswith(BATCH_COUNTER)}

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Batch:
        """Run both sides' layers; one without layers passes through. Raises a ModelError for unfit input."""
        return self.compute(self.arrange(batch).move_to(lambda values: values.to(self.device)))

    def arrange(self, batch: Batch, costs: Mapping[str, GroupCosts] = NO_COSTS) -> Arranged:
        """Check a batch on the CPU, and decide there how it is computed.

        `costs` governs the grouping of rows, by side; a missing side uses a CPU's. Raises a ModelError if pixels or
        token ids don't fit the model.
        """
        states = {"vision": batch.vision, "text": batch.text}
        arrangements = {}
        for side, state in states.items():
            output = self.output_of(side)
            if state is None or output is None or not state.lengths.any():
                continue
            tower = self.config.towers[side]
            if self.spec.layers_of(side).holds_front():
                tower.check_input(state.values, state.lengths[state.lengths > 0])
            arrangements[side] = Arrangement.of(
                state, tower, output, self.spec.layers_of(side), costs.get(side, CPU_GROUPS)
            )
        return Arranged(batch, arrangements)

    @torch.inference_mode()
    def compute(self, arranged: Arranged) -> Batch:
        """Run the layers on an arranged batch, on the shard's device; nothing here waits for the device."""
        return Batch(self._run("vision", arranged), self._run("text", arranged))

    def _run(self, side: str, arranged: Arranged) -> TowerState | None:
        state: TowerState | None = getattr(arranged.batch, side)
        if state is None or self.output_of(side) is None:
            return state
        if side not in arranged.arrangements:
            return self._empty(side, state)
        return arranged.arrangements[side].run(state, partial(self._run_group, side))

    def _run_group(self, side: str, values: torch.Tensor, layout: Layout, own: TowerState) -> torch.Tensor:
        """Run the layers on rows that share one rectangle, and that all have this side."""
        del own
        tower, module, layers = self.config.towers[side], getattr(self, side), self.spec.layers_of(side)
        if layers.holds_front():
            x_FLD = tower.front(module, self.front_input(side, values), layout)
        else:
            x_FLD = layout.pad(values)
        x_FLD = tower.run(module, layers, x_FLD, layout)
        head = getattr(self, f"{side}_head")
        if head is None:
            return layout.pack(x_FLD)
        return unit_rows(head(tower.pool_tokens(module, x_FLD, layout)), layout.means)

    def front_input(self, side: str, values: torch.Tensor) -> torch.Tensor:
        """Return what a tower's front takes, on the shard's device: normalised pixels, or token ids unchanged."""
        tower = self.config.towers[side]
        if isinstance(tower, VisionTower) and self.normalise is not None:
            pixels: torch.Tensor = self.normalise(values, tower.pixel_dtype(self.dtype))
            return pixels
        return values.to(self.device)

    def _empty(self, side: str, state: TowerState) -> TowerState:
        """Return the state of a batch in which no row has this side."""
        if self.output_of(side) == "embedding":
            values = torch.empty((0, self.config.vector_dim), device=self.device)
        else:
            shape = self.config.towers[side].activation_shape(self.spec.layers_of(side).stop)
            values = torch.empty((0, *shape), dtype=self.dtype, device=self.device)
        return TowerState(values, state.lengths)


def _remove_tensors(module: nn.Module, names: Collection[str], prefix: str, layer_prefix: str) -> None:
    """Remove the parts of a module whose tensors all have these names; the others keep their names.

    `prefix` is what the names of the module's own tensors begin with, `layer_prefix` those of layers. What layers lie
    in stays.
    """
    for name in [each for each in module.state_dict() if prefix + each in names and "." not in each]:
        setattr(module, name, None)
    for name, part in list(module.named_children()):
        inner = f"{prefix}{name}."
        held = [inner + each for each in part.state_dict() if not each.endswith(BATCH_COUNTER)]
        holds_layers = isinstance(part, _LISTS) or layer_prefix.startswith(inner)
        if holds_layers or not all(each in names for each in held):
            _remove_tensors(part, names, inner, layer_prefix)
        elif held:
            setattr(module, name, nn.Identity() if isinstance(module, _LISTS) else None)
