"""What a long history takes: a store of many publications and part files, opened, listed, changed and cleaned.

    python -m growth.log make CONFIG VERSIONS PARTS   # a store with as many rows as part files
    python -m growth.log open CONFIG                  # opens it
    python -m growth.log prepare CONFIG               # opens it, and reads what every search needs
    python -m growth.log embed CONFIG                 # embeds what is new, with vectors of chance
    python -m growth.log commit FOLDER PARTS          # one commit of so many part files, which are not there

Every part file holds one row of its own, written as a run writes it; only the bytes of its id differ from those of the
first one. Entries of the Delta log are written as deltalake writes them, and it writes the checkpoint.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from growth.made_up import as_embedded, refresh_without_model

ENTRIES_AFTER_CHECKPOINT = 50  # half of the hundred after which deltalake writes the next one
FIRST_ID = b"item-000000000"
COLUMNS = {
    "versions": "{num_versions:,}",
    "part files": "{num_parts:,}",
    "what": "{what}",
    "wall s": "{wall_s:,.1f}",
    "CPU s": "{cpu_s:,.1f}",
    "peak MiB": "{mib:,.0f}",
}


def measure_log(root: Path, num_versions: int, parts_per_version: int) -> list[dict[str, Any]]:
    """Make a store of many publications, and run what reads and changes it, each in a process of its own.

    Args:
        root: to work in.
        num_versions: of each table.
        parts_per_version: part files that each of them adds to each table.

    Returns:
        What each command took: wall and CPU seconds, and the most memory that it held (resident set size).

    Raises:
        CommandFailedError: a command failed, or did not find what there is.
    """
    from corpus import DEMO_MODEL, write_config
    from growth.names import check, take
    from harness import EMBEDDER

    root.mkdir(parents=True)
    num_parts = num_versions * parts_per_version
    config = write_config(root / "nightly.toml", DEMO_MODEL, root / "store", root / "names")
    with config.open("a") as file:
        file.write('[source.columns]\nid = "id"\ncaption = "caption"\n[index]\nbuild = false\n')
    own = (sys.executable, "-m", "growth.log")
    taken: list[dict[str, Any]] = []

    def run(what: str, *command: str) -> dict[str, Any]:
        figures, found = take(command)
        taken.append({"num_versions": num_versions, "num_parts": num_parts, "what": what, **figures})
        print(f"{num_versions:,} versions: {what}: {figures['wall_s']:.1f} s", flush=True)
        return found

    run("commit as many part files at once", *own, "commit", str(root / "one"), str(num_parts))
    store = ("--store", str(root / "store"), "--json")
    write_listing(root / "names", num_parts)
    run("make the store", *own, "make", str(config), str(num_versions), str(parts_per_version))
    check(run("open_store", *own, "open", str(config))["num_columns"] > 0, "the store has columns")
    run("read what every search needs", *own, "prepare", str(config))
    history = run("history", *EMBEDDER, "history", *store)["publications"]
    check(len(history) == num_versions and all(each["can_be_read"] for each in history), "all can be read")
    idle = run("idle night", *EMBEDDER, "refresh", str(config), "--json")
    check((idle["outcome"], idle["num_unchanged"]) == ("nothing to do", num_parts), "nothing has changed")
    write_listing(root / "names", num_parts + 1)
    check(run("publish one item, compact", *own, "embed", str(config))["published"], "one more item is published")
    write_listing(root / "names", num_parts + 2)
    check(run("publish another item", *own, "embed", str(config))["published"], "one more item is published")
    idle = run("idle night after that", *EMBEDDER, "refresh", str(config), "--json")
    check((idle["outcome"], idle["num_unchanged"]) == ("nothing to do", num_parts + 2), "nothing has changed")
    run("vacuum", *EMBEDDER, "vacuum", "--keep-days", "0", "--keep-versions", "1", *store)
    return taken


def show_log(taken: list[dict[str, Any]]) -> None:
    """Print one line for each command over each store."""
    from harness import MIB, show

    show([row | {"mib": row["peak_bytes"] / MIB} for row in taken], COLUMNS)


def write_listing(folder: Path, num_items: int) -> None:
    """Write the items with their captions, which are all the same."""
    folder.mkdir(exist_ok=True)
    ids = [item_id(number).decode() for number in range(num_items)]
    pq.write_table(pa.table({"id": ids, "caption": ["a picture"] * num_items}), folder / "names.parquet")


def item_id(number: int) -> bytes:
    """Id of an item, as long as all others."""
    return b"item-%09d" % number


def make_store(config_path: Path, num_versions: int, parts_per_version: int) -> None:
    """Make a store whose every version has added part files of one row each, and was published."""
    from deltalake import DeltaTable, Schema

    from embedder.config import load_config
    from embedder.executors.job import make_plan, store_info
    from embedder.models.model_folder import open_model
    from embedder.sources.listing import list_sources
    from embedder.store.files import StoreFiles
    from embedder.store.journal.runs import RUN_FILE, new_run
    from embedder.store.layout import PUBLISHED_FILE, Current, Published, RunInfo, run_file, utc_now, write_record
    from embedder.store.publish.current import move_current
    from embedder.store.schema import TABLES
    from embedder.store.store_info import MODEL_FIELDS, bind_store

    config = load_config(config_path)
    model = open_model(config.required_model)
    make_plan(config.compute, model)
    info, files = store_info(config.rows, model, config.compute.settled_dtype), StoreFiles(config.required_store)
    bind_store(files, info)
    first = next(iter(list_sources(config.source))).slice(0, 1)
    templates = _templates(files, new_run(files, info, pa.schema([])), as_embedded(first, 0))
    for name, schema in TABLES.items():
        DeltaTable.create(files.uri(name), Schema.from_arrow(schema))
    fields = info.model_dump(include=set(MODEL_FIELDS))
    began, previous = utc_now() - timedelta(days=30), None
    for version in range(1, num_versions + 1):
        started_at = began + timedelta(minutes=version)
        run_id = f"{started_at:%Y%m%dT%H%M%SZ}-1000"
        numbers = range((version - 1) * parts_per_version, version * parts_per_version)
        for name, (content, stats) in templates.items():
            _add_version(Path(files.uri(name)), version, run_id, content, stats, numbers)
        run = RunInfo(run_id=run_id, started_at=started_at, **info.model_dump(include=set(RunInfo.model_fields)))
        write_record(files, run_file(run_id, RUN_FILE), run)
        current = Current(
            run_id=run_id, embeddings=version, items=version, published_at=started_at, previous=previous, **fields
        )
        counts = {"num_items": numbers.stop, "num_vectors": numbers.stop, "num_rejected": 0}
        write_record(files, run_file(run_id, PUBLISHED_FILE), Published(**current.model_dump(), **counts, kind="embed"))
        previous = run_id
    for name in TABLES:
        DeltaTable(files.uri(name), version=max(num_versions - ENTRIES_AFTER_CHECKPOINT, 0)).create_checkpoint()
    move_current(files, current)


def _templates(files: Any, run: Any, row: pa.Table) -> dict[str, tuple[bytes, str]]:
    """Part file of each table with one row, whose id stands in it as it is, and its statistics; deletes the run."""
    import shutil

    from embedder.store.journal.part_writer import RunMetadata, write_part

    prints = run.model_fingerprint, run.preprocess_fingerprint
    found = {}
    for part in write_part(files, RunMetadata(run.run_id, "0001", *prints, pa.schema([])), 0, row).parts:
        path = files.folder / part.table / part.path
        pq.write_table(pq.read_table(path), path, compression="none")
        found[part.table] = path.read_bytes(), part.stats
        path.unlink()
    shutil.rmtree(files.folder / "runs" / run.run_id)
    return found


def _add_version(folder: Path, version: int, run_id: str, content: bytes, stats: str, numbers: range) -> None:
    """Write the part files of a version, and its entry in the log."""
    actions: list[dict[str, Any]] = [{"txn": {"appId": run_id, "version": 1, "lastUpdated": 0}}]
    for number in numbers:
        name = f"part-{run_id}-0001-abcd-{number - numbers.start:06d}.parquet"
        (folder / name).write_bytes(content.replace(FIRST_ID, item_id(number)))
        own_stats = stats.replace(FIRST_ID.decode(), item_id(number).decode())
        fields = {"path": name, "partitionValues": {}, "size": len(content), "modificationTime": 0, "dataChange": True}
        actions.append({"add": fields | {"stats": own_stats}})
    actions.append({"commitInfo": {"timestamp": 0, "operation": "WRITE"}})
    (folder / "_delta_log" / f"{version:020d}.json").write_text("\n".join(map(json.dumps, actions)))


def open_store(config_path: Path, *, prepares: bool) -> None:
    """Open the store as a program does, and read its columns' names, or (`prepares`) what every search needs."""
    import embedder
    from embedder.config import load_config

    store = embedder.open_store(load_config(config_path).required_store)
    if prepares:
        store.prepare()
    print(json.dumps({"version": store.version, "num_columns": len(store.columns)}))


