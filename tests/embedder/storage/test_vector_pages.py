"""Vectors read from pages as they lie: the same to the bit as by Arrow, and from damaged files never wrong ones."""

import os
import random
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedder.storage import vector_pages
from embedder.storage.parquet_encoding import find_unlike, parse_struct
from embedder.storage.vector_pages import (
    MAX_LEVELS,
    PAGE_BYTES,
    VectorColumn,
    is_laid_out,
    layout_options,
    read_columns,
    read_vector_pages,
)
from embedder.store.tables.arrow_tensors import pack_vectors

COLUMN, OTHER = "image_embedding", "text_embedding"
NUM_MUTATIONS = int(os.environ.get("EMBEDDER_MUTATIONS", "600"))
PATTERNS = {
    "all": lambda n: np.ones(n, bool),
    "none": lambda n: np.zeros(n, bool),
    "in turns": lambda n: np.arange(n) % 2 == 0,
    "in blocks": lambda n: np.arange(n) // 50 % 2 == 1,
    "at random": lambda n: np.random.default_rng(n).random(n) < 0.5,
    "most": lambda n: np.random.default_rng(n).random(n) > 0.02,
}


def vectors_of(present: np.ndarray, width: int) -> np.ndarray:
    """Values with NaN and infinity among them."""
    values = np.random.default_rng(width).standard_normal((int(present.sum()), width)).astype(np.float32)
    if values.size:
        values[0, 0], values[-1, -1] = np.nan, -np.inf
    return values


def content_of(present: np.ndarray, width: int) -> pa.Table:
    other = pack_vectors(vectors_of(~present, width), ~present)
    ids = pa.array([f"item {number}" for number in range(len(present))])
    return pa.table({"item_id": ids, COLUMN: pack_vectors(vectors_of(present, width), present), OTHER: other})


def written(content: pa.Table, streams=(), **options) -> bytes:
    sink = BytesIO()
    layout = layout_options(content.schema, [COLUMN, OTHER], streams)
    pq.write_table(content, sink, **({"compression": "zstd"} | layout | options))
    return sink.getvalue()


def read(data: bytes, column: str = COLUMN, place=None, *, check_sums: bool = False):
    source = pa.BufferReader(data)
    return read_vector_pages(source, column, place, check_sums=check_sums)


def flat(rows: pa.Table) -> np.ndarray:
    """Values of all vectors in a table of Arrow's."""
    return rows[COLUMN].combine_chunks().flatten().to_numpy()


def levels_at(data: bytes) -> list[tuple[int, int]]:
    """Start and stop of the header and levels of each page of the column."""
    chunk = pq.ParquetFile(BytesIO(data)).metadata.row_group(0).column(1)
    position, places = chunk.data_page_offset, []
    while position < chunk.data_page_offset + chunk.total_compressed_size:
        header, body = parse_struct(memoryview(data), position)
        places.append((position, body + header[8][5] + header[8][6]))
        position = body + header[3]
    return places


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 12, 20, 64, 100, 384, 768])
@pytest.mark.parametrize("page_bytes", [4096, PAGE_BYTES])
def test_vectors_are_those_that_were_written_whatever_their_width_and_the_rows_without(width, page_bytes, monkeypatch):
    for num_rows in (1, 2, 7, 700):
        for pattern in PATTERNS.values():
            present = pattern(num_rows)
            content = content_of(present, width)
            data = written(content, data_page_size=page_bytes)
            for column, rows in ((COLUMN, present), (OTHER, ~present)):
                found = read(data, column, check_sums=True)
                assert found.present.tolist() == rows.tolist()
                assert found.values.tobytes() == vectors_of(rows, width).tobytes()
                assert found.values.shape == (rows.sum(), width if rows.any() else 0)
            monkeypatch.setattr(vector_pages, "MIN_ROWS", 0)
            file = pq.ParquetFile(BytesIO(data))
            ours, arrows = read_columns(file, pa.BufferReader(data), None), file.read()
            assert ours.schema == arrows.schema
            assert ours.select(["item_id"]).equals(arrows.select(["item_id"]))
            assert ours[COLUMN].is_null().equals(arrows[COLUMN].is_null())
            assert flat(ours).tobytes() == vectors_of(present, width).tobytes()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_streams_of_bytes_are_put_together_as_arrow_does(pattern):
    for num_rows, width in ((1, 3), (7, 1), (700, 24)):
        present = PATTERNS[pattern](num_rows)
        data = written(content_of(present, width), streams=[COLUMN], row_group_size=300, data_page_size=1024)
        kinds = {*pq.ParquetFile(BytesIO(data)).metadata.row_group(0).column(1).encodings}
        assert "BYTE_STREAM_SPLIT" in kinds
        assert is_laid_out(pa.BufferReader(data), [COLUMN, OTHER])
        found = read(data, check_sums=True)
        assert found.present.tolist() == present.tolist()
        assert found.values.tobytes() == vectors_of(present, width).tobytes()
        assert found.values.tobytes() == flat(pq.ParquetFile(BytesIO(data)).read()).tobytes()


