"""A run, fully decided before anything starts: the model, the plan, the resources, the settings of each step."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import pyarrow as pa

from embedder.config import ComputeSettings, RowSettings
from embedder.config_toml.run_sections import DecodeConfig
from embedder.errors import ConfigError
from embedder.executors.block_size import fastest_item_s, items_per_block
from embedder.installation import vector_libraries
from embedder.media.limits import DecodeLimits
from embedder.models.further_models import FurtherModel, further_inputs, further_models, shared_columns
from embedder.models.model_actor import ModelGroup, group_models
from embedder.models.model_folder import Model, resize_spec, rows_of_clips
from embedder.models.run_model import RunModel
from embedder.placement import hardware
from embedder.placement.allocation import Allocation
from embedder.placement.compile_choice import is_compiled
from embedder.placement.device_settings import (
    CPU_SETTINGS,
    GPU_SETTINGS,
    DeviceSettings,
    batch_sizes,
    fit_to_store,
    group_costs,
    rows_per_batch,
    settings_of,
)
from embedder.placement.fleet import Available
from embedder.placement.fleet_plan import plan_for_fleet
from embedder.placement.resources import (
    OBJECT_STORE_BYTES,
    allocate,
    beside_models,
    model_resources,
    niceness_by_work,
    object_store_bytes,
    request_resources,
    without_gpus_of,
)
from embedder.quantities import plural, size_text
from embedder.servables.towers import read_plan
from embedder.steps.item_decoder import DecodeSpec
from embedder.steps.stage_spec import StageSpec
from embedder.store.journal.model_parts import ModelPart
from embedder.store.journal.part_writer import NO_COLUMNS, RunMetadata
from embedder.store.journal.runs import Run
from embedder.store.layout import StoreInfo
from embedder.store.maintenance.half_precision import is_half_store
from embedder.store.row_metrics import check_columns
from embedder.store.schema import EMBEDDINGS, with_carryover
from embedder.user_steps.declared_steps import new_columns, step_fingerprints
from embedder.user_steps.run_steps import check_run_steps, decoded_steps, written_steps
from embedder.user_steps.written_rows import NO_STEPS, WrittenSteps
from shards.fingerprint import preprocess_fingerprint
from shards.plan import ShardPlan, check_plan, plan_shards
from shards.planning.devices import CPU_ROWS

NUM_TASK_STEPS = 2  # decode and write


@dataclass(frozen=True)
class ModelRun:
    """Model of a run, and the run in its view; `carried` are the listing's columns that its table takes over."""

    model: RunModel
    run: Run
    carried: pa.Schema = NO_COLUMNS

    @property
    def part(self) -> ModelPart:
        """The model, as write tasks know it."""
        info = self.run.info
        metadata = RunMetadata(
            run_id=self.run.run_id,
            session=self.run.session,
            model_fingerprint=info.model_fingerprint,
            preprocess_fingerprint=info.preprocess_fingerprint,
            carryover=self.carried,
            outputs=self.model.outputs,
            is_half=is_half_store(self.run.files, info.model_fingerprint),
        )
        return ModelPart(self.run.files, metadata, tuple(self.model.columns.items()))


@dataclass(frozen=True)
class Job:
    """Input of an engine: settings, model, plan, resources, and the run that journals the work."""

    compute: ComputeSettings
    model: Model
    plan: ShardPlan
    decode: DecodeSpec
    allocation: Allocation
    stages: tuple[StageSpec, ...]
    run: Run
    parts: tuple[ModelPart, ...]
    """All models of the run for write tasks, the main one first."""
    settings: DeviceSettings = CPU_SETTINGS
    groups: tuple[ModelGroup, ...] = ()
    """Further models by the actors that hold them, which come before the main model's stages."""
    before_write: WrittenSteps = NO_STEPS
    """The user's own steps that finished rows go through."""
    num_items: int | None = None
    """Items to embed, if known."""

    @property
    def carried_inputs(self) -> tuple[str, ...]:
        """Carried columns that decode tasks take, for the user's own steps."""
        return self.decode.steps.carried if self.decode.steps is not None else ()

    @property
    def stamp(self) -> RunMetadata:
        """Constants of the main model's rows."""
        return self.parts[0].metadata


