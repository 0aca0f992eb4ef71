"""Schedules: which operations run on the store, where each is interrupted and how, and what must hold at the end."""

import json
from collections.abc import Iterator
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from embedder.store.backends import DiskBackend, is_unfinished
from embedder.store.files import StoreFiles
from embedder.store.publish.history import publications, readable
from embedder.store.publish.tombstones import PURGED_FILE, PurgedIds
from store_simulation.backends import Files, SimulatedBucket, SimulatedDisk
from store_simulation.checker import Checker
from store_simulation.operations import ERRORS, OPERATIONS, embed
from store_simulation.world import FOREVER, Fault, Process, Stuck, World

CHECKED_AT_THE_END = 6
"""Of how many schedules one affords a further writer at its end, and of twice as many a vacuum."""

CLOCKS = (timedelta(), timedelta(days=36_500), timedelta(days=-36_500))


class Schedule(NamedTuple):
    """What happens to one store.

    Attributes:
        operations: names, one for each process, in the order of their beginnings.
        faults: what goes wrong.
        clocks: numbers in `CLOCKS`, one for each process.
        on_disk: whether the store is on a disk, else it is in a bucket.
        lock: content that the lock has at the beginning.
        luck: seed of what a power cut leaves of what was not synced; it also says how much is checked at the end, as
            not every schedule can afford a vacuum.
    """

    operations: tuple[str, ...]
    faults: tuple[Fault, ...] = ()
    clocks: tuple[int, ...] = ()
    on_disk: bool = False
    lock: str = ""
    luck: int = 0


class Outcome(NamedTuple):
    """What came of a schedule.

    Attributes:
        violations: what did not hold; nothing of a good one.
        num_effects: effects of each process.
        num_changes: those of them that change the store.
        results: how each process ended.
        items: what was published then: item -> process that embedded it.
    """

    violations: tuple[str, ...]
    num_effects: tuple[int, ...]
    num_changes: tuple[int, ...]
    results: tuple[str, ...]
    items: dict[str, str]


@cache
def base(on_disk: bool) -> Any:
    """State of a store with two publications: items x y w v, then a new x, and z."""
    checker, world = Checker(), World(ERRORS)
    backend = _backend(world, checker, None, on_disk)
    for number, items in enumerate((("x", "y", "w", "v"), ("x", "z"))):
        process = _process(
            world, checker, backend, number, f"base{number}", partial(embed, items=items), (), 0, on_disk
        )
        world.run([process], lambda _: None)
        if process.result != "ok" or checker.violations:
            raise RuntimeError(f"no store to begin with: {process.result}; {checker.violations}")
    return backend, checker


def _backend(world: World, checker: Checker, start: Any, on_disk: bool) -> Any:
    if not on_disk:
        return SimulatedBucket(world, checker, dict(start.objects) if start is not None else {})
    disk = SimulatedDisk(world, checker, "/store")
    if start is not None:
        disk.copy_from(start)
    return disk


def _process(
    world: World,
    checker: Checker,
    backend: Any,
    number: int,
    name: str,
    operation: Any,
    faults: Any,
    clock: int,
    on_disk: bool,
) -> Process:
    def work(process: Process) -> None:
        environment = world.environment(process)
        if on_disk:
            files = Files(DiskBackend(Path("/store"), backend, environment), environment, "s3://simulated/store")
        else:
            files = Files(backend, environment)
        operation(files, process)

    process = Process(number, name, work, {each.effect: each for each in faults}, CLOCKS[clock])
    process.notes["on_begin"] = checker.purge_begun.update
    process.notes["checker"] = checker
    return process


def run_schedule(schedule: Schedule) -> Outcome:
    """Run one schedule on a store of its own."""
    start, before = base(schedule.on_disk)
    checker = Checker(
        states=dict(before.states), written=set(before.written), current=before.current, needed=before.needed
    )
    world = World(ERRORS)
    luck = Random(schedule.luck)
    backend = _backend(world, checker, start, schedule.on_disk)
    if schedule.lock:
        backend.objects[".lock"] = (schedule.lock.encode(), 1)  # which the base has, too
    processes = []
    for number, name in enumerate(schedule.operations):
        faults = [each for each in schedule.faults if each.process == number]
        clock = schedule.clocks[number] if number < len(schedule.clocks) else 0
        process = _process(
            world,
            checker,
            backend,
            number,
            f"{'ABC'[number]} {name}",
            OPERATIONS[name],
            faults,
            clock,
            schedule.on_disk,
        )
        if name.startswith("refresh without"):
            checker.retired.add(name.split()[-1])
        processes.append(process)
    for process in processes:
        process.notes["first"] = processes[0]
    on_end, items = partial(_on_end, checker, backend), dict[str, str]()
    try:
        if schedule.on_disk:
            world.run(processes[:1], on_end)
            kinds = {each.kind for each in schedule.faults}
            if "power cut at the end" in kinds or ("power cut" in kinds and processes[0].result == "killed"):
                backend.cut_power(lambda: luck.random() < 0.5)
                checker.reread()
                for item in checker.purged:
                    _check_gone(checker, backend, processes[0], item)
            world.run(processes[1:], on_end)
        else:
            world.run(processes, on_end)
        items = dict(checker.published.items) if checker.published is not None else {}
        _at_the_end(world, checker, backend, schedule)
    except Stuck:
        checker.fail("it does not end")
    for crash in world.crashes:
        checker.fail(crash)
    return Outcome(
        tuple(checker.violations),
        tuple(each.num_effects for each in processes),
        tuple(each.num_changes for each in processes),
        tuple(each.result for each in processes),
        items,
    )


