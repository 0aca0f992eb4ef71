"""Copies to a GPU and back during its computation, on streams of threads; and on a GPU where there is one."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
import torch
from simulated_gpu import SimulatedCopies

from embedder.batch_schema import TRACE
from embedder.errors import ConfigError
from embedder.steps.stage import CONTEXT_BYTES, TowerStage, bytes_at_once, memory_fraction, sizes_that_fit
from embedder.steps.stage_spec import StageSpec
from embedder.store.tables.arrow_tensors import pack
from shards.activations import Batch, TowerState
from shards.model_config import load_model_config
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec, whole_model
from shards.towers.albert import AlbertTower

WAIT_S = 30
ENQUEUE_S = 0.01
CALLS = 6
LAUNCH_S = 0.1
COMPILE_S = 0.6


def batch_of(values):
    """A batch of one side, a row for each value."""
    return Batch(None, TowerState(values, torch.ones(len(values), dtype=torch.int64)))


class Doubling:
    """A shard that doubles, on the stream that computes, and counts how many calls are in it."""

    def __init__(self, copies):
        self.copies, self.inside, self.most = copies, 0, 0

    def __call__(self, batch):
        self.inside += 1
        self.most = max(self.most, self.inside)
        source, result = batch.text.values, torch.zeros_like(batch.text.values)
        self.copies.put(lambda: result.copy_(2 * source), "double")
        time.sleep(ENQUEUE_S)
        self.inside -= 1
        return batch_of(result)


@pytest.mark.parametrize("slow", ["inward", "compute", "outward"])
def test_calls_of_two_threads_give_what_each_was_asked_for(slow):
    copies = SimulatedCopies(slow)
    double = Doubling(copies)
    given = [torch.randn(20 + number, 3, generator=torch.Generator().manual_seed(number)) for number in range(CALLS)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda values: copies(double, batch_of(values)), given))
    for values, (batch, times) in zip(given, found, strict=True):
        assert torch.equal(batch.text.values, 2 * values)
        assert batch.vision is None
        assert times.computed_s > 0
    waits = [sum(times[1:4]) for _, times in found]
    assert min(waits) == 0, "before the first batch nothing is known"
    assert slow != "inward" or max(waits) > 0
    assert double.most == 1, "activations of one batch at a time"
    assert sorted(set(copies.log)) == [("compute", "double"), ("inward", "copy"), ("outward", "copy")]
    assert len(copies.log) == 3 * CALLS


@pytest.mark.parametrize("slow", ["inward", "compute", "outward", ""])
def test_computing_and_waits_by_cause_add_up_to_the_time_since_the_first_batch(slow):
    copies = SimulatedCopies(slow)
    double = Doubling(copies)
    copies(double, batch_of(torch.ones(3)))
    first_ended_s = copies._last_ended.at_s

    def call(number):
        time.sleep(0.04 * number)  # a device that is fed slowly waits for its input, too
        return copies(double, batch_of(torch.ones(3)))[1]

    with ThreadPoolExecutor(3) as threads:
        times = list(threads.map(call, range(CALLS)))
    whole_s = copies._last_ended.at_s - first_ended_s
    assert sum(sum(each[:4]) for each in times) == pytest.approx(whole_s, rel=0.02)
    assert slow != "inward" or sum(each.waited_copy_s for each in times) > 0


def wait_for(copies, stream, number):
    """Wait until a stream has begun so many copies; an error if that doesn't come to pass meanwhile."""
    for _ in range(WAIT_S * 100):
        if copies.log.count((stream, "copy")) >= number:
            return
        time.sleep(0.01)
    raise AssertionError(f"{stream}: {copies.log}")


def test_the_next_input_comes_and_the_last_output_goes_while_a_call_computes():
    copies, happened = SimulatedCopies(), []
    conditions = iter([("inward", 2), ("outward", 1)])  # the other's input has come; the first one's output has gone

    def run(batch):
        stream, number = next(conditions)

        def compute():
            wait_for(copies, stream, number)
            happened.append(stream)

        copies.put(compute, "wait")
        return batch

    with ThreadPoolExecutor(2) as threads:
        given = [torch.full((4,), number) for number in range(2)]
        found = list(threads.map(lambda values: copies(run, batch_of(values))[0].text.values, given))
    assert happened == ["inward", "outward"]
    assert [values.tolist() for values in found] == [[0] * 4, [1] * 4]


