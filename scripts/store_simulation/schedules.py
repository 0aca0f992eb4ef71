"""Schedules: which operations run on the store, where each is interrupted and how, and what must hold at the end."""

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa

from embedder.errors import RunFailedError, StoreError
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.vacuum import vacuum
from embedder.store.backends import DiskBackend, is_unfinished
from embedder.store.files import StoreFiles
from embedder.store.journal.journal_segments import names_in_journal, seal
from embedder.store.journal.part_writer import RunMetadata, write_copies
from embedder.store.journal.refusals import rollback_on_mistake, snapshot_files
from embedder.store.journal.runs import Run, start_run
from embedder.store.layout import StoreInfo, read_current
from embedder.store.lock import write_lock
from embedder.store.maintenance.compact import compact
from embedder.store.maintenance.rollback import release, rollback
from embedder.store.publish.current import IndexChoice, swap_index
from embedder.store.publish.history import publications, readable
from embedder.store.publish.interim import UnpublishedWork
from embedder.store.publish.publication import ModelWork, PublishIntent
from embedder.store.publish.publish import InterimWork, finish_publication, publish, publish_interim
from embedder.store.publish.tombstones import PURGED_FILE, PurgedIds, purged_before
from embedder.store.store_info import bind_store
from embedder.store.tables.models import model_files
from embedder.store.tables.tables import RecordTable
from embedder.store_index import index_versions as versions
from embedder.store_index.index_versions import has_version
from index.manifest import MANIFEST_NAME
from store_simulation.checker import Checker
from store_simulation.patches import NO_COLUMNS, Rows
from store_simulation.world import FOREVER, Fault, Files, Process, SimulatedBucket, SimulatedDisk, Stuck, World

INFO = StoreInfo(
    model="m", model_fingerprint="f", preprocess_fingerprint="p", segment_s=5.0, frames_per_segment=4, dtype="float32"
)
ERRORS = (StoreError, RunFailedError)


def none(candidate: Any, model: str = "") -> None:
    return


def embed(
    files: StoreFiles, process: Process, items: Sequence[str], *, num_tasks: int = 1, retired: Sequence[str] = (),
    is_interim: bool = False, model: str = "",
) -> None:  # fmt: skip
    process.notes["retired"] = set(retired)
    with write_lock(files):
        bind_store(files, INFO)
        finish_publication(files)
        gone = purged_before(files, items)
        items = [each for each in items if each not in gone]
        process.notes["items"] = dict.fromkeys(items, process.name)
        views = [(model_files(files, model), INFO)] if model else []
        for view, info in views:
            bind_store(view, info)
        run = start_run(files, INFO, NO_COLUMNS, views)
        process.notes["run"] = (run.run_id, run.session)
        metadata = RunMetadata(run.run_id, run.session, "f", "p", NO_COLUMNS)
        works = [(Run(view, run.info, run.session), metadata) for view, _ in views]
        intent = PublishIntent(kind="refresh", info=INFO)
        work = UnpublishedWork(run, pa.chunked_array([pa.array(items, pa.string())]))
        for task in range(num_tasks):
            rows = Rows({"item_id": each, "version": process.name} for each in items[task::num_tasks])
            for view_run, _ in works:
                write_copies(view_run.files, metadata, task, {"embeddings": rows, "items": rows}, "")
            write_copies(files, metadata, task, {"embeddings": rows, "items": rows}, "")
            if is_interim and task < num_tasks - 1:
                batch = work.next()
                publish_interim([InterimWork(run, batch, metadata, intent)])
                work.note_published(batch)
                seal(files, run.run_id, sorted(names_in_journal(files, run.run_id)))
        ids = pa.chunked_array([pa.array(list(retired), pa.string())])
        models = [ModelWork(own, metadata, intent, ids) for own, _ in works]
        process.notes["published"] = None
        publish([ModelWork(run, metadata, intent, ids), *models])


def write_late(files: StoreFiles, process: Process) -> None:
    """Continue with a write task of the first process, whose driver may be gone."""
    run = process.notes["first"].notes.get("run")
    if run is not None:
        rows = Rows([{"item_id": "k", "version": process.name}])
        write_copies(files, RunMetadata(*run, "f", "p", NO_COLUMNS), 7, {"embeddings": rows, "items": rows}, "")