def _on_end(checker: Checker, backend: Any, process: Process) -> None:
    """Judge what a command has said."""
    if process.result != "ok":
        if "purging" in process.notes and process.number < len("ABC"):
            checker.unfinished_purges.add(process.name.partition(" ")[2])
        return
    published, items = process.notes.get("published"), process.notes.get("items")
    if items and published is None:
        checker.fail(f"{process.name} said done and published nothing")
    elif items:
        if lacking := {each for each, own in items.items() if published.items.get(each) != own} - checker.being_purged:
            checker.fail(f"{process.name} said done without {sorted(lacking)}")
        if kept := process.notes["retired"] & published.items.keys():
            checker.fail(f"{process.name} said done and kept {sorted(kept)}")
    if purging := process.notes.get("purging"):
        checker.purged |= purging
        for item in purging:
            _check_gone(checker, backend, process, item)


def _paths(backend: Any) -> list[str]:
    if isinstance(backend, SimulatedDisk):
        return [name.removeprefix("/store/") for name in backend.names]
    return list(backend.objects)


def _check_gone(checker: Checker, backend: Any, process: Process, item: str) -> None:
    """An item that a command says to have purged is in no byte, but for what others have written since it began."""
    for path in _paths(backend):
        writer, change = checker.last_writer.get(path, (None, 0))
        is_late = writer is not process and change > process.notes["changes"]
        content = checker.content(path) or b""
        if not is_late and _holds(path, content, item):
            checker.fail(f"{process.name} said done, and {path} holds {item}")


def _holds(path: str, content: bytes, item: str) -> bool:
    """Whether an id stands in a file: in JSON, in JSON that is a string in JSON, or in a list of ids."""
    forms = (f'"{item}"', f'\\"{item}\\"', f"'{item}'")
    return any(each.encode() in content for each in forms) and not path.endswith(("published.json", ".lock"))


def _check_purges_stay(checker: Checker, backend: Any) -> None:
    """All purged items are remembered, and no purge has written one again, but into a file that no log names.

    A part file that an overtaken purge was about to make is there until the next vacuum: `docs/store-protocol.md`.
    """
    paths = _paths(backend)
    logs = b"".join(checker.content(path) or b"" for path in paths if "/_delta_log/" in path)
    record = PurgedIds.model_validate_json(checker.content(PURGED_FILE) or b'{"key": "", "hashes": {}}')
    if forgotten := {item for item in checker.purged if record.hash_of(item) not in record.hashes}:
        checker.fail(f"nothing remembers that {sorted(forgotten)} were purged")
    for path in paths:
        name = path.rpartition("/")[2]
        if name.startswith("part-") and f'"{name}"'.encode() not in logs:
            continue
        writer = checker.last_writer.get(path, (None, 0))[0]
        if writer is not None and "purging" in writer.notes:
            for item in checker.purged:
                if _holds(path, checker.content(path) or b"", item):
                    checker.fail(f"{item} was purged, and {writer.name} has written it again: {path}")


def _at_the_end(world: World, checker: Checker, backend: Any, schedule: Schedule) -> None:
    """The next writer takes the store over, and a vacuum leaves what something refers to."""

    def follow(name: str, operation: Any) -> Process:
        process = _process(world, checker, backend, 9, name, operation, (), 0, schedule.on_disk)
        world.run([process], partial(_on_end, checker, backend))
        if process.result != "ok":
            checker.fail(f"the next writer can't {name}: {process.result}")
        return process

    if checker.purged:
        _check_purges_stay(checker, backend)
    for name in sorted(checker.unfinished_purges if schedule.luck % 2 == 0 else ()):
        again = _process(world, checker, backend, 9, name, OPERATIONS[name], (), 0, schedule.on_disk)
        world.run([again], partial(_on_end, checker, backend))
        if again.result != "ok" and not again.result.startswith("StoreError"):  # of an item that no version has
            checker.fail(f"{name} does not end when it is run again: {again.result}")
    if schedule.luck % CHECKED_AT_THE_END:
        return
    follow("embed e", partial(embed, items=("e", *sorted(checker.purged))))
    _check_history(world, checker, backend, schedule)
    if schedule.luck % (2 * CHECKED_AT_THE_END) == 0:
        follow("vacuum", OPERATIONS["vacuum"])
        if not any(schedule.clocks):  # a clock ahead of the vacuum's keeps indexes
            _check_leftovers(checker, backend)
        follow("embed e again", partial(embed, items=("e",)))


