"""`embedder train`: list, split, prepare the model and the decoding, run the loop, report."""

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from embedder.batch_schema import CARRIED
from embedder.config import RunConfig
from embedder.errors import ConfigError, SourceError, check_argument
from embedder.executors.cluster_address import find_cluster
from embedder.executors.job import decode_spec
from embedder.executors.signals import stop_on_signals
from embedder.models.model_folder import Model, open_model
from embedder.observability.run_tracking import parameters_of
from embedder.observability.trackers import track_run
from embedder.placement import hardware
from embedder.placement.fleet import Available
from embedder.plugins.train.batches import Decode, ExampleCache, ExampleCounts, numbered_pairs
from embedder.plugins.train.decode_stream import choose_decode_engine, decode_stream
from embedder.plugins.train.examples import TAG_SEPARATOR, ExampleSpec, as_texts
from embedder.plugins.train.items import Items, list_items, split_items
from embedder.plugins.train.loop import Loop, PreparedTraining, ShowSteps, no_steps
from embedder.plugins.train.model_card import model_card
from embedder.plugins.train.sampler import num_batches
from embedder.plugins.train.teacher import Teacher, join_teacher, teacher_store
from embedder.plugins.train.train_backends import training_setup
from embedder.plugins.train.train_config import TrainConfig
from embedder.plugins.train.train_outputs import Outputs
from embedder.plugins.train.train_progress import (
    TrainProgress,
    check_identity,
    from_plain,
    identity_of,
    with_warm_up_of,
)
from embedder.plugins.train.train_report import TrainReport
from embedder.plugins.train.train_worker import allocate_workers
from embedder.plugins.train.trainer.prune import prune_model
from embedder.plugins.train.trainer.train_checkpoint import load_checkpoint
from embedder.plugins.train.trainer.trainer import Trainer
from embedder.plugins.train.validation import Validation
from embedder.quantities import plural
from embedder.sources.captions import read_caption
from embedder.sources.source_errors import FetchError
from shards.tokenizer import check_tokenizer, parse_tokenizer, read_tokenizer
from shards.towers.tower_kinds import TextTower
from shards.train_tokenizer import train_tokenizer

LOG = logging.getLogger(__name__)


def train(config: TrainConfig, *, resume: bool = False, show_steps: ShowSteps = no_steps) -> TrainReport:
    """Train a model as `embedder train` does; `outputs` lists the files below `config.out`.

    Args:
        config: the run.
        resume: continue from the checkpoint in `out`.
        show_steps: display of the progress.

    Raises:
        ConfigError: there is a checkpoint without `resume`, none with `resume`, or one of another run.
        SourceError: a source can't be listed, or leaves nothing to train on.
        shards.ModelError: the model folder is not one, or the settings don't fit it.
        RunFailedError: a signal came, or more than `max_reject_fraction` was rejected.
    """
    check_argument("embedder.train: config", config, TrainConfig, "one of embedder.load_train_config")
    started_s = time.monotonic()
    torch.set_num_threads(config.num_threads or hardware.num_cpus())
    outputs = Outputs(config.out)
    _check_out(outputs, resume)
    config = config.model_copy(update={"ray_address": find_cluster(config.ray_address, config.engine)})
    train_items, held_out = split_items(list_items(config), config)
    with outputs.lock():
        taught = None
        if config.teacher is not None:
            taught = join_teacher(train_items, teacher_store(config, config.teacher, outputs), config.teacher)
            train_items = taught.items
        prepared = _prepare(config, outputs, train_items, held_out, resume)
        LOG.info(f"{plural(len(train_items), 'item')} to train on, {len(held_out):,} held out")
        LOG.info(f"engine {prepared.choice.engine}: {prepared.choice.reason}")
        with track_run(config.tracker, "embedder train") as tracker:
            name = f"train {outputs.root.name}"
            tracker.begin(name, parameters_of(config), {"embedder.out": str(outputs.root)}, outputs.write_tracker)
            cache, device = _run(replace(prepared, tracker=tracker), show_steps)
            report = _report(prepared, taught, cache, device, time.monotonic() - started_s)
            outputs.write_text(outputs.report, report.model_dump_json(indent=2) + "\n")
            num_parameters = sum(each.numel() for each in prepared.trainer.averaged.parameters())
            outputs.write_card(model_card(report, prepared.config, prepared.trainer.config, num_parameters))
            tracker.attach(outputs.tracked_files)
            tracker.end(succeeded=True)
        return report


