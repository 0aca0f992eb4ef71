"""Writers of a store that are overtaken by others at any of their changes, and whose requests come late."""

import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from itertools import count
from pathlib import Path

from store_states import Killed

from embedder.errors import RunFailedError, StoreError
from embedder.store.backends import WriteConflictError
from embedder.store.environment import REAL_ENVIRONMENT
from embedder.store.files import StoreFiles
from embedder.store.lock import LOCK_FILE, write_lock
from embedder.store.publish.publish import finish_publication

Operation = Callable[[StoreFiles], object]


class Asleep:
    """Renewal of the lock by a process that sleeps: none."""

    def stop(self) -> None:
        pass


class Steps:
    """Changes that a backend makes, before one of which something else happens."""

    def __init__(self, number: int, action: Callable[[], object]) -> None:
        self.made: list[str] = []
        self._number, self._action = number, action

    def __call__(self, name: str, path: str) -> None:
        if len(self.made) == self._number:
            self.made.append("the other's")
            self._action()
        self.made.append(f"{name} {path}")

    @property
    def was_interrupted(self) -> bool:
        return "the other's" in self.made


class Stepwise:
    """Backend that reports each change before it is made."""

    def __init__(self, backend, step: Callable[[str, str], None]) -> None:
        self._backend, self._step = backend, step

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def put(self, path, data, condition):
        self._step("put", path)
        return self._backend.put(path, data, condition)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._step("delete", path)
            self._backend.delete([path])

    def below(self, folder: str) -> "Stepwise":
        return Stepwise(self._backend.below(folder), lambda name, path: self._step(name, f"{folder}/{path}"))


class Late:
    """Backend whose process dies with its first request to a certain file on the way."""

    def __init__(self, backend, pattern: str) -> None:
        self._backend, self._pattern = backend, pattern
        self.on_its_way: list[tuple] = []

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def put(self, path, data, condition):
        if self.on_its_way:
            raise Killed
        if fnmatch(path, self._pattern):
            self.on_its_way.append((path, data, condition))
            raise Killed
        return self._backend.put(path, data, condition)

    def delete(self, paths) -> None:
        raise Killed

    def arrive(self) -> None:
        for each in self.on_its_way:
            with suppress(WriteConflictError):
                self._backend.put(*each)


def copied(base: StoreFiles, place: Path | str) -> StoreFiles:
    files = StoreFiles(place)
    if base.folder is not None and files.folder is not None:  # hundreds of copies, none of which need survive a crash
        shutil.copytree(base.folder, files.folder, ignore=shutil.ignore_patterns(LOCK_FILE))
        return files
    for info in base.list(""):
        if info.path != LOCK_FILE:
            files.write(info.path, base.read(info.path))
    return files


def sleeping(files: StoreFiles) -> StoreFiles:
    """The store as a process has it that is about to fall asleep."""
    own = StoreFiles(files.address)
    own.environment = replace(REAL_ENVIRONMENT, repeat=lambda every_s, action, name: Asleep())
    return own


def next_writer(files: StoreFiles) -> StoreFiles:
    """The store as a process has it that comes when the lock of the one before has expired, or was removed by hand."""
    own, times_s = StoreFiles(files.address), count(0, 1_000_000)
    own.environment = replace(REAL_ENVIRONMENT, clock_s=lambda: next(times_s), sleep=lambda seconds: None)
    if own.folder is not None:
        (own.folder / LOCK_FILE).unlink(missing_ok=True)
    return own


def carried_out(files: StoreFiles, operation: Operation) -> Exception | None:
    """Do something to a store as a command does; gives what it was refused with."""
    try:
        with write_lock(files):
            finish_publication(files)
            operation(files)
    except (StoreError, RunFailedError) as error:
        return error
    return None
