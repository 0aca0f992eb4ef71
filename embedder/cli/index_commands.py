"""What the commands of index_cli do: a configuration in, a result out."""

from typing import Any

from rich.console import RenderableType
from rich.table import Table

from embedder.cli.commands import Result, open_files
from embedder.cli.store_commands import MIB, new_table, writing
from embedder.config import RunConfig
from index.manifest import Manifest


def build(config: RunConfig, *, explain: bool = False, force: bool = False) -> Result:
    """Build and publish an index."""
    from embedder.cli.render import TerminalWatcher
    from embedder.store_index.keep_index import build_store_index

    number, manifest = build_store_index(
        open_files(config),
        wishes=config.index,
        force=force,
        measure_all=explain,
        ray_address=config.ray_address,
        say=TerminalWatcher().say,
    )
    shown: list[RenderableType] = [f"{describe(number, manifest)}, built in {manifest.build_s:.1f} s"]
    return Result(_data(number, manifest), [*([trials_table(manifest)] if explain else []), *shown])


def update(config: RunConfig) -> Result:
    """Bring the index up to what is published."""
    from embedder.store.store_info import published
    from embedder.store_index.keep_index import update_store_index
    from embedder.store_index.versions import manifest_of

    files = open_files(config)
    before = published(files).index
    with writing(files, config.index) as say:
        number = update_store_index(files, config.index, say)
    manifest = manifest_of(files, number)
    text = f"index {number} holds what is published: nothing to update" if number == before else ""
    data = {"updated": number != before, "index": number} | (manifest.model_dump() if manifest else {})
    return Result(data, [text or describe(number, manifest)] if manifest else [text])


def rollback(config: RunConfig, number: int | None) -> Result:
    """Publish an earlier index of the same rows."""
    from embedder.store_index.rollback import rollback_index

    files = open_files(config)
    with writing(files, config.index):
        chosen, manifest = rollback_index(files, number)
    return Result(_data(chosen, manifest), [f"published again: {describe(chosen, manifest)}"])


def status(config: RunConfig) -> Result:
    """List the index versions."""
    from embedder.store.store_info import published
    from embedder.store_index.versions import list_manifests

    files = open_files(config)
    current = published(files)
    columns = (
        "version",
        "design",
        "vectors",
        "masked",
        "recall@10",
        "ms",
        "MiB",
        "embeddings",
        "built at",
        "published",
    )
    table = new_table(*columns)
    versions = []
    for number, manifest in list_manifests(files):
        is_published = number == current.index
        versions.append(_data(number, manifest) | {"published": is_published})
        table.add_row(
            str(number),
            manifest.design,
            f"{manifest.num_vectors:,}",
            f"{masked_share(manifest):.1%}",
            f"{manifest.recall_at_10:.3f}",
            f"{manifest.latency_ms:.2f}",
            f"{manifest.size_bytes / MIB:.1f}",
            str(manifest.embeddings_version),
            manifest.built_at[:16].replace("T", " "),
            "yes" if is_published else "",
        )
    shown: RenderableType = table if versions else "no index yet: search is exact; `embedder index build` makes one"
    return Result({"versions": versions, "published": current.index}, [shown])


def describe(number: int, manifest: Manifest) -> str:
    """An index version in one line."""
    recall = "exact" if manifest.design == "Flat" else f"recall@10 {manifest.recall_at_10:.3f}"
    return (
        f"index {number}: {manifest.design}, {manifest.num_vectors:,} vectors x {manifest.dim}, {recall}, "
        f"{manifest.size_bytes / MIB:.1f} MiB"
    )


def trials_table(manifest: Manifest) -> Table:
    """The designs that were measured before the choice; those on the Pareto front are marked."""
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


def masked_share(manifest: Manifest) -> float:
    """Share of the rows that no search may find any more, in [0, 1]."""
    return manifest.num_masked / manifest.num_rows


def _data(number: int, manifest: Manifest) -> dict[str, Any]:
    return {"index": number, **manifest.model_dump()}
