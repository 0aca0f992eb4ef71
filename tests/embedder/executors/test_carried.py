"""Carried columns go around the model: stages move no byte of them, and each row gets its item's own values back."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from embedding_runs import embedded

from embedder import pipeline
from embedder.batch_schema import CARRIED, ITEM_NUMBER
from embedder.executors import local
from embedder.executors.carried import NOTHING_CARRIED, detach_carried_columns

PAGE_BYTES = 10_000
NUM_ITEMS = 24


def page_of(number):
    return bytes([number]) * PAGE_BYTES


@pytest.fixture
def catalogue(make_run, tmp_path):
    """Makes runs over one table of pictures, two of them the same clip of two segments, with chosen carried columns."""
    images = [samples.image_bytes(number) for number in range(NUM_ITEMS - 2)]
    clip = samples.clip(tmp_path / "clip.mp4", seconds=4.0).read_bytes()
    pages = [page_of(number) for number in range(NUM_ITEMS)]
    table = pa.table(
        {
            "sku": pa.array(range(NUM_ITEMS)),
            "photo": pa.array([*images, clip, b"no picture"], pa.binary()),
            "page": pa.array([*pages[:3], None, *pages[4:]], pa.binary()),
            "letter": [chr(97 + number) for number in range(NUM_ITEMS)],
        }
    )
    pq.write_table(table, tmp_path / "catalogue.parquet", row_group_size=8)
    columns = {"id": "sku", "image": "photo"}

    def configure(*carryover, **changes):
        source = {"path": str(tmp_path / "catalogue.parquet"), "columns": columns, "carryover": list(carryover)}
        store = str(tmp_path / "-".join(("store", *carryover, *map(str, changes.values()))))
        options = {"segment_s": 2.0, "rows_per_part": 6, "max_reject_fraction": 0.2}
        return make_run([source], store=store, **options, **changes)

    return configure


def assert_own_pages(rows):
    """Each row, both of the clip among them, has the page of its item."""
    clip = str(NUM_ITEMS - 2)
    assert {key[0] for key in rows} == {str(number) for number in range(NUM_ITEMS - 1)}, "all but the broken one"
    assert [key for key in rows if key[0] == clip] == [(clip, 0), (clip, 1)]
    for (item_id, _), row in rows.items():
        assert row["page"] == (None if item_id == "3" else page_of(int(item_id)))
        assert row.get("letter", chr(97 + int(item_id))) == chr(97 + int(item_id))


@pytest.fixture
def traffic(monkeypatch):
    """Bytes that the local engine's stages are handed and hand on, but for the trace, whose numbers are times."""
    moved = []
    encode = local._Stages.encode

    def counted(stages, table):
        result = encode(stages, table)
        moved.extend(each.drop_columns(["trace"]).nbytes for each in (table, result))
        return result

    monkeypatch.setattr(local._Stages, "encode", counted)

    def take():
        total = sum(moved)
        moved.clear()
        return total

    return take


@pytest.mark.medium
def test_a_carried_column_of_ten_kilobytes_adds_no_byte_to_what_the_stages_move(catalogue, traffic):
    _, small = embedded(catalogue("letter"))
    without = traffic()
    _, rows = embedded(catalogue("letter", "page"))
    assert traffic() == without > 0
    assert_own_pages(rows)
    assert small.keys() == rows.keys()
    embedded(catalogue())
    with_nothing = traffic()
    assert without - with_nothing == 2 * 8 * (len(rows) + 1), "the number of the item, into the stages and out of them"


@pytest.mark.slow
def test_on_ray_a_carried_column_adds_no_byte_to_the_blocks_between_the_steps(catalogue, monkeypatch, ray_cluster):
    graphs = []
    graph_of = pipeline.embedding_graph

    def remembered(listing, job):
        graphs.append(graph_of(listing, job))
        return graphs[-1]

    monkeypatch.setattr(pipeline, "embedding_graph", remembered)
    _, rows = embedded(catalogue("letter", "page", engine="ray", num_stages=1))
    assert_own_pages(rows)
    blocks = list(graphs[0].iter_batches(batch_format="pyarrow", batch_size=None))
    assert sum(block.num_rows for block in blocks) == len(rows) + 1
    columns = {name for block in blocks for name in block.column_names}
    assert ITEM_NUMBER in columns
    assert not any(name.startswith(CARRIED) for name in columns)
    assert sum(block.nbytes for block in blocks) < PAGE_BYTES * NUM_ITEMS / 4


def test_rows_get_the_values_of_their_items_whatever_pieces_these_lie_in():
    shuffled = random.Random(7)
    tables = [
        pa.table({"item_id": [f"{start}"] * size, CARRIED + "page": [page_of(start + row) for row in range(size)]})
        for start, size in ((0, 5), (5, 0), (5, 12))
    ]
    kept = []

    def keep(piece):
        kept.append(piece)
        return len(kept) - 1

    fetched = []

    def fetch(references):
        fetched.extend(references)
        return [kept[number] for number in references]

    listing, carried = detach_carried_columns(tables, keep=keep, fetch=fetch, piece_bytes=3 * PAGE_BYTES)
    assert [table.column_names for table in listing] == [["item_id", ITEM_NUMBER]] * 3
    assert max(piece.num_rows for piece in kept) == 2, "an offset or two more than the bytes of the pages"
    numbers = [shuffled.randrange(17) for _ in range(60)]
    joined = carried.join(pa.table({"segment": range(60), ITEM_NUMBER: numbers}))
    assert joined.column_names == ["segment", CARRIED + "page"]
    assert joined["segment"].to_pylist() == list(range(60))
    assert joined[CARRIED + "page"].to_pylist() == [page_of(number) for number in numbers]
    fetched.clear()
    carried.join(pa.table({ITEM_NUMBER: [3, 3, 2]}))
    assert len(fetched) == 1, "of the pieces, what the rows are of"
    none = carried.join(pa.table({ITEM_NUMBER: pa.array([], pa.int64())}))
    assert none.schema.names == [CARRIED + "page"]


def test_columns_that_a_step_takes_stay_in_the_listing_too():
    table = pa.table({"item_id": ["a"], CARRIED + "price": [3], CARRIED + "page": [b"x"]})
    (listing,), carried = detach_carried_columns([table], [CARRIED + "price"])
    assert listing.column_names == ["item_id", CARRIED + "price", ITEM_NUMBER]
    assert carried.join(pa.table({ITEM_NUMBER: [0], CARRIED + "price": [99]})).to_pylist() == [
        {CARRIED + "price": 3, CARRIED + "page": b"x"}
    ]


def test_a_listing_that_carries_nothing_stays_as_it_is():
    table = pa.table({"item_id": ["a"]})
    assert detach_carried_columns([table]) == ([table], NOTHING_CARRIED)
    assert detach_carried_columns([]) == ([], NOTHING_CARRIED)
    rows = pa.table({"segment": [0]})
    assert NOTHING_CARRIED.join(rows) is rows
