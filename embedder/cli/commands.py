"""What each command does: a configuration in, a result out, for a person to read and as plain data."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table

from embedder.config import RunConfig
from embedder.errors import ConfigError

if TYPE_CHECKING:
    from embedder.planning.options import PlanOptions
    from embedder.retrieval.store_api import Store
    from embedder.store.files import StoreFiles
    from embedder.training.config import TrainConfig


@dataclass(frozen=True)
class Result:
    """What a command found: `data` for `--json`, `shown` for the terminal."""

    data: dict[str, Any]
    shown: list[RenderableType] = field(default_factory=list)


def source_override(
    path: str | None,
    kind: str | None,
    columns: Mapping[str, str | None],
    carryover: list[str] | None,
    patterns: Mapping[str, list[str]] | None = None,
) -> list[dict[str, Any]] | None:
    """The one source that the command line describes, as the configuration file would.

    Args:
        path: of the source; none where it is the file's.
        kind: of the source.
        columns: what each named column of a table holds.
        carryover: columns to copy.
        patterns: `include` and `exclude`.

    Raises:
        ConfigError: options describe a source that is not given.
    """
    named = {name: column for name, column in columns.items() if column is not None}
    if path is None:
        if kind or named or carryover or any((patterns or {}).values()):
            raise ConfigError(
                "--kind, the column options, --include and --exclude describe SOURCE; give SOURCE, or use the file's "
                "[[source]]"
            )
        return None
    source: dict[str, Any] = {"path": path, "columns": named, "carryover": carryover or [], **(patterns or {})}
    return [source | ({"kind": kind} if kind else {})]


def embed(config: RunConfig, *, retry_rejects: bool = False, forced: Collection[str] = ()) -> Result:
    """Run the main job."""
    from embedder.cli.render import TerminalWatcher, report_parts
    from embedder.ingest.embed import embed as run_embed

    report = run_embed(config, TerminalWatcher(), retry_rejects=retry_rejects, forced=forced)
    return Result(json.loads(report.model_dump_json()), report_parts(report))


def train(config: "TrainConfig", *, resume: bool = False) -> Result:
    """Train a model."""
    from embedder.cli.render_training import TrainingWatcher, train_parts
    from embedder.training.run import train as run_training

    report = run_training(config, TrainingWatcher(), resume=resume)
    return Result(report.model_dump(), train_parts(report))


def plan(config: RunConfig, options: "PlanOptions") -> Result:
    """Plan the cut and its placement from the model's config.json."""
    from embedder.cli.render_plan import answer_parts
    from embedder.engine import hardware
    from embedder.planning.answer import make_answer

    answer = make_answer(config, _required_model(config), options)
    text = answer.plan.to_json()
    shown = answer_parts(answer, explain=options.explain)
    if options.devices is None and (num_gpus := hardware.num_gpus()):
        shown.append(
            f"for CPU cores, without the {num_gpus} GPU(s) here; to place stages on them, name them: --devices"
        )
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
        shown.append(f"plan: {options.out}")
    data = json.loads(text)
    if answer.comparison is not None:
        data["equal_parts_items_per_s"] = answer.comparison.equal_parts
    if answer.what_if is not None:
        data["what_if"] = asdict(answer.what_if)
    return Result(data, shown)


def verify(config: RunConfig, num_items: int, tolerance: float | None, min_cosine: float | None, device: str) -> Result:
    """Compare the stages with the unsplit towers."""
    from embedder.cli.render_verification import verification_data, verification_parts
    from embedder.verification.verify import verify as run_verify

    found = run_verify(config, num_items=num_items, max_difference=tolerance, min_cosine=min_cosine, device=device)
    return Result(verification_data(found), verification_parts(found))


def model_import(source: str, out: Path, albert: str | None, embedding_dim: int) -> Result:
    """Make a model folder of a checkpoint."""
    from shards.convert import import_timm_and_albert, import_vision_text_dual_encoder

    if albert is None:
        model = import_vision_text_dual_encoder(source, out)
    else:
        model = import_timm_and_albert(source, albert, out, embedding_dim)
    shown: list[RenderableType] = [f"model folder: {out}"]
    if not model.trained:
        shown.append("its projections are fresh: search with it means nothing before training")
    return Result({"out": out, "trained": model.trained}, shown)


