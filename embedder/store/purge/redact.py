"""Redaction of some items' names in a store's texts and in its tables' logs."""

import json

from embedder.store.delta_log import LOG_FOLDER
from embedder.store.files import FileInfo, StoreFiles
from embedder.store.purge.audit import RECORDS, holds, row_values, texts_of
from embedder.store.purge.id_matcher import ItemNames
from embedder.store.purge.rewrite_log import Action, change_log, without_bounds
from embedder.store.schema import TABLES


def redact_texts(files: StoreFiles, names: ItemNames) -> None:
    """Replace the names in reports, logs and the like by `[purged]`.

    A file that is no text is left as it is; the search afterwards reports it.
    """
    texts = (info for info in files.list("") if is_free_text(info))
    named = [info for info in texts if holds(files, info, names) and _is_utf8(files.read(info.path))]
    for info in named:
        files.write(info.path, _without_names(files.read(info.path), names))


def _without_names(content: bytes, names: ItemNames) -> bytes:
    """Redact a text, line by line or as one JSON document; the rest is unchanged."""
    values = [names.removed_from(value) for value in texts_of(content)]
    is_document = len(values) == 1 and b"\n" in content.strip()
    lines = [
        value if isinstance(value, str) else json.dumps(value, indent=2 if is_document else None) for value in values
    ]
    return "\n".join(lines).encode() + (b"\n" if content.endswith(b"\n") else b"")


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_free_text(info: FileInfo) -> bool:
    """Whether a file is prose or JSON, in which names can be replaced."""
    name = info.path.rpartition("/")[2]
    return f"/{LOG_FOLDER}/" not in info.path and not name.endswith((".parquet", ".faiss")) and name not in RECORDS


def redact_logs(files: StoreFiles, names: ItemNames) -> None:
    """Remove the names from the Delta logs, where they are the least and greatest id of a part file.

    Entries and checkpoints keep everything else, so each version stays what it was.
    """
    logs = [info for name in TABLES for info in files.list(f"{name}/{LOG_FOLDER}")]
    named = [info for info in logs if holds(files, info, names)]
    for info in named:
        change_log(files, info.path, lambda action: _redacted(action, names))


def _redacted(action: Action, names: ItemNames) -> Action:
    """Redact one action of a log: drop bounds that are a purged id, as any other text would be a wrong bound."""
    if not names.are_in(row_values(action)):
        return action
    if not action.get("commitInfo"):
        return without_bounds(action)
    parameters = action["commitInfo"]["operationParameters"]
    return action | {"commitInfo": action["commitInfo"] | {"operationParameters": names.removed_from(parameters)}}
