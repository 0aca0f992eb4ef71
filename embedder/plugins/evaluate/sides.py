"""Sides of a comparison: a store, an earlier publication of it, or one of its further models, and what they cost."""

import re
from pathlib import Path
from typing import Any

from embedder.errors import ConfigError, StoreError, check_argument
from embedder.plugins.evaluate.comparison_report import ComparedSide
from embedder.plugins.evaluate.published_images import ImageTable
from embedder.plugins.evaluate.query_sets import ONE_TOWER
from embedder.retrieval.store_api import Store, open_store
from embedder.store.journal.runs import REPORT_FILE
from embedder.store.layout import run_file
from embedder.store.tables.models import check_has_vectors
from embedder.store_index.index_versions import manifest_of
from shards.file_schema import parse_json

SIDE = re.compile(r"(?P<store>.+?)(?:@(?P<run>\d{8}T\d{6}Z[\w.-]*))?(?:#(?P<model>[a-z0-9_]+))?")
"""Address of a store, then optionally `@RUN_ID`, then optionally `#NAME`; other `@` and `#` belong to the address."""
MAX_EARLIER = 50  # publications that are searched for the report of the run that computed the vectors


def open_side(address: "str | Path | Store", **code: Any) -> Store:
    """Open a store, a publication `STORE@RUN_ID`, a model `STORE#NAME`, or both, `STORE@RUN_ID#NAME`.

    An open store is returned as it is. `code` are `servables` and `allow_store_code` of `embedder.open_store`. Raises
    `StoreError` if there is no store, no such publication that can be read, no such model, or it can't be compared;
    `ConfigError` if the address is empty.
    """
    expected = "a store, its address, STORE@RUN_ID or STORE#NAME"
    check_argument("embedder.compare: side", address, (str, Path, Store), expected)
    opened = address if isinstance(address, Store) else _open(str(address), code)
    check_has_vectors(opened.files, opened.current)
    if opened.info.searched == "text":
        raise StoreError(ONE_TOWER.format(address=opened.files.address, side="vision"))
    return opened


def _open(address: str, code: dict[str, Any]) -> Store:
    parts = SIDE.fullmatch(address)
    if parts is None:
        raise ConfigError("compare: a side is empty; write STORE, STORE@RUN_ID or STORE#NAME")
    if Path(address).exists():
        return open_store(address, **code)
    return open_store(parts["store"], model=parts["model"], version=parts["run"], **code)


def describe_side(name: str, store: Store, images: ImageTable, width: int) -> ComparedSide:
    """Describe a side, from the report of the run that computed its vectors, and the manifest of its index."""
    run_id, report = _report(store)
    number = store.current.index
    manifest = None if number is None else manifest_of(store.files, number)
    return ComparedSide(
        name=name,
        store=store.files.main.address,
        run_id=store.publication.run_id,
        model=store.info.model,
        model_fingerprint=store.info.model_fingerprint,
        num_items=len(images.item_ids),
        vector_width=width,
        built_by=run_id,
        num_embedded=_number(report, "num_items", int),
        items_per_s=_number(report, "items_per_s", float),
        cost_per_million=_number(report, "cost_per_million", float),
        currency=report.get("currency"),
        peak_memory_bytes=_number(report, "peak_memory_bytes", int),
        index=None if manifest is None else number,
        index_design=None if manifest is None else manifest.design,
        index_recall_at_10=None if manifest is None else manifest.recall_at_10,
        index_memory_bytes=None if manifest is None else manifest.memory_bytes,
    )


def _number(report: dict[str, Any], key: str, kind: type) -> Any:
    """Figure of a report; None if it is missing, or 0, which stands for not measured."""
    value = report.get(key)
    return kind(value) if isinstance(value, int | float) and value else None


def _report(store: Store) -> tuple[str | None, dict[str, Any]]:
    """Id and report of the last run up to the publication that embedded with this model; empty if there is none."""
    from embedder.store.publish.history import publications

    files = store.files.main
    chain = publications(files)
    names = [each.run_id for each in chain]
    last = names.index(store.publication.run_id) if store.publication.run_id in names else len(names) - 1
    for record in chain[last::-1][:MAX_EARLIER]:
        own = record.models.get(store.model) if store.model else record
        if own is None or own.model_fingerprint != store.info.model_fingerprint:
            break
        try:
            report = parse_json(files.read(run_file(record.run_id, REPORT_FILE)))
        except (FileNotFoundError, ValueError):  # a compaction has no report
            continue
        if isinstance(report, dict) and report.get("num_items"):
            return record.run_id, report
    return None, {}
