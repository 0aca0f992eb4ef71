"""Profile of a run on this machine: costs of the model's layers, and of the work around them.

Measurements of a model are cached by its fingerprint, device, dtype and torch version
(`embedder.storage.cost_cache`), and so are those of the host's work on shipped images. A run's own items are measured
each time, as the results depend on them.
"""

import platform
import tempfile
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from embedder.batch_schema import TENSOR, TRACE
from embedder.compat.malloc import keep_freed_memory
from embedder.config import ComputeSettings, RowSettings
from embedder.executors.job import decode_spec, preprocessing_of
from embedder.models.model_folder import Model
from embedder.placement import hardware
from embedder.placement.device_settings import group_costs, rows_per_batch, settings_of, settings_of_costs
from embedder.placement.fleet import Available
from embedder.placement.resources import request_resources
from embedder.planning.background_load import busy_machine
from embedder.planning.sample import ItemSample, sample_items
from embedder.steps.stage_spec import StageSpec
from embedder.storage.cost_cache import read_kept, read_or_make
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.tables.arrow_tensors import pack_vectors
from shards.length_groups import GroupCosts
from shards.model_config import ModelConfig
from shards.planning.planning_costs import ENGINE_CALL_S, STARTUP_S, CallSizes, DataMix, HostCosts, ModelCosts
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec, whole_model

if TYPE_CHECKING:
    from shards.profile import TimingSetting

SHARED_MEMORY = Path("/dev/shm")  # Ray's object store is there, too
SEND_BYTES = 16 << 20
# CPU that Ray itself takes of one core all the time, besides calls of steps (ENGINE_CALL_S), for daemons, scheduling
# and our monitor. Both change no cut, only the throughput that a plan predicts, by a tenth for a small model.
ENGINE_CORES = 0.12


def measured_costs(compute: ComputeSettings, rows: RowSettings, model: Model) -> tuple[ModelCosts, HostCosts]:
    """Measure costs on this machine with the shipped images, or read them from the cache.

    Raises `shards.ModelError` if the weights aren't those of the model's configuration.
    """
    setting = setting_of(compute, model.config)
    costs = read_or_make(ModelCosts, _model_key(model, setting), lambda: model_costs(rows, model, setting))
    host = read_or_make(
        HostCosts,
        _host_key(compute, rows, model),
        lambda: host_costs(rows, model, sample_items(rows, model), compute.rows_per_part),
    )
    return costs, with_engine(compute, model.config, costs, host, DataMix())


def kept_costs(compute: ComputeSettings, rows: RowSettings, model: Model) -> tuple[ModelCosts, HostCosts] | None:
    """Read the cached costs of `measured_costs`; None if there are none. Measures nothing."""
    host = read_kept(HostCosts, _host_key(compute, rows, model))
    if host is None:
        return None  # before torch is imported to query it about GPUs
    costs = read_kept(ModelCosts, _model_key(model, setting_of(compute, model.config)))
    if costs is None:
        return None
    return costs, with_engine(compute, model.config, costs, host, DataMix())


def measure(
    compute: ComputeSettings, rows: RowSettings, model: Model, listing: pa.Table
) -> tuple[ModelCosts, HostCosts, DataMix]:
    """Measure costs on this machine for these items, and their mix; the mix and decoding are never cached.

    Raises `shards.ModelError` if the weights aren't those of the model's configuration.
    """
    sample = sample_items(rows, model, listing)
    setting = setting_of(compute, model.config, sample.mix.caption_tokens)
    costs = read_or_make(ModelCosts, _model_key(model, setting), lambda: model_costs(rows, model, setting))
    host = with_engine(compute, model.config, costs, host_costs(rows, model, sample, compute.rows_per_part), sample.mix)
    return costs, host, sample.mix


def _model_key(model: Model, setting: "TimingSetting") -> dict[str, object]:
    return {**machine_key(), "model": model.fingerprint, "device_name": setting.device_name, **asdict(setting)}


def _host_key(compute: ComputeSettings, rows: RowSettings, model: Model) -> dict[str, object]:
    return {**machine_key(), "preprocessing": preprocessing_of(rows, model), "rows": compute.rows_per_part}


def machine_key() -> dict[str, object]:
    """Return the key of measurements on this machine."""
    libraries = {name: version(name) for name in ("torch", "pillow")}
    return {"format": 3, "cpu": cpu_name(), "num_cpus": hardware.num_cpus(), **libraries}


def cpu_name() -> str:
    """Return the processor's model name, as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def setting_of(
    compute: ComputeSettings, config: ModelConfig, caption_tokens: int = DataMix.caption_tokens
) -> "TimingSetting":
    """Return the setting in which the stages will compute; with the fewest threads of any stage."""
    import torch

    from shards.profile import TimingSetting

    num_cpus = hardware.num_cpus()
    stages = request_resources(compute, Available(num_cpus, torch.cuda.device_count())).stages
    num_threads, device = min(stage.num_threads for stage in stages), stages[0].device
    return TimingSetting(
        dtype=compute.settled_dtype,
        device=device,
        num_threads=num_threads,
        num_rows=rows_per_batch(compute.batch_size, settings_of([device], config)),
        caption_tokens=caption_tokens,
        group_costs=group_costs_here(config, device, compute.settled_dtype),
    )


def group_costs_here(config: ModelConfig, device: str, dtype: str) -> tuple[tuple[str, GroupCosts], ...]:
    """Return the costs by which a stage on this process's GPU groups rows; none on a CPU, which has its own."""
    import torch

    return group_costs(config, [torch.cuda.get_device_name()], dtype) if device == "cuda" else ()