def _check_history(world: World, checker: Checker, backend: Any, schedule: Schedule) -> None:
    """Publications that the store calls readable are whole."""

    def look(files: StoreFiles, process: Process) -> None:
        history = publications(files)
        for each in history:
            if each.run_id in readable(files, [each]):
                needed: set[str] = set()
                for name in ("items", "embeddings"):
                    paths = checker._paths(name, getattr(each, name), needed)
                    if paths is None or any(not checker.content(f"{name}/{path}") for path in paths):
                        checker.fail(f"publication {each.run_id} is called readable and is not")

    process = _process(world, checker, backend, 9, "history", look, (), 0, schedule.on_disk)
    world.run([process], lambda _: None)
    if process.result != "ok":
        checker.fail(f"the history can't be read: {process.result}")


def _check_leftovers(checker: Checker, backend: Any) -> None:
    """After a vacuum of one version every part file, index, list and unfinished file is one that something needs."""
    newest = {
        f"{folder}{table}/{path}"
        for folder in ("", "models/second/")
        for table in ("items", "embeddings")
        for path in checker.newest_paths(f"{folder}{table}", _paths(backend))
    }
    current = checker.current or {}
    record = json.loads(checker.content(f"runs/{current.get('run_id')}/published.json") or b"{}")
    indexes = {current.get("index"), *map(int, record.get("past_indexes", ()))}
    for path in _paths(backend):
        first = path.split("/")[0]
        is_table = "/_delta_log/" not in path and first in ("items", "embeddings")
        if (is_table and path not in checker.needed and path not in newest) or is_unfinished(path):
            checker.fail(f"vacuum left {path}")
        if first == "deletions" and path.split("/")[1].removesuffix(".json") not in current.get("deleting", ()):
            checker.fail(f"vacuum left a list that nothing names: {path}")
        if "/journal/" in path or path.rpartition("/")[2] in ("publication.json",):
            checker.fail(f"vacuum left {path}")
        if first == "index" and int(path.split("/")[1]) not in indexes and not path.endswith("claim"):
            checker.fail(f"vacuum left {path}")


# ---------------------------------------------------------------------------------------------------------------------


def draw(random: Random) -> Schedule:
    """Draw a schedule: mostly a writer that is silent while another one works, and goes on at some effect of it."""
    luck = random.randint(0, 1 << 30)
    if random.random() < ON_DISK:
        operations = (_choose(random, WEIGHTS), _choose(random, WEIGHTS_ON_DISK))
        if random.random() < RIVALS_SHARE:
            operations = random.choice(RIVALS_ON_DISK)
        kind = random.choice(("power cut", "power cut", "power cut at the end", "kill", "kill after", "refused"))
        return Schedule(operations, (Fault(0, _place(random, operations[0], True), kind),), (), True, "", luck)
    if random.random() < RIVALS_SHARE:
        operations = random.choice(RIVALS)
    else:
        others = (_choose(random, {**WEIGHTS, **OTHERS}) for _ in range(1 if random.random() < 0.85 else 2))
        operations = (_choose(random, WEIGHTS), *others)
    num = len(operations)
    clocks = tuple(random.choice((0, 0, 0, 1, 2)) for _ in operations)
    style = random.random()
    first = _place(random, operations[0])
    if len(operations) > 2 and style < 0.4:  # a silent writer, a killed one, and who comes after both
        cut = Fault(1, _place(random, operations[1]), "kill")
        faults = [Fault(0, first, "pause", _pause(random, random.choice(operations[1:]))), cut]
    elif style < 0.75:
        faults = [Fault(0, first, "pause", _pause(random, operations[1]))]
    elif style < 0.87:
        faults = [Fault(0, first, random.choice(("kill", "kill after")))]
    else:
        kind = random.choice(("lost", "late", "repeated", "refused", "lag"))
        second = _place(random, operations[0])
        faults = [
            Fault(0, first, kind, _pause(random, operations[1])),
            Fault(0, second, "pause", _pause(random, operations[1])),
        ]
    if random.random() < 0.25:
        kind = random.choice(("pause", "pause", "kill", "kill after", "lost", "late", "repeated", "refused", "lag"))
        number = random.randrange(num)
        other = operations[number - 1]
        faults.append(Fault(number, _place(random, operations[number]), kind, _pause(random, other)))
    lock = random.choice(LOCKS) if random.random() < 0.03 else ""
    unique = {(each.process, each.effect): each for each in faults}
    return Schedule(operations, tuple(unique.values()), clocks, False, lock, luck)


