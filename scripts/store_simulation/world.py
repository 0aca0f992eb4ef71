"""Processes of a simulation, and the simulated bucket and disk whose every effect they may be interrupted at."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from math import inf
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, NoReturn

import greenlet

from embedder.store.backends import Condition, Disk, FileInfo, Tag, WriteConflictError
from embedder.store.environment import Environment
from embedder.store.files import StoreFiles
from embedder.store.store_errors import StoreUnavailableError
from store_simulation.checker import Checker

Kind = Literal[
    "pause", "kill", "kill after", "lost", "late", "repeated", "refused", "power cut", "power cut at the end", "lag"
]
"""What goes wrong at an effect: the process is silent for some effects of others; it dies before or after the effect;
the effect is made and its answer lost; it is made later, after the client gave up; it is sent twice; it is refused with
503; the machine dies, at once or after the end; listings show nothing new from here on."""

START = datetime(2026, 1, 1, tzinfo=UTC)
MAX_EFFECTS = 6000
FOREVER = 10**9


class Fault(NamedTuple):
    """One thing that goes wrong."""

    process: int  # its number in the schedule
    effect: int  # number of the effect of that process, from 1; a negative one counts its changes of the store only
    kind: Kind  # what happens
    length: int = FOREVER  # effects of others, for which a pause lasts or by which a late effect is late


class Killed(BaseException):
    """End of a process in the middle of its work; none of its clean-up reaches the store."""


class Stuck(Exception):
    """Schedule that does not end."""


NO_BEATS = SimpleNamespace(stop=lambda: None)
"""Nothing to stop: who is not paused is never silent for a lease, as time passes only where all wait."""


@dataclass
class Process:
    """Process that runs one operation."""

    number: int
    name: str
    run: Callable[[Process], Any]
    faults: dict[int, Fault]
    clock_offset: timedelta = timedelta()
    num_effects: int = 0
    num_changes: int = 0
    paused_until: int = 0
    wakes_at_s: float = 0.0
    state: Literal["new", "running", "done", "killed"] = "new"
    result: str = ""
    is_killed: bool = False
    lagging: bool = False
    notes: dict[str, Any] = field(default_factory=dict)
    thread: Any = None

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "killed")


class World:
    """Clock and processes of one schedule."""

    def __init__(self, errors: tuple[type[Exception], ...]) -> None:
        self.errors = errors
        self.time_s, self.num_effects, self.num_tokens = 0.0, 0, 0
        self.processes: list[Process] = []
        self.current: Process | None = None
        self.later: list[tuple[int, Callable[[], None]]] = []
        self.crashes: list[str] = []
        self._hub = greenlet.getcurrent()

    def environment(self, process: Process) -> Environment:
        def token(num_bytes: int) -> str:
            self.num_tokens += 1
            return f"{self.num_tokens * 0x9E3779B1 % 2 ** (8 * num_bytes):0{2 * num_bytes}x}"

        def sleep(seconds: float) -> None:
            process.wakes_at_s = self.time_s + seconds
            self._hub.switch()

        return Environment(
            clock_s=lambda: self.time_s, now=lambda: START + process.clock_offset + timedelta(seconds=self.time_s),
            sleep=sleep, token=token, repeat=lambda every_s, action, name: NO_BEATS, make_lock=nullcontext,
        )  # fmt: skip

    def effect(self, *, is_change: bool = False) -> Fault | None:
        """Count an effect, do to its process what the schedule says, and return what is to be done to the effect."""
        process = self.current
        if process is None:  # a look at the store from outside
            return None
        if process.is_killed:
            raise Killed
        self.num_effects = number = self.num_effects + 1
        process.num_effects = own = process.num_effects + 1
        if number > MAX_EFFECTS:
            raise Stuck
        if number >= self.next_resume or self.later:
            self._carry_out(number)
            if number >= self.next_resume:
                self._hub.switch()
        fault = process.faults.get(own)
        if is_change:
            process.num_changes += 1
            fault = process.faults.get(-process.num_changes, fault)
        if fault is None:
            return None
        if fault.kind == "pause":
            process.paused_until = self.num_effects + fault.length
            self.next_resume = min(self.next_resume, process.paused_until)
            self._hub.switch()
            return None
        if fault.kind == "kill":
            self.kill()
        process.lagging = process.lagging or fault.kind == "lag"
        return None if fault.kind in ("lag", "power cut at the end") else fault

    def kill(self, *, with_machine: bool = False) -> NoReturn:
        for each in self.processes:
            each.is_killed = each.is_killed or (not each.is_over and (with_machine or each is self.current))
        raise Killed

    def _carry_out(self, until: float = inf) -> None:
        due = [action for when, action in self.later if when <= until]
        self.later = [each for each in self.later if each[0] > until]
        for action in due:
            action()

    def run(self, processes: list[Process], on_end: Callable[[Process], None]) -> None:
        self.processes, self.next_resume = processes, FOREVER
        while (process := self._next()) is not None:
            self.current = process
            if process.state == "new":
                process.state = "running"
                process.thread = greenlet.greenlet(self._body)
                process.thread.switch(process)
            else:
                process.thread.switch()
            self.current = None
            if process.is_over and "ended" not in process.notes:
                process.notes["ended"] = True
                on_end(process)
        self._carry_out()

    def _body(self, process: Process) -> None:
        try:
            process.run(process)
            process.result, process.state = "ok", "done"
        except Killed:
            for each in self.processes:
                if each.is_killed:
                    each.result, each.state = "killed", "killed"
        except self.errors as error:
            process.result, process.state = f"{type(error).__name__}: {error}", "done"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            process.result, process.state = f"crash {type(error).__name__}: {error}", "done"
            if not (process.faults and isinstance(error, FileNotFoundError)):  # an overtaken process finds files gone
                self.crashes.append(f"{process.name}: {process.result}")

    def _next(self) -> Process | None:
        """Process that continues: of those that wait for nothing, one whose pause is over first, then the earliest."""
        waiting = [each for each in self.processes if not each.is_over]
        if not waiting:
            return None
        paused = (each.paused_until for each in waiting if each.paused_until > self.num_effects)
        self.next_resume = min(paused, default=FOREVER)
        free = [each for each in waiting if each.paused_until <= self.num_effects]
        ready = [each for each in free if each.wakes_at_s <= self.time_s]
        if ready:
            return max(ready, key=lambda each: (each.paused_until, -each.number))
        if free:
            self.time_s = min(each.wakes_at_s for each in free)
            return min(free, key=lambda each: each.wakes_at_s)
        first = min(waiting, key=lambda each: each.paused_until)
        first.paused_until = self.num_effects
        return first


class Files(StoreFiles):
    """Store of a simulated backend."""

    def __init__(self, backend: Any, environment: Environment) -> None:
        super().__init__("s3://simulated/store")
        self.backend, self.environment = backend, environment


class SimulatedBucket:
    """Bucket whose objects change one at a time; each change is judged by the checker at once."""

    def __init__(self, world: World, checker: Checker, objects: dict[str, tuple[bytes, int]]) -> None:
        self._world, self._checker, self.objects = world, checker, objects
        self._paths, self._start = sorted(objects), ""
        self._versions = count(1 + max((version for _, version in objects.values()), default=0))
        checker.content = lambda path: self.objects.get(path, (None, 0))[0]

    def read(self, path: str) -> tuple[bytes, Tag]:
        self._answer()
        if (path := self._start + path) not in self.objects:
            raise FileNotFoundError(path)
        content, version = self.objects[path]
        return content, {"e_tag": version}

    def read_log(self, paths: Sequence[str]) -> list[bytes]:
        """Read entries of a log as one effect: as none is ever changed, it is all the same what happens in between."""
        self._answer()
        paths = [self._start + path for path in paths]
        if lacking := [path for path in paths if path not in self.objects]:
            raise FileNotFoundError(lacking[0])
        return [self.objects[path][0] for path in paths]

    def exists(self, path: str) -> bool:
        self._answer()
        return self._start + path in self.objects

    def folders(self, folder: str) -> list[str]:
        self._answer()
        start = f"{self._start}{folder}/"
        parts = (path[len(start) :].partition("/") for path in self._under(start, None))
        return sorted({name for name, slash, _ in parts if slash})

    def _under(self, start: str, after: str | None) -> list[str]:
        """Paths that begin with a text, and sort after another one."""
        first = bisect_left(self._paths, start) if after is None else bisect_right(self._paths, max(start, after))
        return self._paths[first : bisect_left(self._paths, f"{start[:-1]}0") if start else None]

    def _answer(self) -> None:
        fault = self._world.effect()
        if fault is not None and fault.kind in ("refused", "lost"):
            raise StoreUnavailableError("store s3://simulated: 503")

    def list(self, folder: str, after: str | None) -> Iterator[FileInfo]:
        """As of `Backend`; one that lags lacks entries of a table's log that are new."""
        self._answer()
        start, after = self._start + (f"{folder.rstrip('/')}/" if folder else ""), after and self._start + after
        paths = self._under(start, after)
        found = [FileInfo(path.removeprefix(self._start), len(self.objects[path][0])) for path in paths]
        process = self._world.current
        if process is not None and process.lagging and folder.endswith("_delta_log"):
            found = found[: max(1, len(found) - 2)]
        return iter(found)

    def put(self, path: str, data: bytes | Path, condition: Condition) -> Tag:
        path, content = self._start + path, data if isinstance(data, bytes) else data.read_bytes()
        fault = self._world.effect(is_change=True)
        kind = "" if fault is None else fault.kind
        writer = self._world.current
        if kind == "refused":
            raise StoreUnavailableError("store s3://simulated: 503")
        if kind == "late" and fault is not None:
            when = self._world.num_effects + fault.length
            self._world.later.append((when, lambda: self._try(path, content, condition, writer)))
            raise StoreUnavailableError("store s3://simulated: no answer")
        if kind == "repeated":
            self._try(path, content, condition, writer)
        tag = self._apply(path, content, condition, writer)
        if kind == "kill after":
            self._world.kill()
        if kind == "lost":
            raise StoreUnavailableError("store s3://simulated: no answer")
        return tag

    def _apply(self, path: str, content: bytes, condition: Condition, writer: Any) -> Tag:
        """Make a change, or find that it was made already by a request that was sent again."""
        found = self.objects.get(path)
        tag = "absent" if found is None else {"e_tag": found[1]}
        if condition not in (None, tag):
            if found is not None and found[0] == content:
                return {"e_tag": found[1]}
            raise WriteConflictError(path)
        if found is None:
            insort(self._paths, path)
        self.objects[path] = (content, next(self._versions))
        self._checker.on_put(path, content, writer)
        return {"e_tag": self.objects[path][1]}

    def _try(self, path: str, content: bytes, condition: Condition, writer: Any) -> None:
        try:
            self._apply(path, content, condition, writer)
        except WriteConflictError:
            return

    def delete(self, paths: Iterable[str]) -> None:
        """As of `Backend`; one effect for each, between which a process may end."""
        for path in [self._start + path for path in paths]:
            fault = self._world.effect(is_change=True)
            if fault is not None and fault.kind == "refused":
                raise StoreUnavailableError("store s3://simulated: 503")
            if self.objects.pop(path, None) is not None:
                self._paths.remove(path)
                self._checker.on_delete(path)
            if fault is not None and fault.kind == "kill after":
                self._world.kill()

    def below(self, folder: str) -> SimulatedBucket:
        inner = copy(self)  # of the same objects
        inner._start = f"{self._start}{folder}/"
        return inner

    def open(self, path: str) -> Any:
        raise NotImplementedError(path)

    def read_table(self, path: str, columns: list[str] | None) -> Any:
        raise NotImplementedError(path)


