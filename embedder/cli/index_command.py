"""`embedder index`: a store's index is built, updated, listed and rolled back."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from embedder.cli.options import ModelName, ReadConfig, StoreUri, command, parse_size
from embedder.cli.results import Result, new_table
from embedder.cli.store_access import write_access
from embedder.quantities import MIB, duration_text, percent, plural, size_text
from embedder.store.files import StoreFiles
from index.manifest import Manifest

if TYPE_CHECKING:
    from embedder.store.layout import Current

Force = Annotated[bool, typer.Option("--force", help="Publish it though it finds less than the last; the floor stays.")]
Number = Annotated[int | None, typer.Option("--to", min=1, help="Version that `status` shows; else the one before.")]

app = typer.Typer(no_args_is_help=True, help="Build an index, see its versions, go back to one.")


@app.command()
@command
def build(
    read: ReadConfig,
    store: StoreUri = None,
    model: ModelName = None,
    kind: Annotated[str | None, typer.Option(help="auto, flat, hnsw, ivf, or a design that `status` shows.")] = None,
    memory: Annotated[str | None, typer.Option(help="The most that the index may take in memory, as 2GiB.")] = None,
    latency_ms: Annotated[float | None, typer.Option(help="The most that one query may take on one thread.")] = None,
    recall: Annotated[
        float | None, typer.Option(help="Least share of the exact ten nearest that it must find.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Measure all designs, and show what was chosen from.")
    ] = False,
    on_missed: Annotated[
        str | None, typer.Option(help="Where no design keeps the limits: publish the nearest, keep the last, or fail.")
    ] = None,
    force: Force = False,
) -> Result:
    """Build an index of the published embeddings, and publish it with them if it is good enough."""
    asked = {"kind": kind, "memory_bytes": parse_size("--memory", memory), "latency_ms": latency_ms, "recall": recall}
    asked |= {"on_missed": on_missed}
    run = read({"store": store}, [f"index.{key}={value}" for key, value in asked.items() if value is not None])

    from embedder.ingest.build_index import build_index

    before = _load_published(StoreFiles(run.required_store), model)[1].index
    number, manifest = build_index(run, model=model or "", force=force, measure_all=explain)
    did = "published before" if number == before else f"built in {duration_text(round(manifest.build_s, 1))}"
    shown: list[RenderableType] = [f"{_describe(number, manifest)}, {did}"]
    if manifest.missed:
        shown.append(f"no design keeps the constraints; this one, the nearest, misses {manifest.missed}")
    if explain:
        shown.insert(0, _trials_table(manifest))
    return Result(_data(number, manifest), shown)


@app.command()
@command
def update(read: ReadConfig, store: StoreUri = None, model: ModelName = None) -> Result:
    """Bring the index up to the published embeddings: add what is new, mask what is gone."""
    run = read({"store": store})

    from embedder.store_index.index_versions import manifest_of
    from embedder.store_index.keep_index import update_store_index

    before = _load_published(StoreFiles(run.required_store), model)[1].index
    with write_access(run) as store_files:
        files, _ = _load_published(store_files, model)
        number = update_store_index(files, run.index)
    manifest = manifest_of(files, number)
    text = f"index {number} holds what is published: nothing to update" if number == before else ""
    data = {"updated": number != before, "index": number} | (manifest.model_dump() if manifest else {})
    return Result(data, [text or _describe(number, manifest)] if manifest else [text])


@app.command()
@command
def status(read: ReadConfig, store: StoreUri = None, model: ModelName = None) -> Result:
    """List the versions of the index, and which one is published."""
    from embedder.store_index.index_versions import list_manifests

    files, current = _load_published(StoreFiles(read({"store": store}).required_store), model)
    columns = ("version", "design", "vectors", "masked", "recall@10", "ms", "MiB", "embeddings", "built at")
    table = new_table(*columns, "published")
    versions = []
    for number, manifest in list_manifests(files):
        is_published = number == current.index
        versions.append(_data(number, manifest) | {"published": is_published})
        table.add_row(
            str(number),
            manifest.design,
            f"{manifest.num_vectors:,}",
            percent(manifest.num_masked / manifest.num_rows),
            f"{manifest.recall_at_10:.3f}",
            f"{manifest.latency_ms:.2f}",
            f"{manifest.size_bytes / MIB:.1f}",
            str(manifest.embeddings_version),
            manifest.built_at[:16].replace("T", " "),
            "yes" if is_published else "",
        )
    shown: RenderableType = table if versions else "no index yet: search is exact; `embedder index build` makes one"
    return Result({"versions": versions, "published": current.index}, [shown])


@app.command()
@command
def rollback(read: ReadConfig, store: StoreUri = None, model: ModelName = None, number: Number = None) -> Result:
    """Publish an earlier index of the same rows again."""
    run = read({"store": store})

    from embedder.store_index.keep_index import rollback_index

    with write_access(run) as store_files:
        files, _ = _load_published(store_files, model)
        chosen, manifest = rollback_index(files, number)
    return Result(_data(chosen, manifest), [f"published again: {_describe(chosen, manifest)}"])


def _load_published(files: StoreFiles, model: str | None) -> "tuple[StoreFiles, Current]":
    """Return the view of a model, and what is published of it; raises `StoreError` if nothing is."""
    from embedder.store.store_info import read_published
    from embedder.store.tables.models import find_model

    return find_model(files, read_published(files), model or "")


def _describe(number: int, manifest: Manifest) -> str:
    recall = "exact" if manifest.design == "Flat" else f"recall@10 {manifest.recall_at_10:.3f}"
    return (
        f"index {number}: {manifest.design}, {plural(manifest.num_vectors, 'vector')} x {manifest.dim}, {recall}, "
        f"{size_text(manifest.size_bytes)}"
    )


def _trials_table(manifest: Manifest) -> Table:
    """Lay out the designs that were measured before the choice; those on the Pareto front are marked."""
    table = new_table("design", "recall@10", "ms", "MiB", "build, s", "front", "verdict")
    for trial in manifest.trials:
        table.add_row(
            trial.design,
            f"{trial.recall_at_10:.3f}",
            f"{trial.expected_latency_ms:.2f}",
            f"{trial.expected_bytes / MIB:.1f}",
            f"{trial.build_s:.1f}",
            "*" if trial.is_efficient else "",
            trial.verdict,
        )
    return table


def _data(number: int, manifest: Manifest) -> dict[str, Any]:
    return {"index": number, **manifest.model_dump()}
