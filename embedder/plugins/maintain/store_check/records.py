"""Checks of a store's small files: the publication, the model of its vectors, the publication chain, deletions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embedder.plugins.maintain.store_check.findings import Finding, Unreadable, attempt, format_names
from embedder.plugins.maintain.store_check.scope import Listing, own_files
from embedder.quantities import agree, plural
from embedder.store.files import NUM_RECORD_READERS, StoreFiles
from embedder.store.journal.journal import stream_entries
from embedder.store.journal.runs import OPERATIONS, RUN_FILE
from embedder.store.layout import (
    CURRENT_FILE,
    PUBLISHED_FILE,
    RUNS_FOLDER,
    STORE_FILE,
    Current,
    Published,
    RunInfo,
    StoreInfo,
    journal_folder,
    read_record,
    run_file,
)
from embedder.store.publish.current import model_folder
from embedder.store.publish.deletions import DELETIONS_FOLDER, parse_list
from embedder.store.publish.history import published_chain
from embedder.store.publish.interim import interim_state
from embedder.store.publish.tombstones import PURGED_FILE, PurgedIds
from embedder.store.schema import FORMAT_VERSION
from embedder.store.store_info import FINGERPRINTS, read_store_info, served_info
from embedder.store.tables.models import model_files

NEWER = "use the embedder that wrote the store"
"""Marks the message about a store in a later release's format, which is no damage."""
SAME = ("items", "embeddings", *FINGERPRINTS)
"""Fields in which CURRENT.json and the record of its publication must agree."""


@dataclass(frozen=True)
class Bindings:
    """Publication that is checked, and the model of its vectors.

    `current` is None if nothing is published or it can't be read. `infos` has the model of the vectors by model name,
    None if unknown. `findings` lists what is wrong with them.
    """

    current: Current | None
    infos: Mapping[str, StoreInfo | None]
    findings: tuple[Finding, ...]


def check_bindings(files: StoreFiles, listing: Listing, current: Current | Unreadable | None) -> Bindings:
    """Check CURRENT.json and store.json of all models; StoreError if there is no store or it is too new."""
    if not (files.exists(STORE_FILE) or files.exists(CURRENT_FILE)):
        read_store_info(files)
    findings = list[Finding]()
    if isinstance(current, Unreadable) and current.mistake is not None and NEWER in str(current.mistake):
        raise current.mistake
    if isinstance(current, Unreadable):
        cure = "restore the file from a backup, or copy the newest whole runs/RUN_ID/published.json to its place"
        findings.append(Finding("error", CURRENT_FILE, current.reason, "it names what is published", cure))
        current = None
    elif current is None:
        findings.append(_report_unpublished(listing))
    infos = {"": _read_bound_model(files, current, "", findings)}
    for name, own in sorted(current.models.items()) if current is not None else ():
        infos[name] = _read_bound_model(model_files(files, name), own, name, findings)
    return Bindings(current, infos, tuple(findings))


def _report_unpublished(listing: Listing) -> Finding:
    records = sorted(path for path in listing if path.startswith(f"{RUNS_FOLDER}/") and path.endswith(PUBLISHED_FILE))
    if not records:
        rule = "a store is searched once something is published"
        return Finding("note", CURRENT_FILE, "nothing is published yet", rule, "the command that began it continues it")
    return Finding(
        "error",
        CURRENT_FILE,
        f"missing, though {plural(len(records), 'run')} published",
        "it names what is published",
        f"restore the file from a backup, or copy {records[-1]} to its place",
    )


def _read_bound_model(
    files: StoreFiles, current: Current | None, model: str, findings: list[Finding]
) -> StoreInfo | None:
    """Return the model of a view's vectors, from store.json and its publication; add what is wrong to the findings."""
    place = model_folder(model) + STORE_FILE
    bound = attempt(lambda: read_record(files, STORE_FILE, StoreInfo))
    rule = "it says whose vectors the store has"
    if isinstance(bound, Unreadable) and bound.mistake is not None and NEWER in str(bound.mistake):
        raise bound.mistake
    if bound is None or isinstance(bound, Unreadable):
        reason = "missing" if bound is None else bound.reason
        cure = "restore the file from a backup, or have `embedder refresh CONFIG.toml` with the same model write it"
        findings.append(Finding("error", place, reason, rule, cure))
        return None
    if bound.format_version < FORMAT_VERSION:
        found, rule = f"format version {bound.format_version}", f"this embedder writes {FORMAT_VERSION}"
        findings.append(Finding("note", place, found, rule, f"`embedder migrate {files.main.option}` brings it up"))
    served = served_info(bound, current)
    names = [name for name in FINGERPRINTS if getattr(served, name) != getattr(bound, name)]
    if names:
        found = ", ".join(
            f"{name} {getattr(bound, name)}, and CURRENT.json has {getattr(served, name)}" for name in names
        )
        rule = "both name one model; readers go by CURRENT.json"
        findings.append(
            Finding("warning", place, found, rule, "the next `embedder refresh CONFIG.toml` writes it again")
        )
    return served


