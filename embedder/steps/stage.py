"""Stage of the pipeline: a plain callable around a shard; Arrow table in, Arrow table out."""

import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from embedder.batch_schema import BESIDE_IMAGES, IMAGE_GRID, IMAGE_TEXT, TENSOR, VECTOR, Measurement
from embedder.compat.malloc import keep_freed_memory
from embedder.compat.operator_stats import sent_s
from embedder.errors import ConfigError
from embedder.steps.batch_size_tuner import BatchSize
from embedder.steps.calls_at_once import CallsAtOnce
from embedder.steps.compiled_shard import CompiledShard
from embedder.steps.device_speed import kept_speed
from embedder.steps.host_copies import DeviceTimes, OverlappedCopies
from embedder.steps.oom_backoff import OomBackoffEncoder
from embedder.steps.stage_contract import Stage
from embedder.steps.stage_spec import StageSpec
from embedder.steps.waits import Arrival, InputWaits
from embedder.storage.model_download import resolve_model
from embedder.store.journal.step_metrics import LOAD, measure, trace_column
from embedder.store.tables.arrow_tensors import pack_flat, pack_vectors, unpack
from shards.activations import Arranged, Batch, TowerState
from shards.compat import num_graphs
from shards.length_groups import CPU_GROUPS
from shards.model_config import load_model_config
from shards.profile import has_own_clock
from shards.reference import TwinTower, load_towers
from shards.shard import Shard, load_shard
from shards.towers.base import Tower
from shards.towers.tower_kinds import TextTower

INPUTS = {"vision": "pixels", "text": "token_ids"}
ACTIVATIONS = {"vision": "image_activation", "text": "text_activation"}
EMBEDDINGS = {"vision": "image_embedding", "text": "text_embedding"}

# What a CUDA context with torch's kernels may take, which torch's allocator limits don't count; unmeasured here.
CONTEXT_BYTES = 600 << 20