def test_a_page_of_streams_that_claims_too_much_is_left_to_arrow(monkeypatch):
    data = written(content_of(PATTERNS["all"](50), 8), streams=[COLUMN])
    monkeypatch.setattr(vector_pages, "MAX_UNPACKED_BYTES", 50 * 8 * 4)
    assert read(data) is None


def test_row_groups_and_pages_follow_one_another_into_the_given_memory():
    present = PATTERNS["most"](900)
    data = written(content_of(present, 16), row_group_size=200, data_page_size=1024)
    memory = np.zeros((1000, 16), np.float32)
    found = read(data, place=lambda num, width: memory[:num])
    assert found.values.base is memory
    assert memory[: len(found.values)].tobytes() == vectors_of(present, 16).tobytes()
    assert not memory[len(found.values) :].any()


def test_one_page_is_not_copied_where_it_is_aligned_and_no_memory_is_given(tmp_path):
    is_copied = {}
    for length in range(16):  # of another column before it, so that it begins at each remainder by four
        content = content_of(np.ones(21, bool), 8).set_column(0, "item_id", pa.array(["x" * length] * 21))
        (tmp_path / "part.parquet").write_bytes(written(content, use_dictionary=False, compression="none"))
        with pa.memory_map(str(tmp_path / "part.parquet")) as source:
            found = read_vector_pages(source, COLUMN, check_sums=False)
        is_copied[length] = found.values.flags.owndata
        assert found.values.flags.aligned
        assert found.values.tobytes() == vectors_of(np.ones(21, bool), 8).tobytes()
    assert {True, False} == set(is_copied.values())


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd"},
        {"data_page_version": "1.0"},
        {"use_dictionary": True},
        {"use_dictionary": False, "column_encoding": {f"{COLUMN}.list.element": "BYTE_STREAM_SPLIT"}},
    ],
)
def test_files_in_another_layout_are_left_to_arrow(options):
    content = content_of(PATTERNS["most"](300), 4)
    data = written(content, **options)
    assert read(data) is None
    rows = read_columns(pq.ParquetFile(BytesIO(data)), pa.BufferReader(data), [COLUMN])
    assert flat(rows).tobytes() == flat(content).tobytes()
    assert rows[COLUMN].is_null().equals(content[COLUMN].is_null())


def test_the_layout_is_told_by_the_footer():
    content = content_of(PATTERNS["most"](30), 4)
    file = pa.BufferReader(written(content))
    assert is_laid_out(file, [COLUMN, OTHER])
    assert not is_laid_out(file, ["item_id"])
    assert is_laid_out(file, ["a column that it lacks"])
    footer = pq.ParquetFile(file).metadata
    sizes = [footer.row_group(0).column(number).compression for number in range(3)]
    assert sizes == ["ZSTD", "UNCOMPRESSED", "UNCOMPRESSED"], "the others stay compressed"
    assert layout_options(content.schema, ["another"]) == {}, "a table without vectors is written as it was"
    nested = content.append_column("tags", pa.array([[{"a": 1}]] * 30))
    footer = pq.ParquetFile(BytesIO(written(nested))).metadata
    assert [footer.row_group(0).column(number).compression for number in (0, 3)] == ["ZSTD", "ZSTD"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.0, 2.0], [1.0]], "different lengths"),
        ([[1.0, 2.0], []], "neither null nor a vector"),
        ([[1.0, 2.0], [None, 1.0]], "neither null nor a vector"),
        ([[1.0], [None]], "neither null nor a vector"),
    ],
)
def test_rows_that_are_no_vectors_of_one_length_are_an_error(rows, message):
    with pytest.raises(pa.ArrowInvalid, match=message):
        read(written(pa.table({COLUMN: pa.array(rows, pa.list_(pa.float32()))})))
    pages = pa.table({COLUMN: pa.array([[1.0, 2.0]] * 3000 + [[1.0]] * 3000, pa.list_(pa.float32()))})
    with pytest.raises(pa.ArrowInvalid, match="different lengths"):
        read(written(pages, data_page_size=64, write_batch_size=500))


def test_a_changed_value_is_told_by_the_checksum(monkeypatch):
    monkeypatch.setattr(vector_pages, "MIN_ROWS", 0)
    data = bytearray(written(content_of(PATTERNS["all"](50), 8)))
    data[levels_at(data)[0][1] + 1000] ^= 1
    with pytest.raises(pa.ArrowInvalid, match="checksum"):
        read(bytes(data), check_sums=True)
    with pytest.raises(pa.ArrowInvalid, match="checksum"):
        read_columns(pq.ParquetFile(BytesIO(data)), pa.BufferReader(bytes(data)), [COLUMN])
    assert read(bytes(data)).values.tobytes() != vectors_of(PATTERNS["all"](50), 8).tobytes(), "only where it is asked"