def plan_job(
    compute: ComputeSettings,
    rows: RowSettings,
    model: Model,
    plan: ShardPlan,
    available: Available,
    runs: Sequence[ModelRun],
    num_items: int | None = None,
) -> Job:
    """Decide the run, for what is `available` on the machine or cluster; `runs` has that of the main model first.

    For the GPUs of a fleet that further models leave, the model is cut again where `plan` need not be kept. Raises
    `ConfigError` if the requested resources do not exist; `StepError` or `ServableError` if a step of the user's can't
    be run.
    """
    main, models = runs[0], further_models(each.model for each in runs)
    _check_rows(rows, main, may_load=compute.ray_address is None)
    groups = group_models(models, shared_columns(models, model))
    left = beside_models(available, actors := [each.actor for each in groups])
    resources = model_resources(available, actors)
    plan = plan_for_fleet(compute, model, plan, without_gpus_of(left, resources))
    allocation = allocate(compute, left, plan.stages, resources)
    decode = _decode_of_run(rows, model, models)
    settings = _fit_settings(max(handed_on_bytes(model, plan, decode)), model, allocation, available, len(groups))
    stages = stage_specs(compute, model, plan, allocation, num_items, settings)
    decode = replace(decode, rows_per_batch=rows_per_batch(compute.batch_size, settings))
    last = written_steps(rows.step, main.run.info.step_columns)
    parts = tuple(each.part for each in runs)
    return Job(compute, model, plan, decode, allocation, stages, main.run, parts, settings, groups, last, num_items)


def _fit_settings(
    bytes_per_row: int, model: Model, allocation: Allocation, available: Available, num_groups: int
) -> DeviceSettings:
    """Choose the sizes of a run by its devices and by Ray's object store."""
    stages = allocation.stages
    num_steps, num_replicas = len(stages) + num_groups + NUM_TASK_STEPS, max(each.max_replicas for each in stages)
    usual = settings_of((stage.device for stage in stages), model.config)
    store_bytes = 0 if available.can_grow else available.object_store_bytes  # that of nodes to come is unknown
    return fit_to_store(usual, bytes_per_row, store_bytes, num_steps, num_replicas)


def describe_store_limit(job: Job, available: Available) -> str | None:
    """Say in a line how far Ray's object store has made batches or blocks smaller; None if by less than half."""
    usual = settings_of((stage.device for stage in job.stages), job.model.config)
    num_rows, usual_rows = (rows_per_batch(job.compute.batch_size, each) for each in (job.settings, usual))
    row_bytes = max(handed_on_bytes(job.model, job.plan, job.decode))
    batch_bytes, room, needed = num_rows * row_bytes, job.settings.max_block_bytes, usual.max_block_bytes
    if job.compute.batch_size == "auto":  # a block holds whole batches
        room, needed = max(room, batch_bytes), max(needed, usual_rows * row_bytes)
    if 2 * room > needed:
        return None
    batches = f" and batches of {num_rows:,} rows instead of {usual_rows:,}" if num_rows < usual_rows else ""
    if batch_bytes > room and job.compute.batch_size != "auto":
        batches = f", and batch_size = {num_rows} makes them {size_text(batch_bytes)}: steps will wait for each other"
    store_bytes = available.object_store_bytes
    own = "a Ray that a run starts takes a quarter of the machine's memory at most"
    return (
        f"Ray's object store of {size_text(store_bytes)} has room for blocks of {size_text(room)} instead of "
        f"{size_text(needed)}{batches}; {size_text(store_bytes * needed / room)} would do "
        f"({own if job.compute.ray_address is None else 'ray start --object-store-memory'})"
    )


def _check_rows(rows: RowSettings, main: ModelRun, *, may_load: bool) -> None:
    check_run_steps(rows.step, main.carried, may_load=may_load)
    check_columns(rows.metric, with_carryover(EMBEDDINGS, main.part.metadata.columns))


def _decode_of_run(rows: RowSettings, model: Model, models: Sequence[FurtherModel]) -> DecodeSpec:
    """Return the settings of the decode step, including what further models and the user's own steps take from it."""
    return replace(
        decode_spec(rows, model),
        further=further_inputs(models, model, rows.decode.settled_colour),
        models=("", *(each.name for each in models)),
        steps=decoded_steps(rows.step),
    )


