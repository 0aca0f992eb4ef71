"""Items that a run has finished: the same, and in bounded memory, wherever their rows are while they are looked at."""

import random
import subprocess
import sys

import pyarrow as pa
import pytest
from store_samples import begin, reject, row, table
from store_states import new_store

from embedder.store.journal.finished import WHOLE, of_whole, read_finished, whole_among, whole_without
from embedder.store.journal.part_writer import write_part

CHILD = """
import resource, sys
import numpy as np, pyarrow as pa
from embedder.store.journal import finished

def rows(schema, number, **columns):
    for start in range(0, number, 50_000):
        ids = pa.array(np.char.mod("folder/picture-%09d.jpg", np.arange(start, start + 50_000)))
        values = {"item_id": ids, "session": pa.repeat("0001-abcd", 50_000)}
        for name, value in columns.items():
            values[name] = pa.repeat(pa.scalar(value, schema.field(name).type), 50_000)
        yield pa.table({name: values[name] for name in schema.names}, schema)

def streams(files, parts, table, columns):
    schema = finished.key_schema(table, columns)
    given = {"items": {"num_vectors": 1}, "embeddings": {"segment": 0}}[table]
    return rows(schema, int(sys.argv[1]), **given, file=0, kept=False)

finished.stream_keys = streams
found = finished.read_finished(None, [])
assert found.whole.num_rows == int(sys.argv[1])
assert sum(each.num_rows for each in finished.of_whole(found.records, found.whole)) == int(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def sessions_of_a_run(files, seed: int):
    """Three sessions of a run: items of one and of three rows, of which some lack one, some again, some kept."""
    chance = random.Random(seed)
    for _ in range(3):
        run, stamp = begin(files)
        for task in range(chance.randint(1, 3)):
            rows = []
            for number in chance.sample(range(40), chance.randint(1, 12)):
                kind = chance.random()
                if kind < 0.15:
                    rows.append(reject(f"{number}.jpg"))
                elif kind < 0.3:
                    there = chance.randint(1, 3)
                    rows += [row(f"{number}.jpg", segment=each, num_vectors=3) for each in range(there)]
                else:
                    rows.append(row(f"{number}.jpg"))
            write_part(files, stamp, task, table(*rows))
    return run


def content(tables, names):
    return sorted(map(str, pa.concat_tables([each.select(names) for each in tables]).to_pylist()))


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(8))
def test_parts_on_disk_hold_what_one_part_in_memory_holds(tmp_path, monkeypatch, seed):
    files = new_store(tmp_path / "store")
    entries = sessions_of_a_run(files, seed).entries()
    found, ids = {}, pa.chunked_array([[f"{number}.jpg" for number in range(0, 40, 3)]])
    for name, memory_bytes in (("memory", 1 << 30), ("disk", 0)):
        monkeypatch.setattr("embedder.store.journal.finished.MEMORY_BYTES", memory_bytes)
        finished = read_finished(files, entries, ["state"])
        found[name] = [
            content(finished.whole.tables(), WHOLE.names),
            content(of_whole(finished.records, finished.whole), ["item_id", "session", "state", "file"]),
            content(of_whole(finished.vectors, finished.whole), ["item_id", "segment", "file"]),
            content(whole_without(finished.whole, ids).tables(), WHOLE.names),
            content([whole_among(finished.whole, ids)], WHOLE.names),
        ]
        assert (finished.whole.num_parts > 1) == (name == "disk")
    assert found["memory"] == found["disk"]
    assert found["memory"][0]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_items():
    peaks_kib = [
        int(
            subprocess.run(
                [sys.executable, "-c", CHILD, str(number)], capture_output=True, text=True, check=True
            ).stdout
        )
        for number in (1_000_000, 4_000_000)
    ]
    assert peaks_kib[1] - peaks_kib[0] < 64 << 10
