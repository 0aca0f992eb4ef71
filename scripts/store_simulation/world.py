"""Processes that work on one simulated store, one at a time, interrupted where a schedule says, with their own clocks.

Each process is a greenlet that runs the store's real code. At each of its effects on the store it may be paused,
killed, or given a wrong answer; whoever is not paused goes on, the process that was paused first before the others. So
what happens follows from the schedule alone.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, NoReturn

import greenlet

from embedder.store.environment import Environment

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


class _NoLock(AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        return None


class _NoBeats:
    def stop(self) -> None:
        """Nothing to stop: who is not paused is never silent for a lease, as time passes only where all wait."""


@dataclass
class Process:
    """Process that runs one operation."""

    number: int
    name: str
    run: Callable[["Process"], Any]
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
        """Clocks and the like of a process."""

        def token(num_bytes: int) -> str:
            self.num_tokens += 1
            return f"{self.num_tokens * 0x9E3779B1 % 2 ** (8 * num_bytes):0{2 * num_bytes}x}"

        def sleep(seconds: float) -> None:
            process.wakes_at_s = self.time_s + seconds
            self._hub.switch()

        return Environment(
            clock_s=lambda: self.time_s,
            now=lambda: START + process.clock_offset + timedelta(seconds=self.time_s),
            sleep=sleep,
            token=token,
            repeat=lambda every_s, action, name: _NoBeats(),
            make_lock=_NoLock,
        )

    def effect(self, *, is_change: bool = False) -> Fault | None:
        """Count an effect of the current process and do to it what the schedule says, before the effect.

        Returns:
            What is to be done to the effect itself.
        """
        process = self.current
        if process is None:  # a look at the store from outside
            return None
        if process.is_killed:
            raise Killed
        self.num_effects = number = self.num_effects + 1
        process.num_effects = own = process.num_effects + 1
        if number >= self.next_resume or self.later or number > MAX_EFFECTS:
            if number > MAX_EFFECTS:
                raise Stuck
            self._carry_out()
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
        if fault.kind == "power cut at the end":
            return None
        if fault.kind == "lag":
            process.lagging = True
            return None
        return fault

    def kill(self, *, with_machine: bool = False) -> NoReturn:
        """End the current process here, or all of them."""
        for each in self.processes:
            each.is_killed = each.is_killed or (not each.is_over and (with_machine or each is self.current))
        raise Killed

    def _carry_out(self) -> None:
        due = [action for when, action in self.later if when <= self.num_effects]
        self.later = [each for each in self.later if each[0] > self.num_effects]
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
        for _, action in self.later:
            action()
        self.later = []

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
        """Process that goes on: of those that wait for nothing, one whose pause is over first, then the earliest."""
        waiting = [each for each in self.processes if not each.is_over]
        if not waiting:
            return None
        self.next_resume = min(
            (each.paused_until for each in waiting if each.paused_until > self.num_effects), default=FOREVER
        )
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