class TowerStage(Stage):
    """Holds one shard and applies its layers to each batch; thread-safe."""

    def __init__(self, spec: StageSpec, start: Measurement | None = None) -> None:
        """Prepare the stage; `start` is a measurement of the whole start, reported instead of only the loading."""
        self.spec, self.device, self._start = spec, spec.device, start

    def setup(self) -> None:
        """Load the shard; ConfigError if the device can't be used, shards.ModelError if weights are wrong."""
        spec = self.spec
        check_device(spec)
        self._copies = OverlappedCopies(spec.device) if _is_cuda(spec) else None
        most, is_tried = spec.calls_at_once, spec.gpu_share == 1
        self._calls = CallsAtOnce(most, is_tried=is_tried) if most else None
        limit_gpu_memory(spec)
        torch.set_num_threads(spec.num_threads)
        folder = resolve_model(spec.model, spec.shard)
        self.config = load_model_config(folder)
        speed = kept_speed(spec.device, spec.dtype) if _is_cuda(spec) else None
        with measure(f"{LOAD} {spec.index}") as load:
            self.shard = self._load(folder)
        load = self._start or load
        load.device_speed = asdict(speed) if speed is not None else {}
        self._compiled: CompiledShard | None = None
        # Vision blocks of decoders with eyes would be compiled for each size of images.
        if spec.compile and isinstance(self.shard, Shard) and not self.config.is_one_tower:
            self._compiled = CompiledShard(spec.index, self.shard)
        self._unreported_load = iter([load])
        self._batch_size = BatchSize(self._fitting_sizes() if _is_cuda(spec) else spec.batch_sizes)
        self._oom_backoff = OomBackoffEncoder(f"stage {spec.index}", self.encode)
        keep_freed_memory()

    def _load(self, folder: Path) -> Shard | TwinTower:
        return load_shard(folder, self.spec.shard, dtype=self.spec.dtype, device=self.spec.device)

    def _fitting_sizes(self) -> tuple[int, ...]:
        """Return batch sizes whose activations fit into this stage's share of its GPU, next to the weights."""
        total_bytes = torch.cuda.get_device_properties(self.spec.device).total_memory
        share_bytes = int(memory_fraction(self.spec, total_bytes) * total_bytes)
        room_bytes = share_bytes - torch.cuda.memory_allocated(self.spec.device)
        costs = dict(self.spec.group_costs)
        most = {side: costs.get(side, CPU_GROUPS).max_tokens for side in self.config.towers}
        sides = [(tower, most[side]) for side, tower in self.config.towers.items() if self._output_kind(side)]
        return sizes_that_fit(
            self.spec.batch_sizes, lambda rows: sum(bytes_at_once(*each, rows) for each in sides), room_bytes
        )

    def process(self, table: pa.Table) -> pa.Table:
        """Encode the table in batches of the tuned size; columns that no layer reads are not split."""
        if table.num_rows == 0:
            return table
        read = [self._input_column(table, tower) for tower in INPUTS if self._output_kind(tower)]
        read += _beside_images(table) if self._output_kind("vision") else []
        arrival = Arrival.of(table["trace"], sent_s()) if self._copies is not None else None
        batches = self._batches(table.select([*read, "trace"]))
        encoded = pa.concat_tables([part for batch in batches for part in self._oom_backoff(batch, arrival)])
        block = self._without_missing(table.drop_columns([*read, "trace"])).combine_chunks()
        for name, column in zip(encoded.column_names, encoded.columns, strict=True):
            # Ray passes on each chunk of each column separately; copying would cost more only for the tensors.
            block = block.append_column(name, column if column.type == TENSOR else column.combine_chunks())
        return block

    def _without_missing(self, block: pa.Table) -> pa.Table:
        """Replace the input of a tower that the model lacks by embeddings that are all null."""
        for tower, name in INPUTS.items():
            if tower not in self.config.towers and name in block.column_names:
                block = block.drop_columns([name]).append_column(EMBEDDINGS[tower], pa.nulls(block.num_rows, VECTOR))
        return block

    def _batches(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        for chunk in table.to_batches():
            start = 0
            while start < chunk.num_rows:
                batch = chunk.slice(start, self._batch_size.next_rows(chunk.num_rows))
                yield batch
                start += batch.num_rows

    def encode(self, batch: pa.RecordBatch, arrival: Arrival | None = None) -> pa.Table:
        """Replace the columns of this shard's towers; the others pass through unchanged."""
        turn = self._calls.call() if self._calls is not None else nullcontext()
        with turn, measure(f"stage {self.spec.index}", self._cpu_clock()) as measurement:
            columns = {tower: self._input_column(batch, tower) for tower in INPUTS}
            states = {tower: self._state(batch, tower, name) for tower, name in columns.items()}
            with torch.inference_mode():
                arranged = self.shard.arrange(Batch(states["vision"], states["text"]), dict(self.spec.group_costs))
                graphs_before, given_s = num_graphs(), time.time()
                encoded, times = self._compute(arranged)
            outputs = {"vision": self._column("vision", encoded.vision), "text": self._column("text", encoded.text)}
            measurement.num_rows = batch.num_rows
            measurement.note = self._compiled.take_problem() if self._compiled is not None else ""
            table = pa.table(batch)
            for tower, output in outputs.items():
                if output is not None:
                    table = table.drop_columns([columns[tower]]).append_column(*output)
                    measurement.bytes_out += output[1].nbytes
            if self._output_kind("vision") == "embedding":
                table = table.drop_columns(_beside_images(batch))
        has_compiled = num_graphs() != graphs_before
        if times is not None:
            _note_device(measurement, times.while_compiling() if has_compiled else times, arrival, given_s)
        if _is_cuda(self.spec):
            measurement.peak_gpu_bytes = torch.cuda.max_memory_allocated(self.spec.device)
        if not has_compiled:  # which isn't part of a batch's cost
            self._note_cost(measurement)
        trace = trace_column(batch.num_rows, measurement, table["trace"], next(self._unreported_load, None))
        return table.drop_columns(["trace"]).append_column("trace", trace)

    def _compute(self, arranged: Arranged) -> tuple[Batch, DeviceTimes | None]:
        """Run the shard; also return its device's seconds if calls may overlap."""
        run = self._compiled or self.shard.compute
        if self._copies is None:
            return run(arranged.move_to(lambda values: values.to(self.spec.device))), None
        return self._copies(run, arranged)

    def _cpu_clock(self) -> Callable[[], float]:
        """Return a clock of a batch's CPU seconds: only this thread's if torch uses no other."""
        is_alone = torch.get_num_threads() == 1 or self._copies is not None
        return time.thread_time if is_alone else time.process_time

    def _note_cost(self, measurement: Measurement) -> None:
        """Record a batch's cost; on one thread by its own clock, which other processes hardly influence."""
        if torch.get_num_threads() == self.spec.num_threads:
            is_alone = has_own_clock(self.spec.device, self.spec.num_threads)
            self._batch_size.note(measurement.num_rows, measurement.cpu_s if is_alone else measurement.wall_s)
        if self._calls is not None and measurement.num_rows == self._batch_size.chosen:
            self._calls.note(measurement)

    def _input_column(self, batch: pa.RecordBatch, tower: str) -> str:
        """Return the column that holds this tower's state, before or after its first layers."""
        return INPUTS[tower] if INPUTS[tower] in batch.schema.names else ACTIVATIONS[tower]

    def _state(self, batch: pa.RecordBatch, tower: str, column: str) -> TowerState | None:
        """Return the tower's packed tensor, a view of the column's buffer; None if this shard lacks its layers."""
        if self._output_kind(tower) is None:
            return None
        flat, sizes_bytes = unpack(batch.column(column))
        dtype, shape = self._layout(tower, column)
        item_bytes = dtype.itemsize * int(np.prod(shape))
        with warnings.catch_warnings():
            # The buffer is read-only shared memory, and nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            values = torch.from_numpy(flat).view(dtype).reshape(-1, *shape)
        columns = _beside_images(batch) if tower == "vision" else []
        grids = self._grids(batch) if IMAGE_GRID.name in columns else None
        text = self._image_text(batch) if IMAGE_TEXT.name in columns else None
        return TowerState(values, torch.from_numpy(sizes_bytes // item_bytes), grids, text)

    def _image_text(self, batch: pa.RecordBatch) -> TowerState:
        """Return the token ids of the text that each picture is embedded with."""
        flat, sizes_bytes = unpack(batch.column(IMAGE_TEXT.name))
        ids = flat.view(np.int32)
        return TowerState(torch.from_numpy(ids.copy()), torch.from_numpy(sizes_bytes // ids.itemsize))

    def _grids(self, batch: pa.RecordBatch) -> torch.Tensor:
        """Return frames, patch rows and patch columns of each row, int32 (B, 3); zeros for a row without an image."""
        flat, sizes_bytes = unpack(batch.column(IMAGE_GRID.name))
        grids = np.zeros((batch.num_rows, 3), np.int32)
        grids[sizes_bytes > 0] = flat.view(np.int32).reshape(-1, 3)
        return torch.from_numpy(grids)

    def _layout(self, tower: str, column: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of one element of a row: a frame (H, W, 3) or (L, D), a token () or (D,)."""
        described = self.config.towers[tower]
        if column == INPUTS[tower]:
            return described.input_layout()
        return self.shard.dtype, described.activation_shape(self.spec.shard.layers_of(tower).start)

    def _output_kind(self, tower: str) -> str | None:
        return self.shard.output_of(tower)

    def _column(self, tower: str, state: TowerState | None) -> tuple[str, pa.Array] | None:
        """Return name and content of the column that replaces the tower's input."""
        kind = self._output_kind(tower)
        if kind is None or state is None:
            return None
        lengths = state.lengths.numpy()
        if kind == "embedding":
            return EMBEDDINGS[tower], pack_vectors(state.values.cpu().numpy(), lengths > 0)
        flat = state.values.cpu().contiguous().view(torch.uint8).numpy()
        item_bytes = state.values.element_size() * int(np.prod(state.values.shape[1:]))
        return ACTIVATIONS[tower], pack_flat(flat, lengths * item_bytes)


def _note_device(measurement: Measurement, times: DeviceTimes, arrival: Arrival | None, given_s: float) -> None:
    """Replace a call's seconds by the device's, as calls overlap, and add what it waited for before them.

    Its input was given to it at the Unix time `given_s`; without an arrival all of that wait is the step's before.
    """
    measurement.started_s += measurement.wall_s - times.computed_s
    measurement.wall_s, measurement.cpu_s = times.computed_s, measurement.cpu_s + times.launching_cpu_s
    waits = InputWaits(times.waited_input_s) if arrival is None else arrival.split(times.waited_input_s, given_s)
    measurement.waited_input_s, measurement.waited_driver_s = waits.step_s, waits.driver_s
    measurement.waited_store_s, measurement.waited_unpack_s = waits.store_s, waits.unpack_s
    measurement.waited_copy_s, measurement.waited_launch_s = times.waited_copy_s, times.waited_launch_s


def _beside_images(batch: pa.RecordBatch | pa.Table) -> list[str]:
    """List the columns of a batch that accompany its images."""
    return [name for name in BESIDE_IMAGES if name in batch.schema.names]


def bytes_at_once(tower: Tower, most_tokens: int, num_rows: int) -> int:
    """Return the most bytes a tower holds at once for a batch: its largest layer in float32, and the input.

    Captions are computed in groups of `most_tokens`, one after the other.
    """
    num_tokens, at_once = 0, num_rows
    if isinstance(tower, TextTower):
        num_tokens, at_once = tower.max_tokens, min(num_rows, max(1, most_tokens // tower.max_tokens))
    layer_bytes, input_bytes = 4 * tower.workspace_values(num_tokens), tower.input_bytes(num_tokens)
    return tower.inputs_per_row * (at_once * layer_bytes + num_rows * input_bytes)


def sizes_that_fit(sizes: Sequence[int], bytes_of: Callable[[int], int], room_bytes: int) -> tuple[int, ...]:
    """Drop batch sizes that need too much memory; the smallest one always stays.

    `sizes` has the default first. `bytes_of` is what so many rows hold at once; half of `room_bytes` is left for data
    in flight.
    """
    return tuple(size for size in sizes if 2 * bytes_of(size) <= room_bytes) or (min(sizes),)


def check_device(spec: StageSpec) -> None:
    """Raise a ConfigError if torch can't use the GPU: no driver, too old a driver, or a torch without CUDA."""
    problem = cuda_problem() if _is_cuda(spec) else None
    if problem is not None:
        raise ConfigError(
            f'stage {spec.index} on node {platform.node()}: device "cuda", and torch {torch.__version__} can use no '
            f"GPU there ({problem}); a stage that reserves GPUs of Ray computes on one; install NVIDIA's driver there, "
            'and a torch built for it, or write device = "cpu"'
        )


def cuda_problem() -> str | None:
    """Return torch's reason why it can't use a GPU in this process; None if it can."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        return str(error).partition("\n")[0].partition(". ")[0]
    return None


def limit_gpu_memory(spec: StageSpec) -> None:
    """Limit a stage that shares a GPU to its share; a ConfigError if that holds no more than the CUDA context."""
    if _is_cuda(spec) and spec.gpu_share < 1:
        fraction = memory_fraction(spec, torch.cuda.get_device_properties(spec.device).total_memory)
        torch.cuda.set_per_process_memory_fraction(fraction)


def memory_fraction(spec: StageSpec, total_bytes: int) -> float:
    """Return the part of a GPU's memory for tensors: the stage's share without the CUDA context.

    Raises a ConfigError if nothing is left of it.
    """
    fraction = spec.gpu_share - CONTEXT_BYTES / total_bytes
    if fraction <= 0:
        raise ConfigError(
            f"stage {spec.index} on node {platform.node()}: {spec.gpu_share:g} of a GPU of "
            f"{total_bytes / (1 << 30):.1f} GiB holds no more than the CUDA context ({CONTEXT_BYTES >> 20} MiB); let "
            "fewer stages share a GPU (num_gpus of [[stage]], num_stages, replicas)"
        )
    return fraction


def _is_cuda(spec: StageSpec) -> bool:
    return torch.device(spec.device).type == "cuda"


class UnsplitStage(TowerStage):
    """Whole model in float32, run by the libraries' own forward functions: the reference for verifying stages."""

    def _load(self, folder: Path) -> TwinTower:
        return load_towers(folder, device=self.spec.device)