def model_costs(rows: RowSettings, model: Model, setting: "TimingSetting") -> ModelCosts:
    """Measure seconds of the layers in one replica, of sending a byte and of a call."""
    from shards.profile import measure_costs

    keep_freed_memory()  # as stages do
    # Several threads and GPUs are measured by the wall clock, which a background load would disturb.
    with busy_machine(hardware.num_cpus() if setting.device == "cpu" and setting.num_threads == 1 else 0):
        costs = measure_costs(model.folder, setting, model.fingerprint)
        copies_s = 2 * costs.send_s_per_byte if setting.device != "cpu" else 0.0  # to the device and back
        return replace(costs, send_s_per_byte=copies_s + measure_send(), call_s=measure_call(rows, model, setting))


def host_costs(rows: RowSettings, model: Model, sample: ItemSample, rows_per_part: int) -> HostCosts:
    """Measure CPU seconds of decoding, tokenising and writing, without Ray's own."""
    decode_s = sample.decode_s_per_image
    if decode_s is None:  # no images among the items; the mix says so, and the number is for what-if questions
        decode_s = sample_items(rows, model).decode_s_per_image or 0.0
    write_s = measure_write(sample.rows, model.config.vector_dim, rows_per_part)
    return HostCosts(
        decode_s_per_image=decode_s,
        tokenise_s_per_caption=sample.tokenise_s_per_caption,
        write_s_per_item=write_s,
        engine_s_per_item=0.0,
        startup_s=STARTUP_S,
        source="measured",
    )


def with_engine(
    compute: ComputeSettings,
    model: ModelConfig,
    costs: ModelCosts,
    host: HostCosts,
    mix: DataMix,
    num_cores: float | None = None,
) -> HostCosts:
    """Add Ray's own share of an item, on cores that are always busy (`num_cores`; None means this machine's).

    With x items per second, x * (item_s + calls_s) + ENGINE_CORES is the number of cores.
    """
    num_rows = rows_per_batch(compute.batch_size, settings_of_costs(costs, model))
    costs, whole = costs.at_mix(mix, model), whole_model(model)
    mix = mix.of_towers(model)
    item_s = mix.images_per_item * costs.vision.of(whole.vision, model.num_layers["vision"])
    item_s += mix.captions_per_item * costs.text.of(whole.text, model.num_layers["text"])
    item_s += compute.num_stages * costs.call_s / num_rows + replace(host, engine_s_per_item=0.0).item_s(mix)
    calls = CallSizes(num_rows, num_rows, compute.rows_per_part)
    calls_s = ENGINE_CALL_S * calls.calls_per_item(compute.num_stages)
    num_cores = hardware.num_cpus() if num_cores is None else num_cores
    items_per_s = max(num_cores / 2, num_cores - ENGINE_CORES) / (item_s + calls_s)
    return replace(host, engine_s_per_item=calls_s + ENGINE_CORES / items_per_s)


def measure_send() -> float:
    """Measure seconds per byte through shared memory: written as Arrow IPC, as Ray does, and read by mapping it.

    This uses only Arrow, so that Ray needn't run; Ray's own work around it counts as the engine's.
    """
    from shards.profile import median_s

    table = pa.table({"values": pa.array(np.zeros(SEND_BYTES, np.uint8))})
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=folder, prefix="embedder-") as root:
        path = str(Path(root) / "block")
        pa.create_memory_map(path, SEND_BYTES + (1 << 16)).close()

        def send() -> None:
            with pa.memory_map(path, "r+") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
            with pa.memory_map(path) as file:
                np.add.reduce(pa.ipc.open_stream(file).read_all()["values"].chunk(0).to_numpy()[::64])

        return median_s(send, "cpu", time.process_time) / SEND_BYTES


def measure_call(rows: RowSettings, model: Model, setting: "TimingSetting") -> float:
    """Measure a stage's seconds per batch without those of the layers, by rows without images and captions."""
    from embedder.steps.stage import TowerStage
    from shards.profile import median_s, torch_threads

    one_layer = ShardSpec(*(LayerRange(0, int(side in model.config.towers)) for side in ("vision", "text")))
    num_rows = setting.num_rows
    inputs = [column.name for column in decode_spec(rows, model).columns if column.type == TENSOR]
    empty = dict.fromkeys(inputs, TENSOR) | {"trace": TRACE}
    table = pa.table({name: pa.nulls(num_rows, kind) for name, kind in empty.items()})
    with torch_threads(1):
        spec = StageSpec(0, str(model.folder), one_layer, setting.dtype, "cpu", 1, (num_rows,))
        stage = TowerStage(spec).load()
        return median_s(lambda: stage(table), "cpu", time.process_time)


def measure_write(rows: pa.Table, embedding_dim: int, num_rows: int) -> float:
    """Measure CPU seconds of writing one row, including its share of a part file's own costs."""
    from shards.profile import median_s

    rows = rows.drop_columns([column.name for column in rows.schema if column.type == TENSOR])
    rows = rows.take(pa.array(np.arange(num_rows) % rows.num_rows)).combine_chunks()
    vectors = np.random.default_rng(0).standard_normal((num_rows, embedding_dim)).astype(np.float32)
    column = pack_vectors(vectors, np.ones(num_rows, bool))
    if "attempts" not in rows.schema.names:
        rows = rows.append_column("attempts", pa.repeat(pa.scalar(1, pa.int32()), num_rows))
    for name in ("image_embedding", "text_embedding"):
        rows = rows.append_column(name, column)
    metadata = RunMetadata("sample", "0001-sample", "", "", pa.schema([]))
    with tempfile.TemporaryDirectory(prefix="embedder-") as root:
        files = StoreFiles(root)
        return median_s(lambda: write_part(files, metadata, 0, rows), "cpu", time.process_time) / num_rows
