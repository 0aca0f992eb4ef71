"""Vectors in half precision: rounded where a gate allows it, and nothing else of the store changes."""

import json
from contextlib import suppress
from dataclasses import replace
from itertools import count

import duckdb
import numpy as np
import polars
import pyarrow.parquet as pq
import pytest
import samples
from command_runs import run_here
from deltalake import DeltaTable
from embedding_runs import embedded
from index_stores import NO_FIRST_INDEX, indexed_run, unit
from refresh_runs import refreshed
from store_samples import INFO, begin, row, table
from store_states import Killed, build_store_index, dying, new_store, no_index, rows_at, rows_now, vectors_now
from two_models import OTHER, TwoModels, view_of

from embedder.config_toml.sections import IndexConfig
from embedder.plugins.maintain.purge.purge import purge
from embedder.retrieval.store_api import open_store
from embedder.store.journal.part_writer import write_part
from embedder.store.layout import STORE_FILE, StoreInfo, read_current, read_record
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.maintenance.half_precision import (
    MAX_LOST_NEIGHBOURS,
    describe_saving,
    is_half_store,
    measure_loss,
)
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import publish
from embedder.store.tables.arrow_tensors import is_half, pack_vectors, round_vectors, unpack_vectors
from embedder.store.tables.tables import RecordTable

NUM, DIM = 600, 32
COLUMN = "image_embedding"


def item(number: int, night: int = 0, scale: float = 1.0) -> dict:
    vector = unit(np.random.default_rng([night, number]).standard_normal(DIM)) * np.float32(scale)
    caption = unit(vector + 0.3 * np.random.default_rng([9, number]).standard_normal(DIM) / DIM**0.5)
    own = {"image_embedding": vector.tolist(), "text_embedding": caption.tolist(), "caption": f"{number}"}
    return row(f"{number:04d}.jpg", modified=str(night), **own)


@pytest.fixture
def files(tmp_path):
    files = new_store(tmp_path / "store")
    indexed_run(files, *(item(number) for number in range(NUM)))
    return files


def rounded(vector) -> list[float]:
    return np.float16(vector).astype(np.float32).tolist()


def encodings(files) -> set[str]:
    table = RecordTable(files, "embeddings", read_current(files).embeddings)
    found = [pq.ParquetFile(files.folder / "embeddings" / path).metadata.row_group(0) for path in table.paths()]
    columns = [group.column(each) for group in found for each in range(group.num_columns)]
    return {kind for column in columns if column.path_in_schema.startswith(COLUMN) for kind in column.encodings}


def test_compaction_rounds_what_is_published_and_changes_nothing_else(files):
    before, index = rows_now(files), read_current(files).index
    compact(files, vectors="float16")
    after = rows_now(files)
    assert before.keys() == after.keys()
    for key, old in before.items():
        new = after[key]
        for name in ("image_embedding", "text_embedding"):
            assert new[name] == rounded(old[name])
        assert {name: new[name] for name in new if "_embedding" not in name} == {
            name: old[name] for name in old if "_embedding" not in name
        }
    assert "BYTE_STREAM_SPLIT" in encodings(files)
    assert read_current(files).index == index
    assert compact(files, lay_out=True, vectors="float16")[0] is None, "a second one finds nothing to do"


def test_an_older_publication_keeps_its_bits_and_comes_back_by_rollback(files):
    first, exact = read_current(files), vectors_now(files)
    compact(files, vectors="float16")
    assert is_half_store(files, INFO.model_fingerprint) and not is_half_store(files, "another model")
    assert {key[0]: each[COLUMN] for key, each in rows_at(files, first).items()} == exact
    rollback(files, first.run_id, no_index)
    assert vectors_now(files) == exact


def test_a_write_task_of_such_a_store_rounds_its_rows(files):
    run, metadata = begin(files)
    write_part(files, replace(metadata, is_half=True), 0, table(item(1, night=1)))
    publish([ModelWork(run, metadata)])
    assert vectors_now(files)["0001.jpg"] == rounded(item(1, night=1)[COLUMN])
    assert vectors_now(files)["0002.jpg"] == item(2)[COLUMN]


def test_purge_and_changes_of_single_rows_keep_the_form(files):
    compact(files, vectors="float16")
    size = sum(part.size_bytes for part in RecordTable(files, "embeddings").parts())
    indexed_run(files, item(3, night=1))
    purge(files, ["0005.jpg"], no_index)
    assert "0005.jpg" not in vectors_now(files)
    assert vectors_now(files)["0007.jpg"] == rounded(item(7)[COLUMN])
    assert "BYTE_STREAM_SPLIT" in encodings(files)
    assert sum(part.size_bytes for part in RecordTable(files, "embeddings").parts()) < 1.2 * size