def refuse(files: StoreFiles, process: Process) -> None:
    """Begin a run that ends with a mistake of the user's, and take back what it has made."""
    before = snapshot_files(files)
    with write_lock(files), rollback_on_mistake(files, before):
        bind_store(files, INFO)
        finish_publication(files)
        start_run(files, INFO, NO_COLUMNS)
        raise StoreError("a mistake")


def locked(files: StoreFiles, work: Callable[[StoreFiles], Any]) -> None:
    with write_lock(files):
        finish_publication(files)
        work(files)


def build_index(files: StoreFiles, process: Process) -> None:
    with write_lock(files):
        finish_publication(files)
        current = read_current(files)
        if current is None:
            return
        number = versions._claim_number(files)
        for name in ("vectors.faiss", MANIFEST_NAME):
            files.confirm_lease()
            manifest = {"embeddings_version": current.embeddings, "built_at": current.published_at.isoformat()}
            files.write(f"index/{number:06d}/{name}", json.dumps(manifest | {"by": process.name}).encode())
        swap_index(files, number)


def keep_index(files: StoreFiles) -> IndexChoice:
    """Choose the index of the candidate while it is there."""

    def choose(candidate: Any, model: str = "") -> int | None:
        view = model_files(files, model)
        return candidate.index if candidate.index is not None and has_version(view, candidate.index) else None

    return choose


def read(files: StoreFiles, process: Process) -> None:
    current = read_current(files)
    if current is None:
        return
    seen = {}
    for turn in range(2):
        for name in ("items", "embeddings"):
            try:
                rows = RecordTable(files, name, getattr(current, name)).read()
            except FileNotFoundError as error:
                newest = read_current(files)
                if newest is not None and newest.run_id == current.run_id:
                    raise AssertionError(f"a reader of {current.run_id} lost {error}") from None
                return
            found = {row["item_id"]: row["version"] for row in rows}
            if turn and found.keys() - seen[name].keys():
                raise AssertionError(f"a reader's version of {name} grew: {found} after {seen[name]}")
            seen[name] = found


def purge_items(files: StoreFiles, process: Process, items: Sequence[str]) -> None:
    process.notes["purging"] = set(items)
    process.notes["on_begin"](set(items))
    with write_lock(files):
        finish_publication(files)
        process.notes["changes"] = process.notes["checker"].num_changes
        purge(files, set(items), keep_index(files))


Operation = Callable[[StoreFiles, Process], Any]

OPERATIONS: dict[str, Operation] = {
    "embed a b y": partial(embed, items=("a", "b", "y")), "embed c w": partial(embed, items=("c", "w")),
    "embed c d in two tasks": partial(embed, items=("c", "d"), num_tasks=2),
    "embed and publish as it goes": partial(embed, items=("a", "c", "y"), num_tasks=3, is_interim=True),
    "embed two models": partial(embed, items=("a", "x"), model="second"),
    "refresh without x": partial(embed, items=("a",), retired=("x",)),
    "rollback": lambda files, _: locked(files, lambda each: rollback(each, None, keep_index(each))),
    "rollback to the first": lambda files, _: locked(
        files, lambda each: rollback(each, publications(each)[0].run_id, keep_index(each))
    ),
    "release": lambda files, _: locked(files, release),
    "vacuum": lambda files, _: locked(files, lambda each: vacuum(each, keep_days=0, keep_versions=1)),
    "compact": lambda files, _: locked(files, lambda each: compact(each, choose_index=keep_index(each))),
    "purge x": partial(purge_items, items=("x",)), "purge z": partial(purge_items, items=("z",)), "index": build_index,
    "embed nothing, by mistake": refuse, "late worker": write_late, "read": read,
}  # fmt: skip


CHECKED_AT_THE_END = 6
"""Of how many schedules one affords a further writer at its end, and of twice as many a vacuum."""

CLOCKS = (timedelta(), timedelta(days=36_500), timedelta(days=-36_500))


