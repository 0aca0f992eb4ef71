"""Lists every file under a local folder in a repeatable order, with files of one stem next to each other."""

import os
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

from embedder.errors import SourceError
from embedder.sources.listing_schema import file_version
from embedder.sources.unicode_forms import stem_to_nfc

SIDECAR_SUFFIXES = (".txt", ".json")
SkipsFolder = Callable[[str], bool]
"""Takes a folder's path relative to the root and returns whether to skip it; a skipped folder is not even opened."""


class Entry(NamedTuple):
    """One file under a root, or a name that must not be opened (`error_type` is then set).

    `name` is a POSIX path relative to the root; it holds surrogate escapes if the file system's name isn't UTF-8.
    `described_by` has the files of other names that describe this one, or their texts, by place of `[captions] from`.
    """

    name: str
    size_bytes: int | None
    modified: str
    error_type: str | None = None
    error: str | None = None
    described_by: "tuple[tuple[str, Entry | str], ...]" = ()


def walk_folder(root: str, skips: SkipsFolder) -> Iterator[Entry]:
    """Yield every file below `root`, folder by folder; memory is bounded by the largest single folder.

    A link to a file inside the root counts as a file. A link to a folder inside is skipped: its content is listed under
    its own path, and following it could loop. Links that leave the root and special files are rejects. An unreadable
    folder is a SourceError, because its items would look deleted.
    """
    real_root = os.path.realpath(root)
    prefixes = [""]
    while prefixes:
        prefix = prefixes.pop()
        names, folders = _scan(root, prefix)
        for name in sorted(names, key=_stem_first):
            entry = look_at(root, prefix + name, real_root)
            if entry is not None:
                yield entry
        kept = (name for name in folders if not skips(prefix + name))
        prefixes.extend(f"{prefix}{name}/" for name in sorted(kept, reverse=True))


def stem_of(name: str) -> str:
    """Return a name without its last suffix, which a file and its sidecar share."""
    stem, _, suffix = name.rpartition(".")
    if stem and stem[-1] not in "./" and "/" not in suffix:  # nearly all, in a quarter of the time
        return stem
    return os.path.splitext(name)[0]  # noqa: PTH122 (a million names: no Path objects)


def _stem_first(name: str) -> str:
    stem = stem_of(name)
    if not stem.isascii():
        return f"{stem_to_nfc(stem)}\0{stem}\0{name[len(stem) :]}"
    return f"{stem}\0{name[len(stem) :]}"  # no name holds a NUL, so all suffixes of one stem stay together


def _scan(root: str, prefix: str) -> tuple[list[str], list[str]]:
    """Return the names in a folder that are no folders, and those of its folders."""
    names: list[str] = []
    folders: list[str] = []
    try:
        with os.scandir(os.path.join(root, prefix)) as entries:  # noqa: PTH118
            for entry in entries:
                (folders if entry.is_dir(follow_symlinks=False) else names).append(entry.name)
    except OSError as error:
        # A folder deleted a moment ago is empty; a missing root is an unmounted disk.
        if isinstance(error, FileNotFoundError | NotADirectoryError) and prefix and os.path.isdir(root):  # noqa: PTH112
            return [], []
        where = os.path.join(root, prefix).encode("utf-8", "backslashreplace").decode()  # noqa: PTH118
        raise SourceError(
            f"{where}: {error.strerror}; a listing must be complete: give read access, or leave it out with `exclude`"
        ) from None
    return names, folders


def look_at(root: str, name: str, real_root: str) -> Entry | None:
    """Look at one name (POSIX, relative to `root`) without opening it; None for a folder or if nothing is there.

    `real_root` is the root with its links resolved; no link may lead out of it.
    """
    path = f"{root.rstrip('/')}/{name}"
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return _link_entry(path, name, real_root)
    except FileNotFoundError:
        return None  # deleted since the folder was read
    except OSError as error:
        return Entry(name, None, "", "PermissionDenied", f"can't be looked at: {error.strerror}")
    return None if stat.S_ISDIR(status.st_mode) else _status_entry(name, status)


def _link_entry(path: str, name: str, real_root: str) -> Entry | None:
    target = os.path.realpath(path)
    if not is_inside(target, real_root):
        return Entry(name, None, "", "LinkOutsideRoot", "a link that leaves the source's root is not followed")
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError as error:
        return Entry(name, None, "", "BrokenLink", f"a link that leads nowhere: {error.strerror}")
    return None if stat.S_ISDIR(status.st_mode) else _status_entry(name, status)


def _status_entry(name: str, status: os.stat_result) -> Entry:
    modified = file_version(status)
    if not stat.S_ISREG(status.st_mode):
        return Entry(name, None, modified, "NotAFile", f"a {_kind(status.st_mode)}; only regular files are opened")
    return Entry(name, status.st_size, modified)


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path is a folder or is below it; both must have their links resolved."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    return kinds.get(stat.S_IFMT(mode), "special file")