def test_search_finds_the_same_rows_by_nearly_the_same_scores(files):
    queries = np.stack([item(number)[COLUMN] for number in range(20)]).astype(np.float32)
    before = [[(hit.item_id, hit.score) for hit in hits] for hits in open_store(files.address).search(queries, 5)]
    compact(files, vectors="float16")
    after = [[(hit.item_id, hit.score) for hit in hits] for hits in open_store(files.address).search(queries, 5)]
    assert [[name for name, _ in hits] for hits in before] == [[name for name, _ in hits] for hits in after]
    assert np.allclose(
        [score for hits in before for _, score in hits], [score for hits in after for _, score in hits], atol=1e-3
    )


def test_vectors_that_rounding_would_mix_up_stay_as_they_are(tmp_path, caplog):
    files, rng = new_store(tmp_path / "store"), np.random.default_rng(0)
    base = rng.standard_normal(DIM)
    near = [unit(base + 1e-2 * rng.standard_normal(DIM)) for _ in range(NUM)]
    indexed_run(files, *(row(f"{place:04d}.jpg", image_embedding=each.tolist()) for place, each in enumerate(near)))
    loss = measure_loss(files, read_current(files))
    assert loss.lost_neighbours > MAX_LOST_NEIGHBOURS
    before = vectors_now(files)
    compact(files, vectors="float16")
    assert vectors_now(files) == before
    assert not is_half_store(files, INFO.model_fingerprint)
    assert "those in float32 stay so, as" in caplog.text and "of the ten nearest" in caplog.text


