"""The check of a store: whether what is published is complete and readable, and what was left over by whom.

It takes no lock and writes nothing. Published files never change, so a writer at work causes no error. If one publishes
meanwhile, findings may be about files that it replaced, so everything is checked again.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from embedder.plugins.maintain.store_check.findings import SEVERITIES, Finding, Severity, Unreadable, attempt
from embedder.plugins.maintain.store_check.indexes import (
    check_index,
    check_row_files,
    check_towers,
    check_words,
    unfinished_indexes,
)
from embedder.plugins.maintain.store_check.leftovers import leftovers
from embedder.plugins.maintain.store_check.lock_holder import check_lock
from embedder.plugins.maintain.store_check.logs import check_logs
from embedder.plugins.maintain.store_check.parts import TableContent, WayBack, check_table
from embedder.plugins.maintain.store_check.records import (
    Chain,
    check_bindings,
    check_chain,
    check_deletions,
    check_purges,
    check_runs,
)
from embedder.plugins.maintain.store_check.row_checks import check_counts, check_rows
from embedder.plugins.maintain.store_check.scope import CheckedModel, checked_models
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.publish.current import of_model, record_of
from embedder.store.publish.history import readable
from embedder.store.tables.models import model_folders
from embedder.store.tables.words import searched_column

MAX_LOOKS = 3
NUM_EARLIER = 5
"""Number of earlier publications that are examined as ways out of damage."""


@dataclass(frozen=True)
class ModelCounts:
    """Counts of a model's checked tables: items, rejects, vectors, part files and their bytes."""

    num_items: int
    num_rejected: int
    num_vectors: int
    num_parts: int
    size_bytes: int


@dataclass(frozen=True)
class StoreCheck:
    """Result of a check.

    `run_id` is the run whose publication was checked, None if there is none or it can't be read. `findings` has the
    worst first. `models` has each model's figures; the main one has the empty name. `publications` are the run ids of
    all publications, oldest first, and `readable` those that can be read. `num_files` and `size_bytes` are for the
    whole store; `deep` is whether everything was read.
    """

    run_id: str | None
    findings: tuple[Finding, ...]
    models: Mapping[str, ModelCounts]
    publications: tuple[str, ...]
    readable: tuple[str, ...]
    num_files: int
    size_bytes: int
    deep: bool
    wall_s: float

    def number(self, severity: Severity) -> int:
        """Count the findings of a severity."""
        return sum(each.severity == severity for each in self.findings)


def check_store(files: StoreFiles, *, deep: bool = False) -> StoreCheck:
    """Check a store. Raises StoreError if there is no store, and StoreUnavailableError if its server doesn't answer."""
    started = time.monotonic()
    for _ in range(MAX_LOOKS):
        before = attempt(lambda: read_current(files))
        found = _look(files, deep=deep, started=started)
        if not found.number("error") or attempt(lambda: read_current(files)) == before:
            break
    return found


def _look(files: StoreFiles, *, deep: bool, started: float) -> StoreCheck:
    lock, is_writing = check_lock(files)
    early = attempt(lambda: read_current(files))  # before the listing, which then has all files that it names
    listing = {info.path: info.size_bytes for info in files.list("")}
    bindings = check_bindings(files, listing, early)
    findings = [*bindings.findings, *lock, *check_purges(files, is_writing=is_writing)]
    chain, models, whole = None, dict[str, ModelCounts](), set[str]()
    if (current := bindings.current) is not None:
        chain = check_chain(files, current)
        deletions, doomed = check_deletions(files, current, listing)
        checked = checked_models(files, current, bindings.infos, listing, doomed)
        found_whole = attempt(lambda: readable(files, chain.records))
        whole = set() if isinstance(found_whole, Unreadable) else found_whole
        findings += [*chain.findings, *deletions]
        added: dict[str, frozenset[str]] = {}
        for model in checked:
            look = _look_at_model(model, chain, whole, deep=deep)
            findings += look.findings
            models[model.name] = look.figures
            added |= {model.place(table): log for table, log in look.added.items()}
            findings += unfinished_indexes(model, is_writing=is_writing)
        names = ["", *model_folders(files)]
        findings += check_runs(files, chain, names, listing)
        unfinished = [info.run_id for info in chain.unfinished]
        findings += leftovers(listing, added, unfinished, files.option, is_writing=is_writing)
    order = {severity: number for number, severity in enumerate(SEVERITIES)}
    return StoreCheck(
        run_id=None if current is None else current.run_id,
        findings=tuple(sorted(findings, key=lambda each: order[each.severity])),
        models=models,
        publications=tuple(record.run_id for record in chain.records) if chain else (),
        readable=tuple(record.run_id for record in chain.records if record.run_id in whole) if chain else (),
        num_files=len(listing),
        size_bytes=sum(listing.values()),
        deep=deep,
        wall_s=time.monotonic() - started,
    )


@dataclass(frozen=True)
class _ModelLook:
    """Result for one model; `added` has the files of all versions by table, if the log is complete."""

    findings: tuple[Finding, ...]
    figures: ModelCounts
    added: Mapping[str, frozenset[str]]


def _look_at_model(model: CheckedModel, chain: Chain, whole: set[str], *, deep: bool) -> _ModelLook:
    logs = check_logs(model)
    earlier = [record for record in reversed(chain.records[:-1]) if record.run_id in whole][:NUM_EARLIER]
    of_this = [(record.run_id, own) for record in earlier if (own := of_model(record, model.name)) is not None]
    read = partial(check_table, model, way_back=WayBack(model, of_this), deep=deep)
    has_index = model.current.index is not None
    searched = f"{model.info.searched if model.info is not None else 'image'}_embedding"
    columns = [*([searched] if has_index else []), searched_column(model.files)]
    items: TableContent = read("items")
    embeddings: TableContent = read("embeddings", counted_columns=columns)
    counts = embeddings.num_valid if embeddings.is_whole else {}
    findings = [
        *(finding for log in logs.values() for finding in log.findings),
        *items.findings,
        *embeddings.findings,
        *check_rows(model, items, embeddings),
        *check_counts(model, items, embeddings, record_of(chain.record, model.name)),
        *check_index(model, counts, deep=deep),
        *check_words(model, counts, deep=deep),
        *check_row_files(model, deep=deep),
        *check_towers(model, deep=deep),
    ]
    figures = ModelCounts(
        num_items=items.states.total() - items.states["left_out"],
        num_rejected=items.states["rejected"],
        num_vectors=embeddings.num_rows,
        num_parts=items.num_parts + embeddings.num_parts,
        size_bytes=items.size_bytes + embeddings.size_bytes,
    )
    added = {table: log.added for table, log in logs.items() if log.is_readable}
    return _ModelLook(tuple(findings), figures, added)