def stage_specs(
    compute: ComputeSettings,
    model: Model,
    plan: ShardPlan,
    allocation: Allocation,
    num_items: int | None = None,
    settings: DeviceSettings | None = None,
) -> tuple[StageSpec, ...]:
    """Return the settings of each stage's replicas.

    `num_items` is the number of items to embed, if known; `settings` are the run's sizes, by default those of its
    devices.
    """
    niceness = niceness_by_work(plan.stages)
    devices = {resources.device for resources in allocation.stages}
    settings = settings or settings_of(devices, model.config)
    planned = {name for stage in plan.stages if (name := stage.device) is not None and stage.num_gpus}
    gpus = planned or set(hardware.gpu_names()) if "cuda" in devices else set()
    costs = group_costs(model.config, gpus, compute.settled_dtype) if devices == {"cuda"} else ()
    return tuple(
        StageSpec(
            index=index,
            model=model.uri,
            shard=stage.spec,
            dtype=compute.settled_dtype,
            device=resources.device,
            num_threads=resources.num_threads,
            batch_sizes=batch_sizes(compute.batch_size, settings),
            niceness=niceness[index],
            gpu_share=min(resources.num_gpus, 1.0) or 1.0,
            node_threads=resources.node_threads,
            group_costs=costs,
            compile=is_compiled(compute, stage, resources, num_items, gpus),
            calls_at_once=(GPU_SETTINGS if resources.device == "cuda" else CPU_SETTINGS).calls_at_once,
        )
        for index, (stage, resources) in enumerate(zip(plan.stages, allocation.stages, strict=True))
    )


def block_items(job: Job, num_items: int) -> int:
    """Return the items of a block in a run of so many."""
    return items_per_block(
        job.compute.items_per_task,
        job.decode.rows_per_batch,
        max(handed_on_bytes(job.model, job.plan, job.decode)),
        num_items,
        fastest_item_s(job.plan.stages),
        job.settings,
    )


def make_plan(compute: ComputeSettings, model: Model) -> ShardPlan:
    """Read the pinned plan, whose dtype is used if the configuration leaves it open, or make one by operations.

    Raises `ConfigError` if the plan file is missing, or made for other weights; `shards.ModelError` if it is no plan,
    or not one for this model.
    """
    if compute.plan is None:
        return plan_shards(
            model.config, compute.num_stages, dtype=compute.settled_dtype, model_fingerprint=model.fingerprint
        )
    plan = read_plan(compute.plan, model.folder, model.fingerprint, None if compute.dtype == "auto" else compute.dtype)
    check_plan(plan, model.config)
    if compute.stage and len(compute.stage) != len(plan.stages):
        raise ConfigError(
            f"plan {compute.plan}: it has {plural(len(plan.stages), 'stage')}, and the configuration "
            f"{plural(len(compute.stage), '[[stage]] entry', '[[stage]] entries')}; write one for each stage, or none"
        )
    return plan


def stage_threads(compute: ComputeSettings) -> int:
    """Return the torch threads of a stage on this machine."""
    return request_resources(compute, Available(hardware.num_cpus())).stages[0].num_threads


def check_int8(compute: ComputeSettings, model: Model) -> None:
    """Refuse int8 if it makes the model no faster or no smaller, as measured on this machine's device.

    On a cluster (`ray_address`) the stages' device isn't here, and nothing is refused; `embedder verify --dtype int8`
    on one of its nodes measures there. Raises `ConfigError` if it doesn't help; the message has the figures.
    """
    if compute.settled_dtype != "int8" or compute.ray_address is not None:
        return
    import torch

    from shards.int8_benefit import measure_int8_benefit

    may_be_cuda = compute.engine != "local" and compute.devices != {"cpu"}
    device = "cuda" if may_be_cuda and torch.cuda.is_available() else "cpu"
    refusal = measure_int8_benefit(model.folder, device, num_threads=stage_threads(compute)).refusal()
    if refusal is not None:
        raise ConfigError(f"dtype: {refusal}")