class Schedule(NamedTuple):
    """What happens to one store."""

    operations: tuple[str, ...]  # names, one for each process, in the order of their beginnings
    faults: tuple[Fault, ...] = ()  # what goes wrong
    clocks: tuple[int, ...] = ()  # numbers in `CLOCKS`, one for each process
    on_disk: bool = False  # whether the store is on a disk, else it is in a bucket
    lock: str = ""  # content that the lock has at the beginning
    # luck: seed of what a power cut leaves of what was not synced; it also says how much is checked at the end, as
    # not every schedule can afford a vacuum
    luck: int = 0


class Outcome(NamedTuple):
    """What came of a schedule."""

    violations: tuple[str, ...]  # what did not hold; nothing of a good one
    num_effects: tuple[int, ...]  # effects of each process
    num_changes: tuple[int, ...]  # those of them that change the store
    results: tuple[str, ...]  # how each process ended
    items: dict[str, str]  # what was published then: item -> process that embedded it


@cache
def base(on_disk: bool) -> Any:
    """State of a store with two publications: items x y w v, then a new x, and z."""
    checker, world = Checker(), World(ERRORS)
    backend = _backend(world, checker, None, on_disk)
    for number, items in enumerate((("x", "y", "w", "v"), ("x", "z"))):
        work = partial(embed, items=items)
        process = _process(world, checker, backend, number, f"base{number}", work, (), 0, on_disk)
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
    world: World, checker: Checker, backend: Any, number: int, name: str, operation: Any, faults: Any, clock: int,
    on_disk: bool,
) -> Process:  # fmt: skip
    def work(process: Process) -> None:
        environment = world.environment(process)
        place = DiskBackend(Path("/store"), backend, environment) if on_disk else backend
        operation(Files(place, environment), process)

    process = Process(number, name, work, {each.effect: each for each in faults}, CLOCKS[clock])
    process.notes["on_begin"] = checker.purge_begun.update
    process.notes["checker"] = checker
    return process


def run_schedule(schedule: Schedule) -> Outcome:
    start, before = base(schedule.on_disk)
    checker = Checker(written=set(before.written), current=before.current, needed=before.needed)
    checker.states = dict(before.states)
    world = World(ERRORS)
    luck = Random(schedule.luck)
    backend = _backend(world, checker, start, schedule.on_disk)
    if schedule.lock:
        backend.objects[".lock"] = (schedule.lock.encode(), 1)  # which the base has, too
    processes = []
    for number, name in enumerate(schedule.operations):
        faults = [each for each in schedule.faults if each.process == number]
        clock = schedule.clocks[number] if number < len(schedule.clocks) else 0
        own = f"{'ABC'[number]} {name}"
        process = _process(world, checker, backend, number, own, OPERATIONS[name], faults, clock, schedule.on_disk)
        if name.startswith("refresh without"):
            checker.retired.add(name.split()[-1])
        processes.append(process)
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
        tuple(checker.violations), tuple(each.num_effects for each in processes),
        tuple(each.num_changes for each in processes), tuple(each.result for each in processes), items,
    )  # fmt: skip


def _on_end(checker: Checker, backend: Any, process: Process) -> None:
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

    def follow(name: str, operation: Any, refusal: str = "ok") -> None:
        process = _process(world, checker, backend, 9, name, operation, (), 0, schedule.on_disk)
        world.run([process], partial(_on_end, checker, backend))
        if not process.result.startswith(("ok", refusal)):
            checker.fail(f"the next writer can't {name}: {process.result}")

    if checker.purged:
        _check_purges_stay(checker, backend)
    for name in sorted(checker.unfinished_purges if schedule.luck % 2 == 0 else ()):
        follow(name, OPERATIONS[name], "StoreError")  # of an item that no version has
    if schedule.luck % CHECKED_AT_THE_END:
        return
    follow("embed e", partial(embed, items=("e", *sorted(checker.purged))))
    follow("read the history", partial(_check_history, checker=checker))
    if schedule.luck % (2 * CHECKED_AT_THE_END) == 0:
        follow("vacuum", OPERATIONS["vacuum"])
        if not any(schedule.clocks):  # a clock ahead of the vacuum's keeps indexes
            _check_leftovers(checker, backend)
        follow("embed e again", partial(embed, items=("e",)))


