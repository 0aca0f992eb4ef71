"""What the listing is compared with: what is published, and what an unfinished run has done since."""

import random
import subprocess
import sys

import pyarrow as pa
import pytest

from embedder.ingest.diff import MODEL_CHANGED, diff
from embedder.ingest.known_items import NOTHING_FINISHED, PUBLISHED, known_items


def published(*rows):
    """Published items as (id, state), embedded with two vectors where nothing else is said."""
    common = {"source": "", "size_bytes": 1, "modified": "t0", "attempts": 1, "transient": None, "stale": False}
    held = [
        {**common, "item_id": name, "state": state, "content_version": f"of {name}", "num_vectors": 2, **dict(*more)}
        for name, state, *more in rows
    ]
    return pa.Table.from_pylist(held, PUBLISHED)


def finished(*rows):
    """Items of an unfinished run as (id, state)."""
    common = {"size_bytes": 9, "modified": "t9", "attempts": 4, "transient": True}
    held = [{**common, "item_id": name, "state": state} for name, state in rows]
    return pa.Table.from_pylist(held, NOTHING_FINISHED.schema)


def facts(known):
    """What is known: id = (size, why, version, vectors)."""
    columns = ["item_id", "size_bytes", "why", "known_version", "known_vectors"]
    return {row["item_id"]: tuple(row.values())[1:] for row in known.select(columns).to_pylist()}


def test_the_journal_counts_before_the_table_and_keeps_what_is_published():
    table = published(("a", "embedded"), ("b", "embedded"), ("c", "rejected"))
    found = facts(known_items(table, finished(("new", "embedded"), ("b", "rejected"))))
    assert found == {
        "new": (9, None, None, None),
        "b": (9, "rejected before", "of b", 2),
        "a": (1, None, "of a", 2),
        "c": (1, None, None, 2),
    }


def test_vectors_of_a_reject_count_only_where_they_are_stale():
    table = published(("whole", "rejected", {"stale": True}), ("torn", "rejected", {"stale": None}))
    assert {name: row[2] for name, row in facts(known_items(table, NOTHING_FINISHED)).items()} == {
        "whole": "of whole",
        "torn": None,
    }


def test_nothing_is_kept_of_what_is_outdated():
    table = published(("a", "embedded"), ("b", "embedded"))
    found = facts(known_items(table, finished(("b", "embedded")), outdated=MODEL_CHANGED))
    assert found == {"b": (9, None, None, None), "a": (1, MODEL_CHANGED, None, None)}


COMPARE = """
import pyarrow as pa
from embedder.ingest.diff import diff, find_gone
from embedder.ingest.known_items import NOTHING_FINISHED, PUBLISHED, known_items
number = 200_000
row = {"source": "", "size_bytes": 1, "modified": "2000-01-01T00:00:00.000000000Z", "attempts": 1, "state": "embedded",
       "transient": None, "stale": False, "content_version": "0" * 32, "num_vectors": 1}
columns = {name: pa.repeat(pa.scalar(row[name], PUBLISHED.field(name).type), number) for name in row}
table = pa.table({"item_id": [f"folder/{each:08d}.png" for each in range(number)], **columns})
listing = table.select(["item_id", "size_bytes", "modified"])
before = pa.total_allocated_bytes()
assert diff(listing, known_items(table, NOTHING_FINISHED)).num_unchanged == number
assert find_gone(listing, table).num_rows == 0
print(pa.default_memory_pool().max_memory() / before)
"""


@pytest.mark.medium
def test_comparing_takes_less_memory_than_two_copies_of_the_tables():
    done = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True, check=True)
    assert 1 < float(done.stdout) < 3


@pytest.mark.parametrize("outdated", [None, MODEL_CHANGED])
def test_before_the_first_publication_only_the_journal_knows_anything(outdated):
    assert known_items(published(), NOTHING_FINISHED, outdated=outdated).num_rows == 0
    assert facts(known_items(published(), finished(("a", "embedded")), outdated=outdated)) == {
        "a": (9, None, None, None)
    }


def test_tables_of_many_pieces_are_compared_row_by_row():
    numbers = random.Random(0)
    held = {f"{number:04d}": numbers.choice(["t0", "t1"]) for number in numbers.sample(range(2000), 1000)}
    listed = {f"{number:04d}": numbers.choice(["t0", "t1"]) for number in numbers.sample(range(2000), 1000)}
    rows = [published((name, "embedded", {"modified": when})) for name, when in held.items()]
    pieces = [
        pa.table({"item_id": [name], "size_bytes": [1], "modified": [when], "caption": [f"of {name}"]})
        for name, when in listed.items()
    ]
    found = diff(pa.concat_tables(pieces), known_items(pa.concat_tables(rows), NOTHING_FINISHED))
    columns = ["item_id", "caption", "reason", "known_version"]
    expected = [
        (name, f"of {name}", "content changed" if name in held else "new", f"of {name}" if name in held else None)
        for name, when in listed.items()
        if held.get(name) != when
    ]
    assert [tuple(row.values()) for row in found.to_embed.select(columns).to_pylist()] == expected
    assert found.num_unchanged == len(listed) - len(expected) > 0