def handed_on_bytes(model: Model, plan: ShardPlan, decode: DecodeSpec | None = None) -> list[int]:
    """Return the bytes of one image with its caption as each step passes them on: pixels first, then over each cut.

    For a model of clips, those of a clip. `decode` includes what decode makes for further models; None if there are
    none.
    """
    vision = model.config.vision
    num_frames, pixels = (vision.inputs_per_row, vision.input_bytes(0)) if vision is not None else (1, 0)
    resizes = [each.resize for each in decode.further if each.column != "pixels"] if decode is not None else []
    pixels += sum(3 * max(each.image_size**2, each.most_patches * each.patch_size**2) for each in resizes if each)
    cuts = (num_frames * stage.cut_bytes_per_image + stage.cut_bytes_per_caption for stage in plan.stages)
    return [num_frames * pixels, *cuts]


def ray_store_bytes(
    batch_size: int | Literal["auto"], model: Model, plan: ShardPlan, settings: DeviceSettings, num_gpus: int = 1
) -> int:
    """Return the shared memory for a Ray that the run starts here, at most a quarter of memory (or the default).

    Each of `num_gpus` GPUs has room for what a device needs.
    """
    most_bytes = min(settings.object_store_bytes * num_gpus, max(OBJECT_STORE_BYTES, hardware.memory_bytes() // 4))
    rows_in_flight = settings.batches_in_flight * rows_per_batch(batch_size, settings) * num_gpus
    return object_store_bytes(sum(handed_on_bytes(model, plan)), rows_in_flight, most_bytes)


def decode_spec(rows: RowSettings, model: Model, rows_per_batch: int = CPU_ROWS) -> DecodeSpec:
    """Return the settings of the decode step."""
    rows = rows_of_clips(rows, model)
    clips, frames = model.config.preprocess.clips, rows.frames_per_segment
    if clips is not None and frames > clips.max_frames:
        raise ConfigError(
            f"frames_per_segment: {frames}; model {model.config.name!r} takes a segment's frames as one sequence, and "
            f"{clips.max_frames} at most; write no more, or a shorter segment_s"
        )
    return DecodeSpec(
        resize=resize_spec(model, rows.decode.settled_colour, frames) if model.config.vision is not None else None,
        limits=decode_limits(rows.decode),
        tokenizer_json=model.tokenizer_json,
        max_caption_tokens=model.config.preprocess.max_caption_tokens,
        segment_s=rows.segment_s,
        frames_per_segment=rows.frames_per_segment,
        frames_from_start=rows.frames_from_start,
        rows_per_batch=rows_per_batch,
        caption_prompt=model.config.preprocess.caption_prompt,
        caption_end_id=model.config.text.end_id if model.config.text is not None else None,
        web=rows.web,
        animations=rows.decode.animations,
        colour=rows.decode.settled_colour,
        medium_columns=rows.metadata.columns,
        caption_places=rows.captions.places,
        caption_languages=rows.captions.languages,
        num_end_tokens=model.config.num_end_tokens,
        clips=clips,
    )


def decode_limits(limits: DecodeConfig) -> DecodeLimits:
    """Return the limits on the decoding of one file."""
    return DecodeLimits(**{each.name: getattr(limits, each.name) for each in fields(DecodeLimits)})


def preprocessing_of(rows: RowSettings, model: Model) -> str:
    """Fingerprint all settings that turn an item's bytes into the towers' input."""
    return preprocess_fingerprint(
        model.config.preprocess,
        (model.tokenizer_json or "").encode(),
        rows.segment_s,
        rows_of_clips(rows, model).frames_per_segment,
        rows.decode.settled_colour,
    )


def store_info(rows: RowSettings, model: Model, dtype: str) -> StoreInfo:
    """Return the model and settings that a store made with this configuration is bound to."""
    return StoreInfo(
        model=model.uri,
        model_fingerprint=model.fingerprint,
        preprocess_fingerprint=preprocessing_of(rows, model),
        segment_s=rows.segment_s,
        frames_per_segment=rows_of_clips(rows, model).frames_per_segment,
        dtype=dtype,
        colour=rows.decode.settled_colour,
        searched="text" if model.config.vision is None else "image",
        steps=step_fingerprints(rows.step),
        step_columns=new_columns(rows.step),
        medium_columns=rows.metadata.columns,
        libraries=vector_libraries(),
    )