ON_DISK = 0.12
WEIGHTS = {
    "embed a b y": 5,
    "embed c w": 3,
    "embed c d in two tasks": 2,
    "embed and publish as it goes": 4,
    "embed two models": 3,
    "refresh without x": 3,
    "rollback": 2,
    "rollback to the first": 5,
    "release": 1,
    "vacuum": 6,
    "compact": 2,
    "purge x": 5,
    "purge z": 4,
    "index": 3,
    "embed nothing, by mistake": 3,
}
OTHERS = {"late worker": 2, "read": 2}
RIVALS_SHARE = 0.2
RIVALS = (
    ("vacuum", "rollback to the first"),
    ("rollback to the first", "vacuum"),
    ("embed and publish as it goes", "embed and publish as it goes"),
    ("purge x", "purge z"),
    ("purge z", "purge x"),
    ("index", "index"),
    ("embed and publish as it goes", "embed and publish as it goes", "embed c w"),
)
"""Pairs that delete what the other one publishes, rewrite the same files, or take the same names."""
RIVALS_ON_DISK = (("compact", "purge x"), ("embed two models", "purge x"), ("purge z", "purge x"))
"""Pairs of which the first one writes what the second one is to find, also where it was not finished."""
WEIGHTS_ON_DISK = WEIGHTS | {"purge x": 15}


def _choose(random: Random, weights: dict[str, int]) -> str:
    return random.choices(tuple(weights), tuple(weights.values()))[0]


@cache
def typical(name: str, on_disk: bool) -> tuple[int, int]:
    """Numbers of an operation's effects and of its changes of the store, where nothing goes wrong."""
    outcome = run_schedule(Schedule((name,), on_disk=on_disk, luck=1))
    return outcome.num_effects[0], outcome.num_changes[0]


def _place(random: Random, name: str, on_disk: bool = False) -> int:
    """Effect at which something goes wrong: mostly a change of the store, which are fewer than looks at it."""
    num_effects, num_changes = typical(name, on_disk)
    return -random.randint(1, num_changes + 2) if random.random() < 0.8 else random.randint(1, num_effects + 10)


def _pause(random: Random, other: str) -> int:
    """Effects of others: a few, up to some place in their work, until one has published, or all.

    Args:
        random: chooses.
        other: operation that runs meanwhile.
    """
    until_published = typical(other, False)[0] + random.randint(-8, 16)  # to take the lock over adds a dozen
    return random.choice(
        (random.randint(1, 60), random.randint(20, 200), max(1, until_published), FOREVER, FOREVER, FOREVER)
    )


LOCKS = (
    "",
    "[]",
    "nonsense",
    "{}",
    '{"token": 5, "lease_s": 1e9}',
    '{"token": "x", "lease_s": "nan"}',
    '{"lease_s": -1}',
)


def shrink(schedule: Schedule) -> Schedule:
    """Leave out what a failing schedule fails without."""

    def fails(candidate: Schedule) -> bool:
        return bool(run_schedule(candidate).violations)

    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(schedule):
            if fails(candidate):
                schedule, is_smaller = candidate, True
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    for number in range(len(schedule.faults)):
        yield schedule._replace(faults=schedule.faults[:number] + schedule.faults[number + 1 :])
    if schedule.lock:
        yield schedule._replace(lock="")
    if any(schedule.clocks):
        yield schedule._replace(clocks=())
    if len(schedule.operations) > 1:
        yield schedule._replace(operations=schedule.operations[:-1])
    for number, fault in enumerate(schedule.faults):
        for length in (10**9, fault.length // 2):
            if fault.length not in (length, 10**9) and length:
                changed = (*schedule.faults[:number], fault._replace(length=length), *schedule.faults[number + 1 :])
                yield schedule._replace(faults=changed)


def to_json(schedule: Schedule) -> str:
    """Schedule as one line."""
    return json.dumps(schedule._asdict() | {"faults": [each._asdict() for each in schedule.faults]})


def from_json(text: str) -> Schedule:
    """Schedule of a line."""
    found = json.loads(text)
    faults = tuple(Fault(**each) for each in found["faults"])
    return Schedule(
        **found | {"operations": tuple(found["operations"]), "clocks": tuple(found["clocks"]), "faults": faults}
    )
