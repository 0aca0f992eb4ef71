"""`embedder model`: a checkpoint becomes a model folder, a folder is described, a delta is applied."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from embedder.cli.options import ModelFolder, ReadConfig, command
from embedder.cli.results import Result, new_table
from embedder.config import RunConfig
from embedder.errors import ConfigError
from embedder.quantities import MIB, plural

if TYPE_CHECKING:
    from shards.model_config import ModelConfig

NO_TOWER = "none"

app = typer.Typer(no_args_is_help=True, help="Bring a checkpoint, see what a folder holds.")


@app.command("import")
@command
def model_import(
    read: ReadConfig,
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint of transformers, open_clip or timm.")],
    out: ModelFolder,
    text: Annotated[str | None, typer.Option(help="Text tower's folder that joins a timm checkpoint.")] = None,
    albert: Annotated[str | None, typer.Option(hidden=True)] = None,
    embedding_dim: Annotated[int, typer.Option(help="Width of the shared space, for fresh projections.")] = 256,
    reranker: Annotated[
        bool, typer.Option("--reranker", help="A re-ranker of Qwen3-VL-Reranker's form, for `search --reranker`.")
    ] = False,
    join_captions: Annotated[
        bool, typer.Option("--join-captions", help="Embed a picture with its caption, as one item.")
    ] = False,
    config_only: Annotated[bool, typer.Option("--config-only", help="Read no weights: enough to plan with.")] = False,
) -> Result:
    """Turn a checkpoint into a model folder."""
    read()

    from embedder.storage.model_download import model_name
    from shards.convert import import_checkpoint, import_config, import_reranker, import_timm_and_text
    from shards.model_summary import read_import_record

    if text is not None and albert is not None:
        raise ConfigError("--albert is the old name of --text; give only --text")
    joined = text if text is not None else albert
    _check_options(joined, is_config_only=config_only, joins_captions=join_captions, is_reranker=reranker)
    if config_only:
        model = import_config(_checkpoint(source, config_only=True), out, name=model_name(source))
        planned = f"only config.json, without weights and tokeniser; plan with it: embedder plan --model {out}"
        return Result({"out": out, "trained": model.trained}, [f"model folder: {out}", planned])
    if reranker:
        model = import_reranker(_checkpoint(source), out, name=model_name(source))
        return Result({"out": out, "trained": model.trained}, [f"re-ranker: {out}"])
    if joined is None:
        model = import_checkpoint(_checkpoint(source), out, name=model_name(source), join_captions=join_captions)
    else:
        model = import_timm_and_text(_checkpoint(source), _checkpoint(joined), out, embedding_dim)
    shown: list[RenderableType] = [f"model folder: {out}"]
    if albert is not None:
        shown.append("--albert is called --text now; the old name goes with the next release")
    shown += _import_notes(model, out, is_joined=joined is not None)
    shown += read_import_record(out).get("decisions", [])
    return Result({"out": out, "trained": model.trained}, shown)


def _check_options(joined: str | None, *, is_config_only: bool, joins_captions: bool, is_reranker: bool) -> None:
    if is_reranker and (is_config_only or joined is not None or joins_captions):
        raise ConfigError(
            "--reranker imports one whole checkpoint; leave out --config-only, --text and --join-captions"
        )
    if joins_captions and (joined is not None or is_config_only):
        raise ConfigError(
            "--join-captions is for a whole checkpoint whose pictures pass through the layers of its texts"
        )
    if is_config_only and joined is not None:
        raise ConfigError("--config-only reads one checkpoint's configuration, and --text joins two; give one")


def _checkpoint(source: str, *, config_only: bool = False) -> Path:
    """Find the folder of a checkpoint; given a file of weights, the error says what is missing next to it."""
    from embedder.storage.model_download import resolve_checkpoint
    from shards.convert import find_checkpoint

    if Path(source).expanduser().is_file():
        return find_checkpoint(source)
    return resolve_checkpoint(source, config_only=config_only)


def _import_notes(model: "ModelConfig", out: Path, *, is_joined: bool) -> list[str]:
    """Return lines on what an imported model can't do yet; `is_joined` is whether `--text` joined its towers."""
    from shards.model_summary import fresh_towers, untrained_reason

    notes = []
    if is_joined:
        notes.append("its projections are fresh: search with it means nothing before training")
    if fresh_towers(out) or not (is_joined or model.trained):
        notes.append(f"{untrained_reason(out)}: search with it means nothing before training")
    if model.preprocess.joins_captions:
        notes.append("a picture's vector is of the picture and its caption; a query is still a picture or a text")
    if model.text is None:
        notes.append(
            "it has only a vision tower: it embeds images, and finds them by images; of a timm checkpoint, --text DIR "
            "joins a text tower, and training makes it find images by words"
        )
    if model.vision is None:
        notes.append(
            "it has only a text tower: it embeds captions, and finds them by words; --text DIR of an import joins it "
            "to a timm checkpoint, and training makes it find images"
        )
    return notes


