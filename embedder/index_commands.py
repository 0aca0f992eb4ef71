"""What the commands of index_cli do: a configuration in, a result out."""

from typing import Any

from rich.console import RenderableType

from embedder.commands import Result, open_files
from embedder.config import RunConfig
from embedder.errors import ConfigError
from embedder.store_commands import MIB, new_table, writing
from index.manifest import Manifest


def build(config: RunConfig, kind: str) -> Result:
    """Build and publish an index."""
    from embedder.retrieval.indexing import build_store_index

    number, manifest = build_store_index(open_files(config), kind=_index_kind(kind))
    return Result(_data(number, manifest), [f"{describe(number, manifest)}, built in {manifest.build_s:.1f} s"])


def _index_kind(kind: str) -> Any:
    if kind not in ("auto", "flat", "hnsw", "ivf"):
        raise ConfigError(f"--kind {kind}: there is no such index; write auto, flat, hnsw or ivf")
    return kind


def rollback(config: RunConfig, number: int | None) -> Result:
    """Publish an earlier index of the same rows."""
    from embedder.retrieval.index_rollback import rollback_index

    files = open_files(config)
    with writing(files):
        chosen, manifest = rollback_index(files, number)
    return Result(_data(chosen, manifest), [f"published again: {describe(chosen, manifest)}"])


def status(config: RunConfig) -> Result:
    """List the index versions."""
    from embedder.retrieval.index_store import list_manifests
    from embedder.store.binding import published

    files = open_files(config)
    current = published(files)
    table = new_table("version", "kind", "vectors", "recall@10", "MiB", "embeddings version", "built at", "published")
    versions = []
    for number, manifest in list_manifests(files):
        is_published = number == current.index
        versions.append(_data(number, manifest) | {"published": is_published})
        table.add_row(
            str(number),
            manifest.kind,
            f"{manifest.num_vectors:,}",
            f"{manifest.recall_at_10:.3f}",
            f"{manifest.size_bytes / MIB:.1f}",
            str(manifest.embeddings_version),
            manifest.built_at[:16].replace("T", " "),
            "yes" if is_published else "",
        )
    shown: RenderableType = table if versions else "no index yet: search is exact; `embedder index build` makes one"
    return Result({"versions": versions, "published": current.index}, [shown])


def describe(number: int, manifest: Manifest) -> str:
    """An index version in one line."""
    recall = "exact" if manifest.kind == "flat" else f"recall@10 {manifest.recall_at_10:.3f}"
    return (
        f"index {number}: {manifest.kind}, {manifest.num_vectors:,} vectors x {manifest.dim}, {recall}, "
        f"{manifest.size_bytes / MIB:.1f} MiB"
    )


def _data(number: int, manifest: Manifest) -> dict[str, Any]:
    return {"index": number, **manifest.model_dump()}
