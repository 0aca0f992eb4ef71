"""A simulated GPU on which the own code of stages runs, only on shapes, in slow motion.

Tensors of the device are the meta tensors of torch. Each operation on them costs its launch, for which the interpreter
is busy, and puts a kernel on the timeline of the current stream, which no thread of this process spends. Whoever waits
for the device sleeps until the timeline is through. All times are stretched by one factor, so that what the simulation
itself takes fits in; figures are given in the seconds of the device. A shard's layers run for its first batch, and what
they launched is launched again for later ones. All stages of a run share the device, with a run's calls at once.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from math import prod
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import torch
from published_models import PUBLISHED
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from embedder.batch_schema import TRACE
from embedder.placement.device_settings import group_costs
from embedder.steps.host_copies import OverlappedCopies
from embedder.steps.stage import INPUTS, TowerStage
from embedder.steps.stage_spec import StageSpec
from embedder.store.tables.arrow_tensors import pack_flat
from shards.activations import Batch, TowerState
from shards.model_config import ModelConfig
from shards.plan import plan_shards
from shards.planning.devices import GPU_CALLS
from shards.shard import Shard
from shards.shard_specs import ShardSpec, whole_model
from shards.tensor_shapes import held_dtype

_NO_KERNEL = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "detach", "dropout")}
_MAYBE_VIEWS = {"aten::reshape", "aten::contiguous", "aten::flatten", "aten::to"}
_PRODUCTS = {"aten::mm", "aten::bmm", "aten::linear", "aten::matmul"}
_CONVOLUTIONS = {"aten::convolution", "aten::conv2d"}


@dataclass(frozen=True)
class DeviceFigures:
    """Figures of a device."""

    name: str  # of the device
    launch_s: float  # seconds of the interpreter for an operation with a kernel: the module around it, dispatch, launch
    view_s: float  # the same without a kernel
    product_flops: float  # operations per second of matrix products, reached in a transformer
    memory_bytes_per_s: float  # bandwidth of the device's own memory
    kernel_s: float  # seconds of the shortest kernel
    link_bytes_per_s: float  # bandwidth of copies from and to pinned host memory
    host_bytes_per_s: float  # bandwidth of a copy in the host's memory
    attention_share: float  # rate of fused attention, of that of matrix products
    host_s: float  # seconds of the interpreter for an operation on the host's small tensors
    call_s: float  # seconds of the host for a stage's batch besides launching and copies
    wait_s: float  # seconds of the host for a wait that is over at once
    contended: float  # how many times longer a launch takes while two threads that launch have calls of a stage


CAUSES = ("input", "copies", "launches")  # what a device waits for

MAX_AHEAD_S = 0.005
"""How far a thread's simulated time may be ahead of the clock before it sleeps: many launches are one sleep."""


class Event:
    """Place in a stream's work."""

    def __init__(self, gpu: "SimulatedGpu") -> None:
        self._gpu, self.at_s = gpu, 0.0

    def record(self, stream: "Stream") -> None:
        self.at_s = max(stream.free_at, self._gpu.now_s)

    def synchronize(self) -> None:
        self._gpu.wait_until(self.at_s)

    def elapsed_time(self, later: "Event") -> float:
        return 1000 * (later.at_s - self.at_s) / self._gpu.slowness


class Stream:
    """Stream of a simulated device: when the last of its work is over, on this process's clock."""

    def __init__(self, gpu: "SimulatedGpu") -> None:
        self._gpu, self.free_at = gpu, 0.0

    def put(self, seconds: float, now_s: float) -> None:
        self.free_at = max(self.free_at, now_s) + seconds

    def wait_event(self, event: Event) -> None:
        """Let the work that follows begin when the event has come."""
        self.free_at = max(self.free_at, event.at_s)


