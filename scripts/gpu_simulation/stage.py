"""A stage on a simulated GPU, and rows for it: no more than `embedder` had at 65d4dd6, of which it is run, too."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from embedder.batch_schema import TRACE
from embedder.steps.stage import INPUTS, TowerStage
from embedder.steps.stage_spec import StageSpec
from embedder.store.arrow_tensors import pack_flat
from gpu_simulation.device import SimulatedCopies, SimulatedGpu, on_device
from gpu_simulation.models import shard_of_shapes
from shards.activations import TowerState
from shards.config import ModelConfig

SHORTEST, LONGEST = 9, 22
"""Tokens of captions, as those of the measured ones were."""


class SimulatedStage(TowerStage):
    """Stage on a simulated device."""

    def __init__(self, spec: StageSpec, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        super().__init__(spec)

    def setup(self) -> None:
        """Load the shapes."""
        super().setup()
        self._copies = SimulatedCopies(self._gpu)

    def _load(self, folder: Path) -> Any:
        return shard_of_shapes(self.config, self.spec.shard, self.spec.dtype)

    def encode(self, batch: pa.RecordBatch) -> pa.Table:
        """Run a batch."""
        self._gpu.spend(self._gpu.figures.call_s)
        return super().encode(batch)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Run a block."""
        with on_device(self._gpu), self._gpu.call():
            return super().__call__(table)


def caption_lengths(config: ModelConfig, num_rows: int) -> torch.Tensor:
    """Lengths of captions, int64; all as long where the tower's tokeniser pads them."""
    tower = config.required_text
    if tower.has_fixed_length:
        return torch.full((num_rows,), tower.max_tokens)
    return torch.randint(SHORTEST, LONGEST, (num_rows,), generator=torch.Generator().manual_seed(1))


def sample_states(config: ModelConfig, num_rows: int, device: str = "cpu") -> dict[str, TowerState]:
    """Inputs of an image and a caption for each row, by side; all of them are zeros."""
    lengths = {"vision": torch.ones(num_rows, dtype=torch.int64), "text": caption_lengths(config, num_rows)}
    states = {}
    for side, tower in config.towers.items():
        dtype, shape = tower.input_layout()
        values = torch.zeros((int(lengths[side].sum()), *shape), dtype=dtype, device=device)
        states[side] = TowerState(values, lengths[side])
    return states


def rows_of(states: dict[str, TowerState], num_rows: int) -> pa.Table:
    """Rows as decoding hands them on; a side without a state has nothing."""
    columns: dict[str, pa.Array] = {"item_id": pa.array([str(row) for row in range(num_rows)])}
    for side, name in INPUTS.items():
        state = states.get(side) or TowerState(torch.empty(0), torch.zeros(num_rows, dtype=torch.int64))
        sizes = state.lengths * (state.values.nbytes // max(1, len(state.values)))
        columns[name] = pack_flat(state.values.numpy(), sizes.numpy())
    return pa.table(columns | {"trace": pa.nulls(num_rows, TRACE)})