def model_apply_delta(base: str, delta: Path, out: Path) -> Result:
    """Make a model folder of a base and a delta."""
    from shards.fingerprint import model_fingerprint
    from shards.model_folder import resolve_model
    from shards.training.export import apply_delta

    folder = apply_delta(resolve_model(base), delta, out)
    data = {"out": out, "base": base, "delta": delta, "model_fingerprint": model_fingerprint(folder)}
    return Result(data, [f"model folder: {out}"])


def _delta_info(folder: Path) -> Result:
    """Describe a delta."""
    from shards.delta import describe_delta

    delta = describe_delta(folder)
    table = _table("part", "parameters")
    for part, num_parameters in delta.parameters.items():
        table.add_row(part, f"{num_parameters:,}")
    table.add_row("all", f"{delta.num_parameters:,}")
    shown: list[RenderableType] = [
        f"{delta.name}: a delta, {delta.size_bytes / 2**20:.2f} MiB, over the base {delta.base_fingerprint}",
        table,
        f"dtype on disk {', '.join(delta.dtypes)}",
        f"a model of it: embedder model apply-delta BASE {folder} --out DIR",
    ]
    return Result({"kind": "delta", **asdict(delta), "num_parameters": delta.num_parameters}, shown)


def model_info(config: RunConfig) -> Result:
    """Describe a model folder, or a delta."""
    from shards.delta import is_delta
    from shards.fingerprint import preprocess_fingerprint
    from shards.model_folder import resolve_model
    from shards.summary import describe_model

    folder = resolve_model(_required_model(config))
    if is_delta(folder):
        return _delta_info(folder)
    summary = describe_model(folder)
    model = summary.config
    tokenizer = (folder / "tokenizer.json").read_bytes() if summary.tokenizer_fingerprint else b""
    fingerprints = {
        "model": summary.model_fingerprint,
        "tokenizer": summary.tokenizer_fingerprint,
        "preprocess": preprocess_fingerprint(model.preprocess, tokenizer, config.segment_s, config.frames_per_segment),
    }
    table = _table("part", "parameters", "MiB on disk")
    for part in summary.parts:
        table.add_row(part.name, f"{part.num_parameters:,}", f"{part.size_bytes / 2**20:.2f}")
    table.add_row("all", f"{summary.num_parameters:,}", f"{summary.size_bytes / 2**20:.2f}")
    vision, text = model.vision, model.text
    shown: list[RenderableType] = [
        f"{model.name}: {'trained' if model.trained else 'untrained: search with it means nothing yet'}; "
        f"embeddings of {model.embedding_dim}",
        f"vision: ViT {vision.depth} layers x {vision.width}, {vision.image_size} px in patches of {vision.patch_size}",
        f"text: ALBERT {text.num_hidden_layers} layers x {text.hidden_size}, {text.vocab_size:,} tokens, "
        f"captions up to {model.preprocess.max_caption_tokens}",
        table,
        f"dtype on disk {', '.join(summary.dtypes)}, in {summary.num_files} file(s)",
        "fingerprints: " + ", ".join(f"{name} {value}" for name, value in fingerprints.items()),
    ]
    data = {"fingerprints": fingerprints, "config": json.loads(model.to_json())}
    return Result(asdict(replace(summary, config=None)) | data, shown)  # type: ignore[arg-type]


def doctor(config: RunConfig) -> Result:
    """Look at this machine."""
    from embedder.cli.doctor import examine

    data = examine(config)
    table = _table("what", "found")
    for name, value in data.items():
        table.add_row(name, str(value))
    return Result(data, [table])


def open_files(config: RunConfig) -> "StoreFiles":
    """The store that the configuration names.

    Raises:
        ConfigError: it names none.
    """
    from embedder.store.files import StoreFiles

    if config.store is None:
        raise ConfigError("no store: give --store URI, or `store` in the configuration file")
    return StoreFiles(config.store)


def open_published(config: RunConfig, version: str | None = None) -> "Store":
    """What that store has published, or had by some run."""
    from embedder.retrieval.store_api import Store

    return Store(open_files(config), config.model, version)


def _required_model(config: RunConfig) -> str:
    if config.model is None:
        raise ConfigError("no model: give --model DIR, or `model` in the configuration file")
    return config.model


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
