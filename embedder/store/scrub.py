"""Take some items' names out of a store's texts and out of its tables' logs; rows are the purge's own work."""

import json
from typing import Any

from embedder.store.file_scan import RECORDS, holds, said_by, texts_of
from embedder.store.files import FileInfo, StoreFiles
from embedder.store.item_names import ItemNames
from embedder.store.log_replay import LOG_FOLDER
from embedder.store.schema import TABLES
from embedder.store.tables import RecordTable


def scrub_texts(files: StoreFiles, names: ItemNames) -> int:
    """Write `[purged]` over the names in reports, logs and the like; returns how many files were changed.

    A file that is no text is left as it is; the search afterwards tells of it.
    """
    texts = (info for info in files.list("") if _is_free_text(info))
    named = [info for info in texts if holds(files, info, names) and _is_utf8(files.read(info.path))]
    for info in named:
        files.write(info.path, _without_names(files.read(info.path), names))
    return len(named)


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


def _is_free_text(info: FileInfo) -> bool:
    name = info.path.rpartition("/")[2]
    return f"/{LOG_FOLDER}/" not in info.path and not name.endswith((".parquet", ".faiss")) and name not in RECORDS


def scrub_logs(files: StoreFiles, names: ItemNames) -> int:
    """Take the names out of the Delta logs, where they stand as the least and greatest id of a part file.

    A log entry keeps everything else, so its version stays what it was. Checkpoints sum up entries: those with a name
    in them are deleted once the newest version has one without.

    Returns:
        How many files were changed or deleted.
    """
    return sum(_scrub_log(files, name, names) for name in TABLES)


def _scrub_log(files: StoreFiles, table: str, names: ItemNames) -> int:
    named = [info for info in files.list(f"{table}/{LOG_FOLDER}") if holds(files, info, names)]
    checkpoints = [info for info in named if info.path.endswith(".parquet")]
    for info in named:
        if info not in checkpoints:
            lines = (json.dumps(_scrubbed(json.loads(line), names)) for line in _lines(files, info))
            files.write(info.path, "\n".join(lines).encode())
    if checkpoints:
        RecordTable(files, table).create_checkpoint()
    for info in checkpoints:
        files.delete(info.path)
    return len(named)


def _lines(files: StoreFiles, info: FileInfo) -> list[str]:
    return [line for line in files.read(info.path).decode().splitlines() if line.strip()]


def _scrubbed(action: dict[str, Any], names: ItemNames) -> dict[str, Any]:
    """One action of a log entry: no bounds where they are a purged id, as any other text would be a wrong bound."""
    if not names.are_in(said_by(action)):
        return action
    if "commitInfo" in action:
        said = action["commitInfo"]["operationParameters"]
        return action | {"commitInfo": action["commitInfo"] | {"operationParameters": names.removed_from(said)}}
    kind = "add" if "add" in action else "remove"
    stats = json.loads(action[kind]["stats"]) | {"minValues": {}, "maxValues": {}}
    return {kind: action[kind] | {"stats": json.dumps(stats)}}