@app.command("info")
@command
def model_info(
    read: ReadConfig,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Model folder, or a delta over one.")],
) -> Result:
    """Print towers, parameters, bytes and fingerprints."""
    run = read({"model": folder})

    from embedder.storage.model_download import resolve_model
    from shards.model_summary import is_delta

    found = resolve_model(run.required_model)
    return _delta_info(found) if is_delta(found) else _folder_info(found, run)


@app.command("apply-delta")
@command
def model_apply_delta(
    read: ReadConfig,
    base: Annotated[str, typer.Argument(metavar="BASE", help="Model folder that the delta was trained over.")],
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="Folder that `embedder train` wrote the layers into.")],
    out: ModelFolder,
) -> Result:
    """Make a model folder of a base and the layers that somebody trained over it; both stay as they are."""
    read()

    from embedder.storage.model_download import resolve_model
    from shards.delta import apply_delta
    from shards.fingerprint import model_fingerprint

    folder = apply_delta(resolve_model(base), delta, out)
    data = {"out": out, "base": base, "delta": delta, "model_fingerprint": model_fingerprint(folder)}
    return Result(data, [f"model folder: {out}"])


def _folder_info(folder: Path, config: RunConfig) -> Result:
    """Describe a model folder; segments, frames and colour of the configuration count in the preprocessing."""
    from shards.fingerprint import preprocess_fingerprint
    from shards.model_summary import describe_model, read_import_record

    summary = describe_model(folder)
    model = summary.config
    tokenizer = (folder / "tokenizer.json").read_bytes() if summary.tokenizer_fingerprint else b""
    fingerprints = {
        "model": summary.model_fingerprint,
        "tokenizer": summary.tokenizer_fingerprint,
        "preprocess": preprocess_fingerprint(
            model.preprocess,
            tokenizer,
            config.segment_s,
            model.clip_frames or config.frames_per_segment,
            config.decode.settled_colour,
        ),
    }
    sizes = [(part.name, part.num_parameters, part.size_bytes) for part in summary.parts]
    sizes.append(("all", summary.num_parameters, summary.size_bytes))
    rows = [(name, f"{num:,}", f"{size_bytes / MIB:.2f}") for name, num, size_bytes in sizes]
    shown: list[RenderableType] = [
        f"{model.name}: {_training(summary.untrained)}; {_describe_outputs(model)}",
        f"vision: {model.vision.describe() if model.vision is not None else NO_TOWER}",
        f"text: {_describe_text(model)}",
        new_table("part", "parameters", "MiB on disk", rows=rows),
        f"dtype on disk {', '.join(summary.dtypes)}, in {plural(summary.num_files, 'file')}",
        "fingerprints: " + ", ".join(f"{name} {value}" for name, value in fingerprints.items()),
    ]
    record = read_import_record(folder)
    if record:
        rows = [(each["file"], each["use"], each["what"]) for each in record["files"]]
        shown += [new_table("imported from", "use", "what", rows=rows), *record["decisions"]]
    data = {"fingerprints": fingerprints, "config": json.loads(model.to_json()), "import": record or None}
    return Result(asdict(replace(summary, config=None)) | data, shown)  # type: ignore[arg-type]


def _describe_outputs(model: "ModelConfig") -> str:
    if model.preprocess.scores_queries:
        return "a re-ranker: it scores the hits of `embedder search --rerank 50 --reranker DIR`, and embeds nothing"
    cut = f", cut from {model.embedding_dim}" if model.vector_dim < model.embedding_dim else ""
    return f"embeddings of {model.vector_dim}{cut}"


def _training(untrained: str | None) -> str:
    return "trained" if untrained is None else f"untrained: {untrained}, and search with it means nothing yet"


def _describe_text(model: "ModelConfig") -> str:
    if model.text is None:
        return NO_TOWER
    return f"{model.text.describe()}, captions up to {model.preprocess.max_caption_tokens} tokens, longer ones are cut"


def _delta_info(folder: Path) -> Result:
    from shards.model_summary import describe_delta

    delta = describe_delta(folder)
    counts = delta.parameters | {"all": delta.num_parameters}
    shown: list[RenderableType] = [
        f"{delta.name}: a delta, {delta.size_bytes / MIB:.2f} MiB, over the base {delta.base_fingerprint}",
        new_table("part", "parameters", rows=[(part, f"{num:,}") for part, num in counts.items()]),
        f"dtype on disk {', '.join(delta.dtypes)}",
        f"a model of it: embedder model apply-delta BASE {folder} --out DIR",
    ]
    return Result({"kind": "delta", **asdict(delta), "num_parameters": delta.num_parameters}, shown)