@dataclass(frozen=True)
class Chain:
    """Publications of a store, each of which names its predecessor.

    `records` runs from the first to the current one, as far as they can be read; `unfinished` are runs that a later
    command may continue.
    """

    records: tuple[Published, ...]
    unfinished: tuple[RunInfo, ...]
    findings: tuple[Finding, ...]

    @property
    def record(self) -> Published | None:
        """Return the record of what is published; None if it can't be read."""
        return self.records[-1] if self.records else None


def check_chain(files: StoreFiles, current: Current) -> Chain:
    """Read the records of all runs and publications."""
    run_ids = files.folders(RUNS_FOLDER)
    read = files.each(lambda run_id: _records_of(files, run_id), run_ids, NUM_RECORD_READERS)
    published = {run_id: record for run_id, (record, _) in zip(run_ids, read, strict=True)}
    findings = [
        Finding(
            "error",
            run_file(run_id, name),
            each.reason,
            "each run and each publication has a record that can be read",
            "restore the file from a backup, or delete it: what it says is lost then",
        )
        for run_id, records in zip(run_ids, read, strict=True)
        for name, each in zip((PUBLISHED_FILE, RUN_FILE), records, strict=True)
        if isinstance(each, Unreadable)
    ]
    chain = published_chain(current.run_id, [each for each in published.values() if isinstance(each, Published)])
    infos = {run_id: info for run_id, (_, info) in zip(run_ids, read, strict=True) if isinstance(info, RunInfo)}
    findings += _broken_chain(current, chain, published, infos)
    if chain:
        findings += _differing(current, chain[-1])
    unfinished = tuple(
        info
        for info in infos.values()
        if info.run_id > current.run_id and info.kind not in OPERATIONS and not info.is_withdrawn
    )
    findings += _interim(files, current)
    return Chain(tuple(chain), unfinished, tuple(findings))


Records = tuple[Published | Unreadable | None, RunInfo | Unreadable | None]


def _records_of(files: StoreFiles, run_id: str) -> Records:
    return (
        attempt(lambda: read_record(files, run_file(run_id, PUBLISHED_FILE), Published)),
        attempt(lambda: read_record(files, run_file(run_id, RUN_FILE), RunInfo)),
    )


def _broken_chain(
    current: Current,
    chain: Sequence[Published],
    published: Mapping[str, Published | Unreadable | None],
    infos: Mapping[str, RunInfo],
) -> list[Finding]:
    """Return findings on a chain that doesn't reach its start."""
    rule = "each publication has its record, which names the one before, back to the first"
    first = current.run_id if not chain else chain[0].previous
    info = None if first is None or published.get(first) is not None else infos.get(first)
    if info is not None and info.format_version < FORMAT_VERSION:
        return []  # releases of that time wrote none
    if not chain:
        cure = f"restore the file from a backup, or copy {CURRENT_FILE} to it and add kind and counts"
        if isinstance(published.get(current.run_id), Unreadable):
            return []  # already reported
        return [Finding("error", run_file(current.run_id, PUBLISHED_FILE), "missing", rule, cure)]
    before = chain[0].previous
    if before is None or isinstance(published.get(before), Unreadable):
        return []
    path = run_file(chain[0].run_id, PUBLISHED_FILE)
    if any(record.run_id == before for record in chain):
        cure = "restore the records from a backup"
        return [Finding("error", path, f"it names {before} as the one before it, which came later", rule, cure)]
    cure = "restore the record from a backup; without it nothing before can be gone back to"
    return [Finding("warning", path, f"it names {before} as the one before it, which has no record", rule, cure)]


def _differing(current: Current, record: Published) -> list[Finding]:
    pairs = [
        ("", current, record),
        *((f"models.{name}.", own, record.models.get(name)) for name, own in current.models.items()),
    ]
    names = [
        f"{model}{name}"
        for model, own, other in pairs
        for name in SAME
        if getattr(own, name) is not None and (other is None or getattr(other, name) != getattr(own, name))
    ]
    if not names:
        return []
    found = f"it differs from {CURRENT_FILE} in {', '.join(names)}"
    rule = "the record of a publication says what is published"
    cure = f"restore the file from a backup, or write the values of {CURRENT_FILE} into it"
    return [Finding("error", run_file(record.run_id, PUBLISHED_FILE), found, rule, cure)]


