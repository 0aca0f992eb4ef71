"""Metadata updates of items with unchanged content: their rows get the new URI and carried columns, nothing else.

Rewriting a table or tar moves all its rows: an item's image is at another offset, its price has changed. Such rows keep
vector and run, and must not point to another item's image.
"""

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from embedder.storage.hashed_rows import HashedRows
from embedder.store.files import StoreFiles
from embedder.store.journal.finished import PLACE
from embedder.store.journal.journal import JournalEntry
from embedder.store.layout import journal_folder
from embedder.store.schema import EMBEDDINGS
from embedder.store.tables.arrow_lookup import positions, replace_column, take_or_null

MOVED = pa.schema([EMBEDDINGS.field("item_id"), EMBEDDINGS.field("uri")])


def moves_file(run_id: str, name: str) -> str:
    """Return the path of one journal entry's moves (`item_id`, `uri`, carried columns), written before the entry."""
    return f"{journal_folder(run_id)}/{name}-moved.parquet"


def read_moves(files: StoreFiles, run_id: str, entries: Iterable[JournalEntry], whole: HashedRows) -> pa.Table:
    """Read the moves of items whose published rows stay into memory: ids, uris and carried columns.

    `whole` are items of `embedder.store.journal.finished.WHOLE`, with the valid session of each.
    """
    with_moves = [entry for entry in entries if entry.num_moves]
    if not with_moves:
        return MOVED.empty_table()
    kept = pa.concat_tables([items.filter(items["kept"]).select(PLACE) for items in whole.tables()])
    tables = []
    for entry in with_moves:
        moves = files.read_table(moves_file(run_id, entry.name))
        sessions = pa.array([part.session for part in entry.parts], pa.string())
        here = kept.filter(pc.is_in(kept["session"], value_set=sessions))["item_id"].combine_chunks()
        tables.append(moves.filter(pc.is_in(moves["item_id"], value_set=here)))
    return pa.concat_tables(tables)


def move_rows(rows: pa.Table, moves: pa.Table) -> pa.Table:
    """Return rows of embeddings with the current URI and carried columns of their items."""
    place = positions(rows["item_id"], moves["item_id"])
    for name in moves.schema.names:
        if name == "item_id" or name not in rows.schema.names:
            continue
        now = take_or_null(moves[name], place).cast(rows[name].type)
        rows = replace_column(rows, name, pc.if_else(pc.is_valid(place), now, rows[name]))
    return rows