def test_a_call_waits_for_its_result_without_keeping_a_core_busy():
    copies, waited = SimulatedCopies(), []

    class Event(copies._gpu.Event):
        def __init__(self, enable_timing=False, blocking=False):
            super().__init__()
            self.blocking = blocking

        def synchronize(self):
            if threading.current_thread() is threading.main_thread():
                waited.append(self.blocking)
            super().synchronize()

    copies._gpu.Event = Event
    copies(Doubling(copies), batch_of(torch.ones(3)))
    assert waited == [True], "of CUDA's, others spin"


def test_a_call_that_fails_leaves_the_way_free_for_the_next():
    copies = SimulatedCopies()

    def fail(batch):
        raise torch.OutOfMemoryError("too large")

    with pytest.raises(torch.OutOfMemoryError):
        copies(fail, batch_of(torch.ones(3)))
    assert copies(Doubling(copies), batch_of(torch.ones(3)))[0].text.values.tolist() == [2, 2, 2]


class Waiting:
    """A shard that computes on this thread what has arrived by then, as a kernel does."""

    def __init__(self, shard, copies):
        self.shard, self.copies = shard, copies

    def __getattr__(self, name):
        return getattr(self.shard, name)

    def compute(self, arranged):
        self.copies._gpu.current_stream().record_event().synchronize()
        return self.shard.compute(arranged)


def rows_of(seed, num_rows):
    """Decoded rows: images, captions, both or none."""
    generator = np.random.default_rng(seed)
    images = [generator.integers(0, 256, (1, 32, 32, 3), np.uint8) if row % 3 else None for row in range(num_rows)]
    captions = [generator.integers(5, 300, 2 + row % 5, np.int32) if row % 4 else None for row in range(num_rows)]
    columns = {"pixels": pack(images), "token_ids": pack(captions), "trace": pa.nulls(num_rows, TRACE)}
    return pa.table(columns)


@pytest.mark.parametrize("layers", [LayerRange(0, 2), LayerRange(0, 4)])
def test_a_stage_with_two_calls_at_once_gives_the_same_vectors_to_the_bit(tiny_model, layers):
    spec = StageSpec(0, str(tiny_model), ShardSpec(layers, layers), "float32", "cpu", 1, (8,))
    stage, plain = TowerStage(spec).load(), TowerStage(spec).load()
    stage._copies = SimulatedCopies()
    stage.shard = Waiting(stage.shard, stage._copies)
    tables = [rows_of(seed, 12 + seed) for seed in range(3)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(stage, tables))
    for table, other in zip(found, map(plain, tables), strict=True):
        assert table.drop_columns(["trace"]).equals(other.drop_columns(["trace"]))
        calls = [call for calls in table["trace"].drop_null().to_pylist() for call in calls]
        assert sum(call["num_rows"] for call in calls if call["step"] == "stage 0") == table.num_rows
        assert all(call["wall_s"] > 0 for call in calls)


def simulated_stage(model, kind):
    """A stage whose shard is of a kind, on simulated streams."""
    spec = whole_model(load_model_config(model))
    stage = TowerStage(StageSpec(0, str(model), spec, "float32", "cpu", 1, (8,))).load()
    stage._copies = SimulatedCopies()
    stage.shard = kind(stage.shard, stage._copies)
    return stage


def calls_of(table):
    calls = [call for calls in table["trace"].drop_null().to_pylist() for call in calls]
    return [call for call in calls if call["step"] == "stage 0"]


class Launching(Waiting):
    """A shard that takes a while to launch."""

    def compute(self, arranged):
        ends_s = time.thread_time() + LAUNCH_S
        while time.thread_time() < ends_s:
            pass
        return super().compute(arranged)