def _check_out(outputs: Outputs, resume: bool) -> None:
    if resume and not outputs.checkpoint.exists():
        raise ConfigError(f"out {outputs.root}: no checkpoint to resume; leave --resume out to begin")
    if not resume and outputs.checkpoint.exists():
        raise ConfigError(f"out {outputs.root}: a run is there already; continue with --resume, or name another folder")


def _prepare(
    config: TrainConfig, outputs: Outputs, train_items: Items, held_out: Items, resume: bool
) -> PreparedTraining:
    state = load_checkpoint(outputs.checkpoint) if resume else None
    if state is not None:
        config = with_warm_up_of(config, state)
    choice = choose_decode_engine(config, len(train_items), hardware.num_cpus(), has_ray=find_spec("ray") is not None)
    _check_workers(config, len(train_items))
    trainer, spec = _trainer(config, outputs, train_items)
    identity = identity_of(config, train_items, held_out)
    progress = TrainProgress(counts=ExampleCounts(len(train_items) + len(held_out)))
    if state is not None:
        check_identity(state["identity"], identity, str(outputs.checkpoint))
        trainer.load_state_dict(state["trainer"])
        progress = from_plain(state["standing"])
    outputs.rewind_metrics(trainer.num_steps_done)
    return PreparedTraining(config, outputs, train_items, held_out, trainer, spec, progress, identity, choice)


def _check_workers(config: TrainConfig, num_items: int) -> None:
    """Refuse (ConfigError) several workers that would have nothing to share, or that this machine can't start."""
    if config.num_workers == 1:
        return
    if num_items < config.batch_size:
        raise ConfigError(
            f"num_workers = {config.num_workers}: {plural(num_items, 'item')} to train on fill no batch of "
            f"{config.batch_size}; lower batch_size, or train with one worker"
        )
    if config.ray_address is None:
        allocate_workers(config, Available(hardware.num_cpus(), torch.cuda.device_count()))


def _trainer(config: TrainConfig, outputs: Outputs, items: Items) -> tuple[Trainer, ExampleSpec]:
    device = _device(config)
    of_teacher = None
    if config.teacher is not None and items.teacher is not None:
        of_teacher = config.teacher.settings, items.teacher.dim
    if (architecture := config.architecture) is None:
        model = open_model(str(config.model))
        model.config.check_trainable()
        _check_layers(config, model)
        folder = _start(config, model.folder, outputs)
        trainer = Trainer(folder, config.train, device=device, teacher=of_teacher)
    else:
        tokenizer_json = _tokenizer(config, architecture.text, outputs, items)
        model = Model(str(outputs.root), outputs.root, architecture.as_model(), tokenizer_json, fingerprint="")
        trainer = Trainer(model.config, config.train, device=device, tokenizer_json=tokenizer_json, teacher=of_teacher)
    decode = decode_spec(RunConfig(decode=config.decode, web=config.web).rows, model)
    return trainer, ExampleSpec(decode, config.texts, config.tag_sets)


def _start(config: TrainConfig, folder: Path, outputs: Outputs) -> Path:
    """Model folder to begin with: the one given, or a pruned copy in the run's folder if only some layers are kept."""
    if (kept := config.kept_layers) is None:
        return folder
    if not outputs.checkpoint.exists():  # an attempt that took no step may have begun with other layers
        shutil.rmtree(outputs.start, ignore_errors=True)
    if not outputs.start.exists():
        prune_model(folder, outputs.start, dict(kept))
    return outputs.start


def _check_layers(config: TrainConfig, model: Model) -> None:
    """Refuse (ConfigError) ranges beyond the model's layers."""
    depths = model.config.num_layers
    for tower, layers in (("vision", config.train.vision_layers), ("text", config.train.text_layers)):
        if layers.stop > depths[tower]:
            raise ConfigError(
                f"train.{tower}_layers = [{layers.start}, {layers.stop}]: {model.folder} has {depths[tower]} such "
                f"layers; write a range within [0, {depths[tower]}]"
            )


def _device(config: TrainConfig) -> str:
    """Torch device of this process, ConfigError if it isn't there; training workers have their own."""
    if config.num_workers > 1:
        return "cpu"
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f'device = {config.device!r}: this machine has no CUDA device; write "cpu" or "auto"')
    return config.device