def _interim(files: StoreFiles, current: Current) -> list[Finding]:
    if current.interim_of is None:
        return []
    run_id = current.interim_of
    findings = []
    for name in ("", *sorted(current.models)):
        state = attempt(lambda: interim_state(model_files(files, name), run_id))  # noqa: B023
        if isinstance(state, Unreadable):
            rule = "an interim publication says what it has of its run"
            cure = "restore the file from a backup, or go back with `embedder rollback`"
            findings.append(Finding("error", f"{model_folder(name)}{RUNS_FOLDER}/{run_id}", state.reason, rule, cure))
    return findings


def check_runs(files: StoreFiles, chain: Chain, models: list[str], listing: Listing) -> list[Finding]:
    """Check that the part files in unfinished runs' journals exist, for all models (the main one has an empty name)."""
    findings = []
    for info in chain.unfinished:
        num_items = 0
        for name in models:
            view, own = model_files(files, name), own_files(listing, name)
            entries = attempt(lambda: list(stream_entries(view, info.run_id)))  # noqa: B023
            place = model_folder(name) + journal_folder(info.run_id)
            if isinstance(entries, Unreadable):
                rule = "each entry of a journal can be read"
                cure = "delete the entry: the same command embeds its items again"
                findings.append(Finding("error", place, entries.reason, rule, cure))
                continue
            num_items += sum(entry.num_items for entry in entries) if not name else 0
            paths = (f"{part.table}/{part.path}" for entry in entries for part in entry.parts)
            if missing := sorted(path for path in paths if path not in own and not view.exists(path)):
                number = f"{plural(len(missing), 'part file')} of it {agree(len(missing), 'is', 'are')}"
                found = f"{number} missing: {format_names(missing)}"
                rule = "the part files of finished work are there"
                cure = "delete the entries that name them: the same command embeds their items again"
                findings.append(Finding("error", place, found, rule, cure))
        found = f"not finished, with {plural(num_items, 'item')} in its journal"
        rule = "a run publishes at its end"
        cure = "the command that began it continues it"
        findings.append(Finding("note", f"{RUNS_FOLDER}/{info.run_id}", found, rule, cure))
    return findings


def check_purges(files: StoreFiles, *, is_writing: bool) -> list[Finding]:
    """Read the record of purged items; an unfinished purge may be that of a writer at work."""
    record = attempt(lambda: read_record(files, PURGED_FILE, PurgedIds))
    if isinstance(record, Unreadable):
        rule = "it keeps purged items from coming back, and each run reads it"
        return [Finding("error", PURGED_FILE, record.reason, rule, "restore the file from a backup")]
    if record is None or not record.unfinished:
        return []
    found = f"a purge of {plural(len(record.unfinished), 'item')} has not ended"
    rule = "earlier versions may hold some of it, and none can be gone back to"
    if is_writing:
        return [Finding("note", PURGED_FILE, found, rule, "wait for the writer at work")]
    return [Finding("warning", PURGED_FILE, found, rule, f"run the same `embedder purge ID {files.option}` again")]


def check_deletions(files: StoreFiles, current: Current, listing: Listing) -> tuple[list[Finding], frozenset[str]]:
    """Read the lists of files to delete; return findings, and the files of the lists that count."""
    findings, doomed = list[Finding](), set[str]()
    paths = sorted(path for path in listing if path.startswith(f"{DELETIONS_FOLDER}/") and path.endswith(".json"))
    for path in paths:
        found = attempt(lambda: parse_list(files.read(path)))  # noqa: B023
        is_named = path.removeprefix(f"{DELETIONS_FOLDER}/").removesuffix(".json") in current.deleting
        if isinstance(found, Unreadable):
            if found.reason == "it is missing":
                continue  # carried out meanwhile
            rule = "a list of deletions is a list of paths, and each writer begins with those that are left"
            cure = f"delete the file, and run `embedder vacuum {files.option}`"
            findings.append(Finding("error" if is_named else "warning", path, found.reason, rule, cure))
        elif is_named:
            doomed.update(found)
            left = (
                f"{plural(len(found), 'file')} listed, {sum(each in listing for each in found):,} of them still there"
            )
            rule = "what is listed counts as deleted"
            cure = f"the next writer deletes them, as `embedder vacuum {files.option}` does"
            findings.append(Finding("note", path, left, rule, cure))
        else:
            rule = f"a list counts once {CURRENT_FILE} names it"
            cure = "delete the file, unless a writer is at work: nothing refers to it"
            findings.append(Finding("note", path, f"{CURRENT_FILE} does not name it", rule, cure))
    return findings, frozenset(doomed)
