"""Holder of a store's lock as the lock names it: at work, ended, or unknown; finding out takes no lock."""

import socket
from collections.abc import Mapping

from embedder.plugins.maintain.store_check.findings import Finding, Unreadable, attempt
from embedder.store.files import StoreFiles
from embedder.store.lock import LOCK_FILE, describe
from shards.file_schema import parse_json


def check_lock(files: StoreFiles) -> tuple[list[Finding], bool]:
    """Read the lock; return findings, and whether a writer seems to be at work."""
    data = attempt(lambda: files.read(LOCK_FILE))
    if isinstance(data, Unreadable) or (not data and files.folder is not None):
        return [], False
    holder = attempt(lambda: parse_json(data))
    if isinstance(holder, dict) and "released" in holder:
        return [], False
    if not isinstance(holder, dict) or describe(holder) == "unknown":
        is_on_disk = files.folder is not None
        rule = "it names its holder, or that it is free"
        cure = (
            "nothing: on a disk the operating system holds the lock, and the next writer writes its name"
            if is_on_disk
            else "nothing: the next writer watches it for its lease, and takes it over where nobody renews it"
        )
        return [Finding("warning", LOCK_FILE, "its content is damaged", rule, cure)], not is_on_disk
    is_gone = files.folder is not None and is_ended(holder)
    if is_gone:
        found, cure = f"left by {describe(holder)}, which has ended", "nothing: the next writer takes it"
    else:
        found, cure = f"held by {describe(holder)}", "wait for it to end: what it has in progress is not judged"
    return [Finding("note", LOCK_FILE, found, "one writer at a time holds a store", cure)], not is_gone


def is_ended(holder: Mapping[str, object]) -> bool:
    """Return whether a lock's holder was a process of this machine that no longer exists."""
    import psutil

    pid = holder.get("pid")
    return holder.get("host") == socket.gethostname() and isinstance(pid, int) and not psutil.pid_exists(pid)