def commit_parts(folder: Path, num_parts: int) -> None:
    """Add part files to a table in one commit, and open it; the files themselves are not written."""
    from embedder.store.files import StoreFiles
    from embedder.store.part_file import PartFile
    from embedder.store.schema import TABLES
    from embedder.store.tables.tables import RecordTable

    parts = []
    for number in range(num_parts):
        bounds = {"item_id": item_id(number).decode(), "state": "embedded"}
        stats = {"numRecords": 1, "minValues": bounds, "maxValues": bounds, "nullCount": dict.fromkeys(bounds, 0)}
        path = f"part-{number:012d}.parquet"
        parts.append(
            PartFile(table="items", path=path, num_rows=1, size_bytes=1000, stats=json.dumps(stats), session="")
        )
    files = StoreFiles(folder)
    RecordTable(files, "items").commit_files("run", parts, TABLES["items"])
    print(json.dumps({"num_parts": len(RecordTable(files, "items").paths())}))


def main(command: str, config: str, *numbers: str) -> None:
    if command == "commit":
        commit_parts(Path(config), *map(int, numbers))
    elif command == "make":
        make_store(Path(config), *map(int, numbers))
    elif command == "embed":
        refresh_without_model(Path(config), command="embed")
    else:
        open_store(Path(config), prepares=command == "prepare")


if __name__ == "__main__":
    main(*sys.argv[1:])
