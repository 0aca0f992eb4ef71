"""`embedder embed`: the main job."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from embedder.cli.options import (
    DryRun,
    Dtype,
    Force,
    ModelUri,
    NumStages,
    PlanFile,
    ReadConfig,
    Repair,
    RetryRejects,
    StoreUri,
    command,
    source_override,
)
from embedder.cli.results import Result
from embedder.sources.column_keys import ColumnOptions


@dataclass(frozen=True)
class SourceKeys:
    """Options that describe SOURCE, as the keys of a `[[source]]` do."""

    kind: Annotated[str | None, typer.Option(help="auto, files, table or webdataset.")] = None
    id_column: Annotated[str | None, typer.Option(help="Column that becomes item_id; or content, or file+row.")] = None
    image_column: Annotated[str | None, typer.Option(help="Column with images or videos: bytes or URIs.")] = None
    caption_column: Annotated[str | None, typer.Option(help="Column with captions.")] = None
    carryover: Annotated[list[str] | None, typer.Option(help="Column to copy into the embeddings table.")] = None
    include: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Only such files, as '*.jpg'.")] = None
    exclude: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="No such files, as 'private/'.")] = None

    def describe(self, source: str | None) -> list[dict[str, Any]] | None:
        """Return the one source of the command line in the form of a configuration file; see `source_override`."""
        columns = ColumnOptions(id=self.id_column, image=self.image_column, caption=self.caption_column)
        has_columns = any((self.id_column, self.image_column, self.caption_column))
        return source_override(
            source,
            columns=columns if source or has_columns else None,
            kind=self.kind,
            carryover=self.carryover,
            include=self.include,
            exclude=self.exclude,
        )


@dataclass(frozen=True)
class ComputeKeys:
    """Options that override the keys of their names: what computes, and how the model is cut for it."""

    engine: Annotated[str | None, typer.Option(help="auto, ray or local.")] = None
    device: Annotated[str | None, typer.Option(help="What stages compute on: auto, cpu or cuda.")] = None
    num_stages: NumStages = None
    plan: PlanFile = None
    dtype: Dtype = None
    ray_address: Annotated[str | None, typer.Option(help="Ray cluster to attach to.")] = None


@command
def embed(
    read: ReadConfig,
    source: Annotated[str | None, typer.Argument(help="Folder, file, table, tars or URI.")] = None,
    model: ModelUri = None,
    store: StoreUri = None,
    *,
    source_keys: SourceKeys,
    compute_keys: ComputeKeys,
    dry_run: DryRun = False,
    retry_rejects: RetryRejects = False,
    repair: Repair = False,
    force: Force = None,
) -> Result:
    """Stream embeddings into the store: creates or continues it, then publishes."""
    described = {"model": model, "store": store, "source": source_keys.describe(source)}
    run = read(described | asdict(compute_keys))

    from embedder.cli.refresh_command import run_ingest
    from embedder.ingest.work import IngestOptions

    options = IngestOptions(kind="embed", retry_rejects=retry_rejects, repair=repair, forced=tuple(force or ()))
    return run_ingest(run, options, dry_run=dry_run)