def _check_history(files: StoreFiles, process: Process, checker: Checker) -> None:
    for each in publications(files):
        if each.run_id in readable(files, [each]):
            for name in ("items", "embeddings"):
                paths = checker._paths(name, getattr(each, name), set())
                if paths is None or any(not checker.content(f"{name}/{path}") for path in paths):
                    checker.fail(f"publication {each.run_id} is called readable and is not")


def _check_leftovers(checker: Checker, backend: Any) -> None:
    """After a vacuum of one version every part file, index, list and unfinished file is one that something needs."""
    paths = _paths(backend)
    tables = [f"{folder}{table}" for folder in ("", "models/second/") for table in ("items", "embeddings")]
    newest = {f"{table}/{path}" for table in tables for path in checker.newest_paths(table, paths)}
    current = checker.current or {}
    record = json.loads(checker.content(f"runs/{current.get('run_id')}/published.json") or b"{}")
    indexes = {current.get("index"), *map(int, record.get("past_indexes", ()))}
    for path in paths:
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


def draw(random: Random) -> Schedule:
    """Draw a schedule: mostly a writer that is silent while another one works, and continues at some effect of it."""
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
        faults = [Fault(0, first, kind, _pause(random, operations[1]))]
        faults.append(Fault(0, second, "pause", _pause(random, operations[1])))
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
    "embed a b y": 5, "embed c w": 3, "embed c d in two tasks": 2, "embed and publish as it goes": 4,
    "embed two models": 3, "refresh without x": 3, "rollback": 2, "rollback to the first": 5, "release": 1, "vacuum": 6,
    "compact": 2, "purge x": 5, "purge z": 4, "index": 3, "embed nothing, by mistake": 3,
}  # fmt: skip
OTHERS = {"late worker": 2, "read": 2}
RIVALS_SHARE = 0.2
RIVALS = (
    ("vacuum", "rollback to the first"), ("rollback to the first", "vacuum"),
    ("embed and publish as it goes", "embed and publish as it goes"), ("purge x", "purge z"), ("purge z", "purge x"),
    ("index", "index"), ("embed and publish as it goes", "embed and publish as it goes", "embed c w"),
)  # fmt: skip
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
    """Effects of others: a few, up to some place in their work, until one has published, or all."""
    until_published = typical(other, False)[0] + random.randint(-8, 16)  # to take the lock over adds a dozen
    few, some = random.randint(1, 60), random.randint(20, 200)
    return random.choice((few, some, max(1, until_published), FOREVER, FOREVER, FOREVER))


LOCKS = (
    "", "[]", "nonsense", "{}", '{"token": 5, "lease_s": 1e9}', '{"token": "x", "lease_s": "nan"}', '{"lease_s": -1}',
)  # fmt: skip


def shrink(schedule: Schedule) -> Schedule:
    while smaller := next((each for each in _smaller(schedule) if run_schedule(each).violations), None):
        schedule = smaller
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    faults = schedule.faults
    for number in range(len(faults)):
        yield schedule._replace(faults=faults[:number] + faults[number + 1 :])
    if schedule.lock:
        yield schedule._replace(lock="")
    if any(schedule.clocks):
        yield schedule._replace(clocks=())
    if len(schedule.operations) > 1:
        yield schedule._replace(operations=schedule.operations[:-1])
    for number, fault in enumerate(faults):
        for length in (FOREVER, fault.length // 2):
            if fault.length not in (length, FOREVER) and length:
                yield schedule._replace(faults=(*faults[:number], fault._replace(length=length), *faults[number + 1 :]))


def to_json(schedule: Schedule) -> str:
    return json.dumps(schedule._asdict() | {"faults": [each._asdict() for each in schedule.faults]})


def from_json(text: str) -> Schedule:
    found = json.loads(text)
    found["faults"] = (Fault(**each) for each in found["faults"])
    return Schedule(**found | {name: tuple(found[name]) for name in ("operations", "faults", "clocks")})