class SimulatedDisk(Disk):
    """File system with a volatile half, which is lost when the machine dies, and a durable one, which stays.

    A name is durable after its folder was synced, the content of a file after the file was. What was not synced may be
    there after a power cut or not, as the schedule's random numbers say; a file whose name is there and whose content
    was not synced is empty.
    """

    def __init__(self, world: World, checker: Checker, root: str) -> None:
        self._world, self._checker, self._root = world, checker, root.rstrip("/") + "/"
        self.contents: dict[int, bytes] = {}
        self.synced: set[int] = set()
        self.names: dict[str, int] = {}
        self.durable_names: dict[str, int] = {}
        self.folders_there: set[str] = {"/", root}
        self.durable_folders: set[str] = {"/", root}
        self._num_files = 0
        self._sorted: list[str] = []
        self._unsynced: dict[str, set[str]] = {}
        checker.content = lambda path: self.contents.get(self.names.get(self._root + path, -1))

    def copy_from(self, other: SimulatedDisk) -> None:
        self.contents, self.synced, self._num_files = dict(other.contents), set(other.synced), other._num_files
        self.names, self.durable_names, self._sorted = dict(other.names), dict(other.names), sorted(other.names)
        self.folders_there, self.durable_folders = set(other.folders_there), set(other.folders_there)

    def _effect(self, *, is_change: bool = True) -> str:
        fault = self._world.effect(is_change=is_change)
        if fault is None:
            return ""
        if fault.kind == "refused":
            raise OSError(28, "No space left on device")
        if fault.kind == "power cut":
            self._world.kill(with_machine=True)
        return fault.kind

    def _after(self, kind: str) -> None:
        if kind in ("kill after", "lost"):
            self._world.kill()

    def create(self, path: str, data: bytes | Path) -> None:
        kind = self._effect()
        if path in self.names:
            raise FileExistsError(path)
        self._num_files += 1
        self.contents[self._num_files] = data if isinstance(data, bytes) else data.read_bytes()
        self._name(path, self._num_files)
        self._after(kind)

    def sync_file(self, path: str) -> None:
        kind = self._effect()
        self.synced.add(self.names[path])
        self._after(kind)

    def link(self, source: str, target: str) -> None:
        self.rename(source, target, is_new=True)

    def rename(self, source: str, target: str, *, is_new: bool = False) -> None:
        kind = self._effect()
        if source not in self.names:
            raise FileNotFoundError(source)
        if is_new and target in self.names:
            raise FileExistsError(target)
        self._name(target, self.names[source])
        self._unname(source)
        self._checker.on_put(target.removeprefix(self._root), self.contents[self.names[target]], self._world.current)
        self._after(kind)

    def _name(self, path: str, file: int) -> None:
        if path not in self.names:
            insort(self._sorted, path)
        self.names[path] = file
        self._unsynced.setdefault(path.rpartition("/")[0], set()).add(path)

    def _unname(self, path: str) -> None:
        del self.names[path]
        self._sorted.remove(path)
        self._unsynced.setdefault(path.rpartition("/")[0], set()).add(path)

    def unlink(self, path: str) -> None:
        if path not in self.names:
            raise FileNotFoundError(path)
        kind = self._effect()
        if path in self.names:
            self._unname(path)
            self._checker.on_delete(path.removeprefix(self._root))
        self._after(kind)

    def make_folder(self, path: str) -> None:
        self.folders_there.add(path)

    def sync_folder(self, path: str) -> None:
        kind = self._effect()
        for name in self._unsynced.pop(path.rstrip("/"), ()):
            if name in self.names:
                self.durable_names[name] = self.names[name]
            else:
                self.durable_names.pop(name, None)
        above = (path.rstrip("/"), "")
        self.durable_folders |= {each for each in self.folders_there if each.rpartition("/")[0] in above}
        self._after(kind)

    def read(self, path: str) -> bytes:
        self._effect(is_change=False)
        if path not in self.names:
            raise FileNotFoundError(path)
        return self.contents[self.names[path]]

    def is_file(self, path: str) -> bool:
        return path in self.names

    def is_folder(self, path: str) -> bool:
        return path in self.folders_there

    def entries(self, path: str) -> list[tuple[str, bool, int]]:
        start = path.rstrip("/") + "/"
        found: dict[str, tuple[str, bool, int]] = {}
        for name in self._sorted[bisect_left(self._sorted, start) : bisect_left(self._sorted, f"{start[:-1]}0")]:
            first, _, rest = name[len(start) :].partition("/")
            found[first] = (first, bool(rest), 0 if rest else len(self.contents[self.names[name]]))
        return list(found.values())

    def cut_power(self, keeps: Any) -> None:
        names = dict(self.durable_names)
        for name in self.names.keys() | self.durable_names.keys():
            if self.names.get(name) != self.durable_names.get(name) and keeps():
                if name in self.names:
                    names[name] = self.names[name]
                else:
                    del names[name]
        stays = {name for name in names if {str(each) for each in PurePosixPath(name).parents} <= self.durable_folders}
        self.names = {name: file for name, file in names.items() if name in stays}
        for file in set(self.names.values()) - self.synced:
            self.contents[file] = b""
        self.folders_there = set(self.durable_folders)
        self.durable_names = dict(self.names)
        self._sorted, self._unsynced = sorted(self.names), {}
