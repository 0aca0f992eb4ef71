"""Stores as releases left them in which two runs could meet: rows of some items are lost from one table."""

from collections.abc import Collection

from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import store_part
from embedder.store.layout import PUBLISHED_FILE, Published, read_current, read_record, run_file, write_record
from embedder.store.publish.current import move_current
from embedder.store.tables.tables import RecordTable


def lose_rows(files: StoreFiles, ids: Collection[str], name: str = "embeddings") -> None:
    """Publish a version of one table without the rows of some items."""
    current = read_current(files)
    content = RecordTable(files, name, getattr(current, name)).read()
    rest = content.filter([item_id not in ids for item_id in content["item_id"].to_pylist()])
    part = store_part(files, name, f"part-{current.run_id}-rewrite-lost.parquet", rest, "")
    version = RecordTable(files, name).commit_files("lost", [part])
    move_current(files, current.model_copy(update={name: version}))
    path = run_file(current.run_id, PUBLISHED_FILE)
    count = {"num_vectors" if name == "embeddings" else "num_items": rest.num_rows}
    write_record(files, path, read_record(files, path, Published).model_copy(update={name: version, **count}))
