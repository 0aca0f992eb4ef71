"""Take some items' names out of a store's texts and out of its tables' logs; rows are the purge's own work."""

import json

from embedder.store.delta_log import LOG_FOLDER
from embedder.store.files import FileInfo, StoreFiles
from embedder.store.purge.audit import RECORDS, holds, said_by, texts_of
from embedder.store.purge.id_matcher import ItemNames
from embedder.store.purge.rewrite_log import Action, change_log, without_bounds
from embedder.store.schema import TABLES


def scrub_texts(files: StoreFiles, names: ItemNames) -> None:
    """Write `[purged]` over the names in reports, logs and the like.

    A file that is no text is left as it is; the search afterwards tells of it.
    """
    texts = (info for info in files.list("") if is_free_text(info))
    named = [info for info in texts if holds(files, info, names) and _is_utf8(files.read(info.path))]
    for info in named:
        files.write(info.path, _without_names(files.read(info.path), names))


def _without_names(content: bytes, names: ItemNames) -> bytes:
    """A text as it was, line by line or as one JSON document, but for the names."""
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
    """Whether a file is prose or JSON, in which names can be written over."""
    name = info.path.rpartition("/")[2]
    return f"/{LOG_FOLDER}/" not in info.path and not name.endswith((".parquet", ".faiss")) and name not in RECORDS


def scrub_logs(files: StoreFiles, names: ItemNames) -> None:
    """Take the names out of the Delta logs, where they stand as the least and greatest id of a part file.

    Entries and checkpoints keep everything else, so each version stays what it was.
    """
    logs = [info for name in TABLES for info in files.list(f"{name}/{LOG_FOLDER}")]
    named = [info for info in logs if holds(files, info, names)]
    for info in named:
        change_log(files, info.path, lambda action: _scrubbed(action, names))


def _scrubbed(action: Action, names: ItemNames) -> Action:
    """One action of a log: no bounds where they are a purged id, as any other text would be a wrong bound."""
    if not names.are_in(said_by(action)):
        return action
    if not action.get("commitInfo"):
        return without_bounds(action)
    said = action["commitInfo"]["operationParameters"]
    return action | {"commitInfo": action["commitInfo"] | {"operationParameters": names.removed_from(said)}}