def near_clusters(seed: int, spread: float) -> np.ndarray:
    """Vectors of which ten and more lie so near each other that half precision orders some of them otherwise."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((40, DIM))
    return unit(np.repeat(centres, 15, axis=0) + spread * rng.standard_normal((600, DIM)))


@pytest.mark.medium
def test_the_index_that_stays_loses_no_more_recall_than_the_gate_states(tmp_path, caplog):
    files, vectors = new_store(tmp_path / "store"), near_clusters(4, 0.8)
    rows = [row(f"{place:04d}.jpg", image_embedding=each.tolist()) for place, each in enumerate(vectors)]
    indexed_run(files, *rows, config=NO_FIRST_INDEX)
    build_store_index(files, IndexConfig(recall=0.6, min_recall=0.0, on_missed="publish"), kind="IVF16,Flat")

    def recall() -> float:
        now = np.array([vector for _, vector in sorted(vectors_now(files).items())], np.float32)
        truth = np.argsort(-(vectors @ now.T), axis=1, kind="stable")[:, :10]
        found = [{int(hit.item_id[:4]) for hit in hits} for hits in open_store(files.address).search(vectors, 10)]
        return float(np.mean([len(each & {*own.tolist()}) / 10 for each, own in zip(found, truth, strict=True)]))

    loss, before, index = measure_loss(files, read_current(files)), recall(), read_current(files).index
    assert 0.5 < before < 1
    assert 0 < loss.lost_neighbours <= MAX_LOST_NEIGHBOURS
    with caplog.at_level("INFO"):
        compact(files, vectors="float16")
    assert f"gives away {100 * loss.lost_neighbours:.2f} % of the ten nearest of 600 queries" in caplog.text
    assert read_current(files).index == index
    assert abs(before - recall()) <= loss.lost_neighbours + 5e-4, "two or three of 6,000 may tie otherwise"


def test_the_gate_compares_with_all_vectors_not_only_with_those_of_the_files_that_it_asks(tmp_path, monkeypatch):
    monkeypatch.setattr("embedder.store.maintenance.half_precision.NUM_FILES", 1)
    monkeypatch.setattr("embedder.store.maintenance.half_precision.BLOCK_ROWS", 100)
    base, files = near_clusters(5, 0.01), new_store(tmp_path / "store")
    rows = [row(f"{place:04d}.jpg", image_embedding=each.tolist()) for place, each in enumerate(base)]
    indexed_run(files, *rows[:1], *rows[30::30], config=NO_FIRST_INDEX)  # one of each second cluster
    assert measure_loss(files, read_current(files)).lost_neighbours == 0
    indexed_run(files, *(each for place, each in enumerate(rows) if place % 30), config=NO_FIRST_INDEX)
    assert len(RecordTable(files, "embeddings").paths()) > 1
    loss = measure_loss(files, read_current(files))
    assert loss.num_queries < 20
    assert loss.lost_neighbours > MAX_LOST_NEIGHBOURS


def test_duplicates_are_no_lost_neighbours(tmp_path):
    files = new_store(tmp_path / "store")
    order = np.random.default_rng(2).permutation(NUM)
    copied = [own % 20 if own < 500 else own for own in order]  # 25 of each of twenty
    rows = [row(f"{number:04d}.jpg", image_embedding=item(own)[COLUMN]) for number, own in enumerate(copied)]
    indexed_run(files, *rows)
    loss = measure_loss(files, read_current(files))
    assert loss.refusal is None and loss.lost_neighbours < 0.001


def test_after_a_rollback_compaction_rounds_what_came_back_in_float32(files):
    first = read_current(files)
    compact(files, vectors="float16")
    rollback(files, first.run_id, no_index)
    assert compact(files, vectors="float16")[0] is not None
    assert vectors_now(files)["0007.jpg"] == rounded(item(7)[COLUMN])
    assert compact(files, vectors="float16")[0] is None


def test_only_the_files_in_float32_are_rounded_later(files):
    compact(files, vectors="float16")
    indexed_run(files, *(item(number) for number in range(NUM, 2 * NUM)))
    before = set(RecordTable(files, "embeddings").paths())
    compact(files, PartTarget(num_rows=1), vectors="float16")
    assert len(before & set(RecordTable(files, "embeddings").paths())) == 1
    assert vectors_now(files)["0700.jpg"] == rounded(item(700)[COLUMN])


def test_a_compaction_that_is_killed_leaves_no_rounded_vectors_without_the_mark(files, monkeypatch):
    exact, num_marked = vectors_now(files), 0
    for number in count():
        with dying(monkeypatch, number), suppress(Killed):
            compact(files, vectors="float16")
            break
        is_marked = is_half_store(files, INFO.model_fingerprint)
        assert is_marked or vectors_now(files) == exact
        num_marked += is_marked
    assert num_marked > 1
    assert vectors_now(files)["0007.jpg"] == rounded(item(7)[COLUMN])


def test_a_publication_keeps_whose_vectors_of_a_further_model_are_rounded(tmp_path):
    files = new_store(tmp_path / "store")
    for night in range(2):
        session = TwoModels(files)
        session.write(*(item(number, night) for number in range(20)))
        session.end()
        if not night:
            compact(files, vectors="float16")
        for view, info in ((files, INFO), (view_of(files), OTHER)):
            assert is_half_store(view, info.model_fingerprint)


def test_float32_ends_the_rounding_of_new_vectors(files, caplog):
    compact(files, vectors="float16")
    before = vectors_now(files)
    compact(files, vectors="float32")
    assert not is_half_store(files, INFO.model_fingerprint)
    assert vectors_now(files) == before
    assert "those that were rounded stay so" in caplog.text
    assert read_record(files, STORE_FILE, StoreInfo).half_of is None


def test_the_saving_is_told_before_and_the_precision_after(files):
    assert 'float32, about 0.00 GB; `vectors = "float16"` would save' in describe_saving(files, read_current(files))
    compact(files, vectors="float16")
    assert describe_saving(files, read_current(files)) == "float16, by the first of 1 part file"


def test_a_column_beyond_the_range_of_half_precision_is_not_rounded():
    present = np.array([True, False, True])
    column = pack_vectors(np.array([[1.0, 2.0], [70_000.0, 0.1]], np.float32), present)
    assert round_vectors(column).equals(column)
    small = pack_vectors(np.array([[1 / 3, 1e-6], [0.1, -2.7]], np.float32), present)
    half = round_vectors(small)
    assert is_half(half) and not is_half(small)
    assert half.null_count == 1 and half.is_null().to_pylist() == [False, True, False]
    assert np.array_equal(unpack_vectors(half.drop_null()), np.float16(unpack_vectors(small.drop_null())))


def test_other_programs_read_the_rounded_table(files):
    compact(files, vectors="float16")
    wanted, folder = vectors_now(files), files.folder / "embeddings"
    paths = [str(folder / path) for path in RecordTable(files, "embeddings").paths()]
    by_duckdb = duckdb.sql(f"SELECT item_id, {COLUMN} FROM read_parquet({paths})").fetchall()
    by_polars = polars.read_delta(str(folder)).select("item_id", COLUMN).rows()
    frame = DeltaTable(folder).to_pandas(columns=["item_id", COLUMN])
    by_pandas = zip(frame["item_id"], (each.tolist() for each in frame[COLUMN]), strict=True)
    for found in (by_duckdb, by_polars, by_pandas):
        assert {name: list(vector) for name, vector in found} == wanted


@pytest.mark.medium
def test_runs_with_the_key_round_what_they_publish_and_embed_nothing_anew(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=6, num_clips=0)
    _, exact = embedded(make_run(source, store=str(tmp_path / "exact")))
    config = make_run(source, vectors="float16")
    _, rows = embedded(config)
    for key, full in exact.items():
        assert rows[key][COLUMN] != full[COLUMN]
        assert np.allclose(rows[key][COLUMN], full[COLUMN], rtol=1e-3, atol=1e-6)
    report, again = refreshed(config)
    assert (report.outcome, again) == ("nothing to do", rows)
    image = next(path for path in source.rglob("*") if path.suffix in (".png", ".jpg"))
    image.with_name(f"another{image.suffix}").write_bytes(image.read_bytes())
    report, more = refreshed(make_run(source))  # the store continues as it does
    assert report.num_vectors > 0
    new = {key: each for key, each in more.items() if key not in rows}
    assert new and all(each[COLUMN] == rounded(each[COLUMN]) for each in new.values())
    assert {key: each for key, each in more.items() if key in rows} == rows


def test_doctor_tells_what_it_would_save(files):
    done = run_here("doctor", "--set", f"store={files.address}", "--json")
    assert "would save" in json.loads(done.stdout.splitlines()[-1])["vectors of the store"]