class SimulatedGpu:
    """Device, with what `embedder.steps.host_copies` takes of `torch.cuda`."""

    def __init__(self, figures: DeviceFigures, slowness: float) -> None:
        self.figures, self.slowness = figures, slowness
        self.last_ended: Event | None = None  # of the last batch of any stage
        self.computed_s, self.waited_s = 0.0, dict.fromkeys(CAUSES, 0.0)  # so far, in the device's seconds
        self.lock = threading.Lock()
        self._passes: dict[Any, tuple[Batch, list[float]]] = {}
        self._default, self._current = Stream(self), threading.local()
        self._calling, self._launchers = set[int](), set[int]()

    def Event(self, *, enable_timing: bool = False, blocking: bool = False) -> Event:
        del enable_timing, blocking
        return Event(self)

    def Stream(self, device: Any = None) -> Stream:
        del device
        return Stream(self)

    def current_stream(self, device: Any = None) -> Stream:
        del device
        return getattr(self._current, "stream", self._default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        yield
        self._current.stream = before

    def synchronize(self) -> None:
        self.wait_until(self.current_stream().free_at)

    @property
    def now_s(self) -> float:
        """This thread's time: the clock's, or what its launches have taken, where that is later."""
        return max(getattr(self._current, "now_s", 0.0), time.perf_counter() - MAX_AHEAD_S)

    def spend(self, seconds: float) -> None:
        """Take the interpreter's time of this thread, in the device's seconds."""
        self._current.now_s = now_s = self.now_s + seconds * self.slowness
        if (ahead_s := now_s - time.perf_counter()) > MAX_AHEAD_S:
            time.sleep(ahead_s)

    def wait_until(self, at_s: float) -> None:
        """Sleep until some time, at least for as long as a wait takes the host."""
        self._current.now_s = now_s = max(self.now_s + self.figures.wait_s * self.slowness, at_s)
        time.sleep(max(0.0, now_s - time.perf_counter()))

    @contextmanager
    def call(self) -> Iterator[None]:
        """Block in which this thread has a call of a stage."""
        self._calling.add(threading.get_ident())
        yield
        self._calling.discard(threading.get_ident())

    def launch(self, kernel_s: float) -> None:
        """Take the interpreter's time of an operation, and put its kernel on the stream."""
        seconds = self.figures.view_s
        getattr(self._current, "kernels", []).append(kernel_s)
        if kernel_s:
            with self.lock:
                self.current_stream().put(kernel_s * self.slowness, self.now_s)
                self.computed_s += kernel_s
            seconds = self.figures.launch_s
            self._launchers.add(threading.get_ident())
        is_contended = len(self._calling & self._launchers) > 1
        self.spend(seconds * (self.figures.contended if is_contended else 1.0))

    def compute(self, run: Any, arranged: Any) -> Batch:
        """Launch a shard's layers; of its batches, which are all alike, only the first is computed by torch."""
        if run in self._passes:
            result, kernels = self._passes[run]
            list(map(self.launch, kernels))
            return result
        self._current.kernels = kernels = []
        self._passes[run] = run(arranged), kernels
        del self._current.kernels
        return self._passes[run][0]

    def idle_shares(self, computed_s: float, waited_s: dict[str, float], window_s: float) -> dict[str, float]:
        """Shares of a window in which the device computed nothing, by cause; the first arguments are at its start.

        What no batch waited for, before its first kernel, are the gaps between kernels: their launches.
        """
        idle_s = max(0.0, window_s - (self.computed_s - computed_s))
        waits = {cause: self.waited_s[cause] - waited_s[cause] for cause in ("input", "copies")}
        excess = max(1.0, sum(waits.values()) / idle_s) if idle_s else 1.0  # waits of batches at the window's ends
        waits = {cause: seconds / excess for cause, seconds in waits.items()} if idle_s else dict.fromkeys(waits, 0.0)
        waits["launches"] = idle_s - sum(waits.values())
        return {cause: waits[cause] / window_s for cause in CAUSES}

    def copy(self, num_bytes: int) -> None:
        self.current_stream().put(num_bytes / self.figures.link_bytes_per_s * self.slowness, self.now_s)

    def kernel_s(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> float:
        """Seconds of a kernel, by its operations and the bytes that it reads and writes."""
        num_bytes = sum(each.nbytes for each in (*inputs, *outputs))
        seconds = max(self.figures.kernel_s, num_bytes / self.figures.memory_bytes_per_s)
        if name in _PRODUCTS | _CONVOLUTIONS and outputs:
            rate = self.figures.product_flops if outputs[0].element_size() == 2 else self.figures.product_flops / 10
            depth = prod(inputs[1].shape[1:]) if name in _CONVOLUTIONS else inputs[0].shape[-1]
            seconds = max(seconds, 2.0 * outputs[0].numel() * depth / rate)
        return seconds


class Launching(TorchDispatchMode):
    """Mode in which a thread's operations on meta tensors are launched on a simulated device."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu = kwargs or {}, self._gpu
        inputs = [*_tensors(args), *_tensors(kwargs)]
        on_device = [each for each in inputs if each.is_meta]
        name = func._schema.name
        if not on_device:
            result = func(*args, **kwargs)
            if not (isinstance(result, torch.Tensor) and result.is_meta):
                gpu.spend(gpu.figures.host_s)
            elif name == "aten::_to_copy":
                self._upload(result, is_async=bool(kwargs.get("non_blocking")))
            else:
                gpu.launch(0.0 if name in _NO_KERNEL else gpu.figures.kernel_s)
            return result
        if name in ("aten::_local_scalar_dense", "aten::item"):
            gpu.synchronize()
            return 1
        if name == "aten::_to_copy" and torch.device(kwargs.get("device") or "meta").type == "cpu":
            gpu.copy(inputs[0].nbytes)
            gpu.synchronize()
            return torch.zeros(inputs[0].shape, dtype=kwargs.get("dtype") or inputs[0].dtype)
        if func.is_view or name in _NO_KERNEL or name in _MAYBE_VIEWS:
            result = func(*args, **kwargs)
            is_copy = name in _MAYBE_VIEWS and result.untyped_storage()._cdata != on_device[0].untyped_storage()._cdata
            gpu.launch(2 * result.nbytes / gpu.figures.memory_bytes_per_s if is_copy else 0.0)
            return result
        result = func(*args, **kwargs)
        gpu.launch(gpu.kernel_s(name, on_device, list(_tensors(result))))
        return result

    def _upload(self, result: torch.Tensor, *, is_async: bool) -> None:
        self._gpu.copy(result.nbytes)
        self._gpu.launch(0.0)
        if not is_async:
            self._gpu.synchronize()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


@contextmanager
def fused_attention(gpu: SimulatedGpu) -> Iterator[None]:
    """Block with attention as one kernel, as of torch's fused ones, in place of the products that meta tensors take."""
    unfused, figures = torch.nn.functional.scaled_dot_product_attention, gpu.figures

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not query.is_meta:
            return unfused(query, key, value, *args, **kwargs)
        flops, num_bytes = 4.0 * query.numel() * key.shape[-2], 4 * query.nbytes
        rate = figures.product_flops * figures.attention_share
        gpu.launch(max(figures.kernel_s, flops / rate, num_bytes / figures.memory_bytes_per_s))
        with _disable_current_modes():
            return torch.empty_like(query)

    torch.nn.functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = unfused


class SimulatedCopies(OverlappedCopies):
    """Copies between the host and a simulated device."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__("meta", gpu)

    def __call__(self, run: Any, batch: Any) -> Any:
        result, times = super().__call__(run, batch)
        with self._gpu.lock:
            self._gpu.waited_s["input"] += times.waited_input_s
            self._gpu.waited_s["copies"] += times.waited_copy_s
        return result, times

    @property
    def _last_ended(self) -> Any:
        return self._gpu.last_ended

    @_last_ended.setter
    def _last_ended(self, ended: Any) -> None:
        self._gpu.last_ended = ended

    def _launch(self, run: Any, moved: Any, arrived: Any) -> Any:
        with Launching(self._gpu):
            return super()._launch(partial(self._gpu.compute, run), moved, arrived)

    def _upload(self, values: torch.Tensor) -> torch.Tensor:
        self._gpu.spend(values.nbytes / self._gpu.figures.host_bytes_per_s)  # to pinned memory
        self._gpu.copy(values.nbytes)
        return torch.empty(values.shape, dtype=values.dtype, device="meta")

    def _pin(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def _keep_for(self, stream: Any, values: torch.Tensor) -> None:
        del stream, values

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        self._gpu.copy(source.nbytes)
        return target


H100 = DeviceFigures(
    name="H100", launch_s=31e-6, view_s=8e-6, product_flops=560e12, memory_bytes_per_s=3e12, kernel_s=3e-6,
    link_bytes_per_s=55e9, host_bytes_per_s=5e9, attention_share=0.5, host_s=20e-6, call_s=7e-3, wait_s=100e-6,
    contended=3.0,
)  # fmt: skip


def _published(name: str, title: str) -> ModelConfig:
    with TemporaryDirectory() as folder:
        return PUBLISHED[title].describe(Path(folder)).model_copy(update={"name": name})


TITLES = {"vit-b-32": "CLIP ViT-B/32", "vit-l-14": "CLIP ViT-L/14", "so400m-384": "SigLIP so400m/14-384"}
MODELS = {name: partial(_published, name, title) for name, title in TITLES.items()}
"""Configurations of published models: no weights are needed where only shapes are computed."""


def shard_of_shapes(config: ModelConfig, spec: ShardSpec, dtype: str = "bfloat16") -> Shard:
    with torch.device("meta"):
        shard = Shard(config, spec, getattr(torch, dtype))
    for name, parameter in shard.named_parameters():
        parameter.data = parameter.data.to(getattr(torch, held_dtype(config, name, tuple(parameter.shape), dtype)))
    return shard.finish(torch.device("meta"))


def write_config(config: ModelConfig, folder: Path) -> Path:
    (folder / "config.json").write_text(config.to_json(), encoding="utf-8")
    return folder


SHORTEST, LONGEST = 9, 22
"""Tokens of captions, as those of the measured ones were."""


class SimulatedStage(TowerStage):
    """Stage on a simulated device."""

    def __init__(self, spec: StageSpec, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        super().__init__(spec)

    def setup(self) -> None:
        super().setup()
        self._copies = SimulatedCopies(self._gpu)

    def _load(self, folder: Path) -> Any:
        return shard_of_shapes(self.config, self.spec.shard, self.spec.dtype)

    def encode(self, batch: pa.RecordBatch, arrival: Any = None) -> pa.Table:
        self._gpu.spend(self._gpu.figures.call_s)
        return super().encode(batch, arrival)

    def __call__(self, table: pa.Table) -> pa.Table:
        with Launching(self._gpu), self._gpu.call():
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


DTYPE, TRIAL_BLOCKS = "bfloat16", 20


def forward_rate(config: ModelConfig, figures: DeviceFigures, num_rows: int, slowness: float, num_calls: int) -> float:
    """Rows a second of the whole model's forward passes, queued one behind the other, their input on the device."""
    gpu, shard = SimulatedGpu(figures, slowness), shard_of_shapes(config, whole_model(config), DTYPE)
    states = sample_states(config, num_rows)
    arranged = shard.arrange(Batch(states["vision"], states["text"]), dict(group_costs(config, [figures.name])))
    arranged = arranged.move_to(lambda values: torch.empty(values.shape, dtype=values.dtype, device="meta"))
    with fused_attention(gpu), Launching(gpu):
        gpu.compute(shard.compute, arranged)
        gpu.synchronize()
        started_s = gpu.now_s
        for _ in range(num_calls):
            gpu.compute(shard.compute, arranged)
        gpu.synchronize()
        return num_calls * num_rows * slowness / (gpu.now_s - started_s)


def blocks_before(num_stages: int, calls_at_once: int = GPU_CALLS) -> int:
    """Blocks that leave the last stage until all are full; one that has a device for itself tries its calls at once."""
    held = calls_at_once * num_stages
    return held + (TRIAL_BLOCKS if num_stages == 1 < calls_at_once else held)


def simulate_stages(
    config: ModelConfig, folder: Path, figures: DeviceFigures, num_stages: int, num_rows: int, num_blocks: int, *,
    slowness: float, calls_at_once: int = GPU_CALLS,
) -> tuple[float, dict[str, float]]:  # fmt: skip
    """Rows a second that leave the last of a run's stages on one device, and its idle shares by cause.

    Counted is from when stages may have chosen the number of their calls at once.
    """
    gpu = SimulatedGpu(figures, 1.0)
    specs = [stage.spec for stage in plan_shards(config, num_stages, dtype=DTYPE).stages]
    settings = {"batch_sizes": (num_rows,), "group_costs": group_costs(config, [figures.name])}
    settings |= {"calls_at_once": calls_at_once, "gpu_share": 1 / num_stages}
    specs = [StageSpec(index, str(folder), each, DTYPE, "meta", 1, **settings) for index, each in enumerate(specs)]
    stages = [SimulatedStage(each, gpu).load() for each in specs]
    queues = [Queue[pa.Table | None](calls_at_once) for _ in range(num_stages)]
    done, is_over = Queue[pa.Table | None](), threading.Event()
    block = rows_of(sample_states(config, num_rows), num_rows)

    def feed() -> None:
        while not is_over.is_set():
            queues[0].put(block)

    workers = [
        [threading.Thread(target=_work, args=(*each, gpu, is_over), daemon=True) for _ in range(calls_at_once)]
        for each in zip(stages, queues, [*queues[1:], done], strict=True)
    ]
    feeder = threading.Thread(target=feed, daemon=True)
    with fused_attention(gpu):
        reduce(lambda table, stage: stage(table), stages, block)  # in which torch takes extra time
        gpu.slowness = slowness
        for thread in [*chain.from_iterable(workers), feeder]:
            thread.start()
        for _ in range(blocks_before(num_stages, calls_at_once)):
            done.get()
        started_s, computed_s, waited_s = time.perf_counter(), gpu.computed_s, dict(gpu.waited_s)
        for _ in range(num_blocks):
            done.get()
        window_s = (time.perf_counter() - started_s) / slowness
        idle = gpu.idle_shares(computed_s, waited_s, window_s)
        is_over.set()
        feeder.join()
        for own, threads in zip(queues, workers, strict=True):
            list(map(own.put, [None] * len(threads)))
            list(map(threading.Thread.join, threads))
    return num_blocks * num_rows / window_s, idle


def _work(stage: SimulatedStage, own: Queue, after: Queue, gpu: SimulatedGpu, is_over: threading.Event) -> None:
    while (block := own.get()) is not None:
        if is_over.is_set():  # the blocks on their way are not computed
            continue
        done = stage(block)
        gpu.spend(done.nbytes / gpu.figures.host_bytes_per_s)
        gpu.wait_until(0.0)
        after.put(done)