def _tokenizer(config: TrainConfig, text_tower: TextTower, outputs: Outputs, items: Items) -> str:
    """Tokeniser given, or one trained on the captions; kept in the run's folder.

    Raises `shards.ModelError` if the file can't be read or used; `ConfigError` if the captions have more characters
    than the vocabulary has room for; `SourceError` if no item has a caption.
    """
    if outputs.checkpoint.exists() and outputs.tokenizer.exists():  # an attempt without a step may have had another
        return outputs.tokenizer.read_text(encoding="utf-8")
    if config.tokenizer is not None:
        text = read_tokenizer(Path(config.tokenizer))
    else:
        captions = list(_captions(items, config))
        if not captions:
            raise SourceError(
                "no item has a caption; name `columns.caption` or `texts`, or put .txt files next to images"
            )
        text = train_tokenizer(captions, text_tower.num_vocabulary)
        if (found := len(parse_tokenizer(text, "captions").get_vocab())) > text_tower.num_vocabulary:
            raise ConfigError(
                f"architecture.text.vocab_size = {text_tower.num_vocabulary}: a tokeniser of the captions has {found} "
                f"tokens if it has each of their characters; raise it to {found} at least, or give `tokenizer`"
            )
    where = config.tokenizer or "the tokeniser made from the captions"
    check_tokenizer(parse_tokenizer(text, where), text_tower, where)
    outputs.write_text(outputs.tokenizer, text)
    return text


def _captions(items: Items, config: TrainConfig) -> Iterator[str]:
    """Captions of the items, as they will be tokenised; a caption file that can't be read gives none."""
    columns = ["caption", "caption_uri", *(CARRIED + name for name in (*config.texts, *config.tag_sets))]
    for row in items.listing.select(columns).to_pylist():
        yield from as_texts(row["caption"])
        if row["caption_uri"] is not None:
            with suppress(FetchError):  # the decode step meets it again, and rejects the item
                yield read_caption(row["caption_uri"])
        for name in config.texts:
            yield from as_texts(row[CARRIED + name])
        yield from filter(None, (TAG_SEPARATOR.join(as_texts(row[CARRIED + name])) for name in config.tag_sets))


def _run(prepared: PreparedTraining, show_steps: ShowSteps) -> tuple[ExampleCache, str]:
    """Run the loop; return the cache of examples and the device, for the report."""
    config, trainer, progress = prepared.config, prepared.trainer, prepared.progress
    image_size = trainer.config.preprocess.image_size
    with decode_stream(config, prepared.spec, prepared.choice) as decode:
        validation = _validation(prepared.held_out, decode, image_size, progress.counts)
        cache = ExampleCache(decode, image_size, config.cache_bytes)
        stop = threading.Event()
        with (
            stop_on_signals(stop.set),
            show_steps(config.train.num_steps, trainer.num_steps_done) as on_step,
            training_setup(prepared, cache, validation, stop.is_set) as setup,
        ):
            Loop(prepared, setup, on_step, stop.is_set).run()
    if config.train.what == "layers":
        shutil.rmtree(prepared.outputs.delta, ignore_errors=True)
        trainer.export_delta(prepared.outputs.delta, prepared.outputs.root.name)
    return cache, setup.device


def _validation(held_out: Items, decode: Decode, image_size: int, counts: ExampleCounts) -> Validation | None:
    """Decode the held-out items once, and add them to the counts; None if none of them is whole."""
    cache, own = ExampleCache(decode, image_size, cache_bytes=0), ExampleCounts(len(held_out))
    with closing(numbered_pairs(held_out, cache, own)) as pairs:
        whole = [pair for pair in pairs if pair.example.is_pair]
    if counts.num_seen:  # a resumed run has seen them before
        own.num_seen = 0
    counts.add(own)
    if not whole:
        LOG.info("no whole item is held out: no R@k is measured, and the last model is the one that is kept")
        return None
    return Validation(whole)


def _report(
    prepared: PreparedTraining, taught: Teacher | None, cache: ExampleCache, device: str, wall_s: float
) -> TrainReport:
    config, outputs, progress = prepared.config, prepared.outputs, prepared.progress
    num_steps, counts = prepared.trainer.num_steps_done, progress.counts
    return TrainReport(
        model=str(outputs.model),
        last=str(outputs.last),
        base=config.model,
        delta=str(outputs.delta) if config.train.what == "layers" else None,
        loss=config.train.loss,
        what=config.train.what,
        engine=prepared.choice.engine,
        engine_reason=prepared.choice.reason,
        device=device,
        num_workers=config.num_workers,
        num_items=len(prepared.train),
        num_held_out=len(prepared.held_out),
        num_rejected=len(counts.rejects),
        teacher=None if taught is None else taught.report.model_copy(update={"num_stale": len(counts.stale)}),
        num_unpaired=len(counts.unpaired),
        num_steps=num_steps,
        num_epochs=num_steps / num_batches(len(prepared.train), config.batch_size),
        best=progress.best,
        latest=progress.latest,
        num_cached=cache.num_cached,
        cached_bytes=cache.cached_bytes,
        wall_s=wall_s,
        train_s=progress.elapsed_s,
    )
