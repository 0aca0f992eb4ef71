"""Faults that can be planted in the store's protocol, one at a time: a simulator that finds none proves nothing.

Each replaces some text of a function of the store, as a programmer might have written it.
"""

import importlib
import inspect
import sys
import textwrap
from typing import Any, NamedTuple


class PlantedFault(NamedTuple):
    """Fault in one function."""

    name: str  # for `--plant`
    description: str  # what the store does wrong
    place: str  # `module:function` or `module:Class.method`, below `embedder.store`
    old: str  # text of the function
    new: str  # what stands in its place


FAULTS = tuple(
    PlantedFault(*each)
    for each in (
        (
            "swap-without-confirm",
            "an overtaken writer reads a record again and writes over it",
            "layout:swap_bytes",
            "files.confirm_lease()",
            "pass",
        ),
        (
            "lost-lease-unnoticed",
            "a refused renewal of the lock is not taken for its loss",
            "lock:BucketLease.confirm",
            "self.lost = self.lost or not self._renew()",
            "self._renew()",
        ),
        (
            "commit-by-mark",
            "a commit that bears the run's id is taken for what it was to contain",
            "tables:RecordTable.commit_files",
            "if held == kept:",
            "if held == kept or self.is_committed(mark):",
        ),
        (
            "commit-over-another",
            "an entry of a log is written though there is one of its number",
            "tables:RecordTable._put_entry",
            "self.files.create(entry_file(self.name, number), data)",
            "self.files.write(entry_file(self.name, number), data) > 0",
        ),
        (
            "commit-taken-as-done",
            "an entry of another writer is taken for one's own",
            "tables:RecordTable.commit_files",
            "if self._put_entry(number, commit_entry(mark, session, now_ms, adds, removes)) and number % 100 == 0:",
            "self._put_entry(number, commit_entry(mark, session, now_ms, adds, removes))\n"
            "        return self.version\n"
            "        if False:",
        ),
        (
            "base-is-the-newest-version",
            "work is added to the newest version of a table, which nobody may have published",
            "publication:commit_table",
            "-1 if base is None else getattr(base, name)",
            "newest.version",
        ),
        (
            "current-unconditional",
            "CURRENT.json is written whatever it is",
            "lock:Lease.swap_current",
            "self.files.replace(CURRENT_FILE, data, self._current)",
            "self.files.backend.put(CURRENT_FILE, data, None)",
        ),
        (
            "current-before-commit",
            "CURRENT.json names a version that is committed later, or never",
            "publication:commit_table",
            "    newest.commit_files(work.run_id, wanted, schema, work.intent.session)\n    return newest",
            "    import types\n    return types.SimpleNamespace(version=newest.version + 1)",
        ),
        (
            "current-before-record",
            "a publication is made visible before its record is written",
            "current:publish_current",
            "    write_record(files, run_file(current.run_id, PUBLISHED_FILE), record)\n"
            "    move_current(files, current, doomed)\n",
            "    move_current(files, current, doomed)\n"
            "    write_record(files, run_file(current.run_id, PUBLISHED_FILE), record)\n",
        ),
        (
            "delete-without-mark",
            "a vacuum deletes files of which CURRENT.json does not tell",
            "vacuum:vacuum",
            "move_current(files, current, [info.path for info in doomed])",
            "files.delete_each(info.path for info in doomed)",
        ),
        (
            "delete-before-mark",
            "a vacuum deletes files before CURRENT.json tells of them",
            "vacuum:vacuum",
            "move_current(files, current, [info.path for info in doomed])",
            "files.delete_each(info.path for info in doomed)\n"
            "            move_current(files, current, [info.path for info in doomed])",
        ),
        (
            "vacuum-one-version-early",
            "a vacuum looks at the publications before the current one only",
            "vacuum:vacuum",
            "versions: list[Current] = [current, *(record for record in kept if record.run_id in whole)]",
            "versions = [each for each in history[:-1] if each.run_id in readable(files, history[:-1])] or [current]",
        ),
        (
            "sweep-takes-all",
            "a publication has all part files of its run deleted that are not its last ones",
            "publish:_unneeded_parts",
            "path not in needed",
            "path not in kept",
        ),
        (
            "rollback-unchecked",
            "a rollback goes back to what can't be read any more",
            "history:check_readable",
            "if version.run_id not in readable(files, [version]):",
            "if False:",
        ),
        (
            "journal-before-part",
            "the entry of a journal is written before its part files",
            "part_writer:write_copies",
            "        parts = [\n"
            '            store_part(files, table, f"{path}.parquet", content, metadata.session) '
            "for table, content in copies.items()\n"
            "        ]\n",
            "        parts = [\n"
            '            encode_part(table, f"{path}.parquet", content, metadata.session)[0] '
            "for table, content in copies.items()\n"
            "        ]\n"
            "        files.write(entry_path(metadata.run_id, name), record_bytes(JournalEntry(name=name, "
            "parts=tuple(parts), num_items=items.num_rows, num_rejects=0, trace=[])))\n"
            "        for table, content in copies.items():\n"
            '            store_part(files, table, f"{path}.parquet", content, metadata.session)\n',
        ),
        (
            "session-by-journal",
            "the number of a session comes from the journal, in which a silent one has written nothing yet",
            "runs:_begin_session",
            'last = max(number, int(info.session.partition("-")[0] or 0))',
            "last = number",
        ),
        (
            "rewrite-under-one-name",
            "two sessions of a run rewrite a part file under the same name",
            "part_writer:rewritten_name",
            '"\\n".join([session, *paths])',
            '"\\n".join(paths)',
        ),
        (
            "resumption-not-written",
            "a session resumes a run and does not write down that it has",
            "runs:_begin_session",
            "info = swap_record(run.files, run_file(run.run_id, RUN_FILE), RunInfo, adopt)",
            "info = adopt(None)",
        ),
        (
            "published-run-resumed",
            "a run that is published is resumed",
            "runs:resumable_run",
            " or is_published(files, last)",
            "",
        ),
        (
            "interim-id-twice",
            "an interim publication takes the id of the one before it",
            "interim:begin_interim",
            'number += int(current.run_id.partition("-")[2], 16)',
            "return current.run_id",
        ),
        (
            "retired-forgotten",
            "items that were to leave stay",
            "publish:_write_intent",
            'pa.table({"item_id": retired})',
            'pa.table({"item_id": retired.slice(0, 0)})',
        ),
        (
            "tombstones-unconditional",
            "the record of purged items is written over what another purge has added",
            "purge.tombstones:remember_purged",
            "swap_record(files, PURGED_FILE, PurgedIds, with_items)",
            "files.write(PURGED_FILE, with_items(fresh if fresh.hashes else None).model_dump_json().encode())",
        ),
        (
            "purge-keeps-journal",
            "entries of a journal stay that name a purged item's part files",
            "purge.purge:purge",
            "_delete(files, [info for info in plan.deleted if not is_part(info)])",
            "files.confirm_lease()",
        ),
        (
            "purge-over-another",
            "a part file is rewritten though another purge has rewritten it meanwhile",
            "purge.purge:_rewrite_in_place",
            'view.replace(f"{name}/{path}", content, tags[path])',
            'view.write(f"{name}/{path}", content)',
        ),
        (
            "purge-forgets",
            "purged items are not remembered",
            "purge.purge:purge",
            "remember_purged(files, plan.ids)",
            "files.confirm_lease()",
        ),
        (
            "purge-of-the-newest-only",
            "older publications keep the rows of a purged item",
            "purge.purge:purge",
            "_rewrite_in_place(files, model, name, plan.rewritten, plan.ids)",
            "files.confirm_lease()",
        ),
        (
            "unfinished-files-stay",
            "a purge leaves what a killed writer had not finished",
            "purge.purge:purge",
            "files.delete_each(unfinished)",
            "pass",
        ),
        (
            "index-number-twice",
            "the number of a deleted index is used again, and two writers may take one number",
            "../store_index/versions:_claim_number",
            "while not files.create(_path(number, CLAIM_NAME), files.environment.token(8).encode()):",
            "while False:",
        ),
        (
            "damaged-lock-free",
            "a lock whose content is damaged is never taken over",
            "lock:_lease_of",
            "return found if 0 < found <= MAX_LEASE_S else LEASE_S",
            'return 1e12 if "lease_s" in holder and "pid" not in holder else LEASE_S',
        ),
        (
            "file-not-synced",
            "a file is named before its content is on the disk",
            "backends:DiskBackend.put",
            "self._disk.sync_file(temporary)",
            "pass",
        ),
        (
            "folder-not-synced",
            "a file's name is not on the disk before the next file is written",
            "backends:DiskBackend.put",
            'self._disk.sync_folder(target.rpartition("/")[0])',
            "pass",
        ),
        (
            "new-folder-not-synced",
            "the name of a new folder is not on the disk",
            "backends:DiskBackend._make_folder",
            'self._disk.sync_folder(parent or "/")',
            "pass",
        ),
        (
            "deletion-not-synced",
            "a deleted file comes back with the next power cut",
            "backends:DiskBackend.delete",
            "self._disk.sync_folder(folder)",
            "pass",
        ),
    )
)


def plant(name: str) -> None:
    """Plant a fault in this process."""
    fault = next((each for each in FAULTS if each.name == name), None)
    if fault is None:
        raise LookupError(f"fault {name!r}: there is none of that name; --list-faults shows them")
    module_name, _, path = fault.place.partition(":")
    module_name = (
        f"embedder.{module_name[3:].replace('/', '.')}"
        if module_name.startswith("../")
        else f"embedder.store.{module_name}"
    )
    module = importlib.import_module(module_name)
    owner: Any = module
    *outer, last = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    function = getattr(owner, last)
    source = textwrap.dedent(inspect.getsource(function))
    old, new = (textwrap.dedent(each) if outer else each for each in (fault.old, fault.new))
    if old not in source:
        raise LookupError(f"fault {name}: {fault.place} has no text {fault.old!r} any more")
    changed: dict[str, Any] = {}
    exec(compile(source.replace(old, new), module.__file__ or "", "exec"), module.__dict__, changed)
    setattr(owner, last, changed[last])
    for other in list(sys.modules.values()):
        if not outer and getattr(other, last, None) is function:
            setattr(other, last, changed[last])