def test_cpu_seconds_of_the_launching_thread_are_the_stages(tiny_model):
    calls = calls_of(simulated_stage(tiny_model, Launching)(rows_of(0, 16)))
    assert len(calls) == 2 and all(call["cpu_s"] >= LAUNCH_S for call in calls)


def test_while_layers_are_compiled_the_device_waits_for_its_kernels(tiny_model, monkeypatch):
    graphs = [0]
    monkeypatch.setattr("embedder.steps.stage.num_graphs", lambda: graphs[0])

    class Compiling(Waiting):
        def compute(self, arranged):
            if graphs[0] == 0:
                time.sleep(COMPILE_S)
                graphs[0] = 1
            return super().compute(arranged)

    first, second = calls_of(simulated_stage(tiny_model, Compiling)(rows_of(0, 16)))
    assert first["waited_launch_s"] >= 0.9 * COMPILE_S > first["wall_s"]
    assert second["waited_launch_s"] < COMPILE_S / 2


def shared_stage(share, device="cuda", model=""):
    """The settings of a stage with a share of a GPU."""
    spec = whole_model(load_model_config(model)) if model else ShardSpec(LayerRange(0, 1), LayerRange(0, 1))
    return StageSpec(1, str(model), spec, "float32", device, 1, (8,), gpu_share=share)


@pytest.mark.parametrize(("share", "gib"), [(0.5, 80), (0.3333, 24), (0.25, 16)])
def test_shares_of_a_gpu_with_their_contexts_fit_into_its_memory(share, gib):
    total = gib << 30
    taken = memory_fraction(shared_stage(share), total) * total + CONTEXT_BYTES
    assert taken == pytest.approx(share * total)
    assert int(1 / share) * taken <= total


def test_batches_that_find_no_room_on_a_gpu_are_not_tried():
    sizes, row = (256, 512, 1024, 128, 64), 14 << 20  # of a ViT-L/14, in float32
    assert sizes_that_fit(sizes, row.__mul__, 75 << 30) == sizes
    assert sizes_that_fit(sizes, row.__mul__, 9 << 30) == (256, 128, 64)
    assert sizes_that_fit(sizes, row.__mul__, 1 << 30) == (64,), "smaller ones come by the back-off"


def test_captions_of_a_long_limit_are_computed_in_groups_and_need_no_more_than_one():
    tower = AlbertTower(vocab_size=100, max_position_embeddings=8192, num_attention_heads=12)
    group = 16 * tower.max_tokens
    inputs = tower.input_bytes(tower.max_tokens)
    assert bytes_at_once(tower, group, 1024) - bytes_at_once(tower, group, 16) == (1024 - 16) * inputs
    assert bytes_at_once(tower, tower.max_tokens // 2, 1) == bytes_at_once(tower, group, 1)


def test_a_share_that_holds_no_more_than_the_context_is_refused_with_the_cure():
    with pytest.raises(ConfigError, match=r"stage 1 on node .*: 0\.1 of a GPU of 4\.0 GiB holds .*fewer stages share"):
        memory_fraction(shared_stage(0.1), 4 << 30)


@pytest.mark.gpu
def test_a_stage_on_a_gpu_keeps_to_its_share_and_gives_what_the_cpu_gives(tiny_model):
    plain = TowerStage(shared_stage(1.0, "cpu", tiny_model)).load()
    stage = TowerStage(shared_stage(0.5, "cuda", tiny_model)).load()
    try:
        assert 0.3 < torch.cuda.get_per_process_memory_fraction() < 0.5
        tables = [rows_of(seed, 5 + 7 * seed) for seed in range(12)]
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(stage, tables))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for table, other in zip(found, map(plain, tables), strict=True):
        for name in ("image_embedding", "text_embedding"):
            ours, theirs = (each[name].to_pylist() for each in (table, other))
            assert [row is None for row in ours] == [row is None for row in theirs]
            assert np.allclose([row for row in ours if row], [row for row in theirs if row], atol=1e-5)
