"""A sink that is slower than the stages bounds what is in flight, in bytes and rows; a small object store spills."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import samples
from published_models import PUBLISHED
from tiny_models import tiny_config

import embedder
from embedder.compat import worker_options
from embedder.compat.ray_data import actor_pool, map_blocks
from embedder.placement.device_settings import GPU_SETTINGS, STORE_SHARE, fit_to_store
from shards.fresh import init_model
from shards.planning.devices import CPU_ROWS, DEVICES, GPU_CALLS, GPU_ROWS
from shards.planning.planning_costs import estimate_costs
from shards.shard_specs import whole_model
from shards.train_tokenizer import train_tokenizer

PROGRAM = Path(__file__).parents[2] / "support" / "small_store_run.py"
STORE_BYTES = 80 << 20
NUM_ITEMS, WIDTH = 1000, 16384  # captions whose vectors take 64 KiB each: 62 MiB in all
ROW_BYTES = 4 * WIDTH
ROW_S = 0.016  # of a stage that sleeps
CONFIG = """
model = "{model}"
store = "{store}"
engine = "ray"
rows_per_part = 64
min_vector_spread = 0
min_vector_directions = 0
index.build = false

[[source]]
path = "{source}"
kind = "table"
columns = {{ id = "id", caption = "caption" }}
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of wide vectors, and a table of captions."""
    folder = tmp_path_factory.mktemp("wide")
    config = tiny_config().model_copy(update={"embedding_dim": WIDTH})
    init_model(config, folder / "model", seed=0, tokenizer_json=train_tokenizer(samples.SENTENCES, 300))
    lines = [f"i{number},{samples.SENTENCES[number % len(samples.SENTENCES)]}" for number in range(NUM_ITEMS)]
    (folder / "in.csv").write_text("\n".join(["id,caption", *lines]))
    return folder


def figures_of(wide, tmp_path, write_pause_s, held_mb, num_items=NUM_ITEMS):
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(model=wide / "model", store=tmp_path / "store", source=wide / "in.csv"))
    command = [sys.executable, str(PROGRAM), config, tmp_path / "spilled", write_pause_s, held_mb]
    support = os.pathsep.join([str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"PYTHONPATH": support},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if num_items:
        assert embedder.open_store(tmp_path / "store").to_arrow(["item_id"]).num_rows == num_items
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))  # Ray writes there, too


@pytest.mark.usefixtures("starts_ray")
@pytest.mark.slow
def test_a_slow_sink_bounds_what_is_in_flight(wide, tmp_path):
    found = figures_of(wide, tmp_path, 1.0, 0)
    last = found["operators"]["stage 2"]
    assert ROW_BYTES * 64 < last["max_object_store_bytes"] < STORE_BYTES / 2
    assert 64 < found["max_rows_in_flight"] < 0.8 * NUM_ITEMS
    assert last["backpressure_s"] > 5, "it waited for the sink"
    assert found["spilled_bytes"] == 0


@pytest.mark.usefixtures("starts_ray")
@pytest.mark.slow
def test_an_object_store_that_others_hold_spills_and_the_report_says_how_much(wide, tmp_path):
    found = figures_of(wide, tmp_path, 1.0, 62)
    assert found["held_bytes"] == 62 << 20
    assert found["spilled_bytes"] > ROW_BYTES
    assert found["operators"]["write"]["spilled_bytes"] > 0


@pytest.fixture
def tiny_disk(tmp_path):
    """A disk of 4 MB where Ray spills to."""
    folder = tmp_path / "spilled"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False).returncode:
        pytest.skip("no right to mount a disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.usefixtures("starts_ray", "tiny_disk")
@pytest.mark.slow
def test_a_full_disk_below_the_object_store_is_one_line_and_the_same_command_goes_on(wide, tmp_path):
    found = figures_of(wide, tmp_path, 0.3, 70, num_items=0)
    assert found["failure"].startswith("node ") and "\n" not in found["failure"]
    assert "the disk that it spills to are full; make room" in found["failure"]
    assert "the same command continues" in found["failure"]


def part_of_best_rate(num_rows, num_blocks, bytes_handed_on, row_s=ROW_S, calls_at_once=1, store_bytes=None):
    """Rate of stages that sleep, of the best one, where Ray Data has so much memory for their blocks.

    `bytes_handed_on` are those of a row, by decoding and by each stage.
    """
    import ray.data

    sleep_s, num_stages = row_s * num_rows, len(bytes_handed_on) - 1

    class Sleeping:
        def __init__(self, row_bytes):
            self._row_bytes, self._device = row_bytes, threading.Lock()

        def __call__(self, table):
            with self._device:
                began_s = time.time()
                time.sleep(sleep_s)
            return block(min(began_s, *table["began_s"].to_pylist()), self._row_bytes)

    def block(began_s, row_bytes):
        values = np.ones((num_rows, row_bytes), np.uint8)
        columns = {"values": pa.FixedShapeTensorArray.from_numpy_ndarray(values), "began_s": [began_s] * num_rows}
        return pa.table(columns | {"ended_s": [time.time()] * num_rows})

    options = ray.data.DataContext.get_current().execution_options
    before = options.resource_limits
    if store_bytes is not None:
        options.resource_limits = ray.data.ExecutionResources(object_store_memory=store_bytes * STORE_SHARE)
    tasks = {"batch_format": "pyarrow", "batch_size": None, "num_cpus": 0.25}
    actors = {"num_gpus": 0, "num_cpus": 0.25, "compute": actor_pool(1, 1, calls_at_once)} | worker_options()
    try:
        dataset = ray.data.range(num_blocks, override_num_blocks=num_blocks)
        dataset = dataset.map_batches(lambda _: block(time.time() + 1e6, bytes_handed_on[0]), **tasks)
        for row_bytes in bytes_handed_on[1:]:
            dataset = map_blocks(dataset, Sleeping, (row_bytes,), rows_per_batch=num_rows, **actors)
        found = dataset.map_batches(lambda table: table.select(["began_s", "ended_s"]), **tasks).take_all()
    finally:
        options.resource_limits = before
    whole_s = max(row["ended_s"] for row in found) - min(row["began_s"] for row in found)
    return (num_blocks + num_stages - 1) * sleep_s / whole_s


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_blocks_that_fit_the_object_store_keep_stages_busy_where_larger_ones_pass_one_by_one():
    store_bytes, row_bytes = 64 << 20, 64 << 10
    fitted = fit_to_store(GPU_SETTINGS, row_bytes, store_bytes, num_steps=5, num_replicas=1).batch_sizes[0]
    assert fitted == 16
    reached, larger = (
        part_of_best_rate(num_rows, 512 // num_rows, [row_bytes] * 4, store_bytes=store_bytes)
        for num_rows in (fitted, 4 * fitted)
    )
    assert reached > 1.2 * larger


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_stage_that_sleeps_as_long_as_an_h100_computes_is_kept_busy_in_blocks_of_a_gpu(tmp_path):
    """Pixels of ViT-L/14 come from decode tasks, about 2,000 rows or 300 MB a second."""
    config = PUBLISHED["CLIP ViT-L/14"].describe(tmp_path)
    costs = estimate_costs(config, DEVICES["H100"], "bfloat16")
    whole = whole_model(config)
    row_s = sum(
        getattr(costs, side).of(whole.layers_of(side), tower.num_layers) for side, tower in config.towers.items()
    )
    sizes = [config.vision.input_bytes(0), 4 * config.embedding_dim]
    part_of_best_rate(GPU_ROWS, 8, sizes, row_s, calls_at_once=GPU_CALLS)  # Ray's processes start
    small, found = (
        part_of_best_rate(num_rows, 4096 // num_rows, sizes, row_s, calls_at_once=GPU_CALLS)
        for num_rows in (CPU_ROWS, GPU_ROWS)
    )
    assert found > 1.5 * small, "0.99 and 0.33 on two cores that nothing else uses"