def test_levels_are_read_alike_whether_they_recur_or_not():
    levels = np.random.default_rng(3).integers(0, 4, 5000)
    levels[1000:4000] = MAX_LEVELS[0]
    levels[1500:3500:17] = 0
    groups = levels.reshape(-1, 8)
    packed = np.packbits((groups[:, :, None] >> [0, 1] & 1).reshape(len(groups), -1), axis=1, bitorder="little")
    data = b"".join(b"\x03" + group.tobytes() for group in packed)  # a header for each group
    unlike = np.flatnonzero(levels != 3)
    places, values = find_unlike(data, 5000, 3, len(unlike), bits=2)
    assert places.tolist() == unlike.tolist()
    assert values.tolist() == levels[unlike].tolist()
    for wrong in (data[:-1], data + b"\x03\x00\x00", data[:-3] + b"\x00\x00", data[:-3] + b"\xff" * 12):
        with pytest.raises(pa.ArrowInvalid):
            find_unlike(wrong, 5000, 3, len(unlike), bits=2)


def footer_of(thrift: bytes) -> bytes:
    return b"PAR1" + thrift + len(thrift).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize(
    "thrift",
    [
        b"\x19" * 10_000,  # lists of lists
        b"\x1c" * 10_000,  # structs of structs
        b"\x19\xf5\xff\xff\xff\xff\x0f",  # a list of four thousand million numbers
        b"\x18\xff\xff\xff\xff\x0f",  # as many bytes
        b"\x15" + b"\xff" * 100,  # a number without an end
        b"\x15\x02\x05\x02\x02\x00",  # a field twice
        b"\x17\x00\x00",  # a type that no footer has
        b"\x00",  # no schema
        b"",
    ],
)
def test_footers_that_nobody_wrote_are_errors(thrift):
    with pytest.raises(pa.ArrowInvalid, match="footer|number"):
        read(footer_of(thrift))


def mutate(data: bytes, random_of: random.Random) -> bytes:
    """Change one to three bytes of headers, levels or footer, or cut the file off."""
    kind = random_of.choice(["page"] * 4 + ["footer", "cut"])
    if kind == "cut":
        return data[: random_of.randrange(len(data))]
    changed, places = bytearray(data), levels_at(data)
    footer_bytes = int.from_bytes(data[-8:-4], "little") + 8
    for _ in range(random_of.choice([1, 1, 1, 2, 3])):
        start, stop = random_of.choice(places) if kind == "page" else (len(data) - footer_bytes, len(data))
        place = random_of.randrange(start, stop)
        new = changed[place] + random_of.choice([-1, 1]), changed[place] ^ 1 << random_of.randrange(8)
        changed[place] = random_of.choice([*new, random_of.randrange(256)]) % 256
    return bytes(changed)


def count_outcomes(num_mutations: int, monkeypatch, streams=()) -> dict[str, int]:
    """Read mutated files; each gives the right vectors, no column of that name, or the error that the store expects."""
    monkeypatch.setattr(vector_pages, "PAGE_BYTES", 2048)
    monkeypatch.setattr(vector_pages, "BATCH_VALUES", 256)
    random_of, counts = random.Random(7), {"right": 0, "error": 0, "lacking": 0}
    for number in range(num_mutations):
        if number % 50 == 0:
            present = PATTERNS[random_of.choice(list(PATTERNS))](random_of.choice([1, 3, 40, 150]))
            width = random_of.choice([4, 5, 16, 32])
            expected, data = vectors_of(present, width).tobytes(), written(content_of(present, width), streams)
        changed = mutate(data, random_of)
        try:
            source = pa.BufferReader(changed)
            found = read_vector_pages(source, COLUMN, check_sums=False)
            if found is None:  # the footer names another column or layout, which Arrow reads
                rows = pq.ParquetFile(source, page_checksum_verification=True).read([COLUMN])
                counts["lacking"] += not rows.column_names
                if not rows.column_names:
                    continue
                found = VectorColumn(flat(rows), rows[COLUMN].is_valid().to_numpy())
        except (OSError, pa.ArrowException, UnicodeDecodeError):
            counts["error"] += 1
            continue
        assert found.present.tolist() == present.tolist()
        assert found.values.tobytes() == expected
        counts["right"] += 1
    return counts


@pytest.mark.parametrize("streams", [(), (COLUMN,)])
def test_a_damaged_file_gives_an_error_or_the_right_vectors(monkeypatch, streams):
    counts = count_outcomes(NUM_MUTATIONS, monkeypatch, streams)
    assert counts["error"] > NUM_MUTATIONS / 2
    assert counts["right"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("streams", [(), (COLUMN,)])
def test_ten_thousand_damaged_files_give_an_error_or_the_right_vectors(monkeypatch, streams):
    counts = count_outcomes(10_000, monkeypatch, streams)
    assert counts["error"] > 5000
    assert counts["right"] > 300
