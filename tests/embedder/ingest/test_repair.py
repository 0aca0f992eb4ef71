"""Items that an earlier release published without their vectors are named by each run, and embedded on request."""

import logging

import pytest
import samples
from damaged_stores import lose_rows
from embedding_runs import embedded
from refresh_runs import items_of, refreshed, rows_of

from embedder.ingest.dry_run import forecast
from embedder.ingest.work import IngestOptions
from embedder.plugins.maintain.store_check.check import check_store
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import store_part
from embedder.store.layout import read_current
from embedder.store.publish.current import move_current
from embedder.store.tables.tables import RecordTable

LOST = ["pictures/0001.png", "pictures/0002.png"]
REPAIR = IngestOptions(kind="refresh", repair=True)


def lose(config, name: str = "embeddings"):
    """Publish one table without the rows of some items, as an earlier release did where two runs met."""
    files = StoreFiles(config.store)
    lose_rows(files, LOST, name)
    return files


@pytest.fixture
def config(make_run, tmp_path):
    """A store of eight pictures."""
    config = make_run(samples.folder(tmp_path / "in", num_images=8, captions=False), max_retire_fraction=0.3)
    refreshed(config)
    return config


def reasons(found):
    return {each.reason: each.num_items for each in found.reasons}


@pytest.mark.medium
def test_items_without_vectors_are_embedded_again_and_no_others(config, caplog):
    whole = rows_of(config)
    files = lose(config)
    found = {each.place: each.found for each in check_store(files).findings}
    assert found == {
        "items": "2 items in state embedded without all vectors: 'pictures/0001.png', 'pictures/0002.png'",
        "index/000001": "it finds 8 vectors, built of embeddings version 1",
    }
    plain = forecast(config, IngestOptions(kind="refresh"))
    assert (plain.num_to_embed, len(plain.damage)) == (0, 1)
    assert "its items have 8 vectors, and 6 are published" in plain.damage[0]
    with caplog.at_level(logging.WARNING):
        report, rows = refreshed(config)
    assert (report.num_items, len(rows)) == (0, 6)
    assert plain.damage[0] in caplog.text and "--repair" in plain.damage[0]

    promised = forecast(config, REPAIR)
    assert (reasons(promised), promised.num_unchanged, promised.damage) == ({"rows damaged": 2}, 6, ())
    report, rows = refreshed(config, repair=True)
    assert report.reasons == {"rows damaged": 2}
    assert rows.keys() == whole.keys()
    for key, each in rows.items():
        assert each["image_embedding"] == pytest.approx(whole[key]["image_embedding"], abs=1e-5)
        assert (each["run_id"] == report.run_id) == (key[0] in LOST)
    assert check_store(files, deep=True).findings == ()
    assert refreshed(config, repair=True)[0].num_items == 0


@pytest.mark.medium
def test_embed_repairs_too(config):
    files = lose(config)
    report, rows = embedded(config, repair=True)
    assert (report.reasons, len(rows)) == ({"rows damaged": 2}, 8)
    assert check_store(files).findings == ()


@pytest.mark.medium
def test_an_item_that_can_not_be_read_any_more_is_a_reject_with_the_rows_that_it_has(config, tmp_path):
    files = lose(config)
    (tmp_path / "in" / LOST[0]).write_bytes(b"\x89PNG\r\n\x1a\n broken")
    refreshed(config, repair=True, forced=("rejects",))
    items = items_of(config)
    assert [(items[each]["state"], items[each]["num_vectors"]) for each in LOST] == [("rejected", 0), ("embedded", 1)]
    assert check_store(files).findings == ()


@pytest.mark.medium
def test_rows_without_a_record_are_embedded_again_or_retired(config, tmp_path):
    files = lose(config, "items")
    (tmp_path / "in" / LOST[0]).unlink()
    assert "embeddings" in {each.place for each in check_store(files).findings}
    report, rows = refreshed(config, repair=True)
    assert (report.num_items, report.num_retired) == (1, 1)
    assert {item_id for item_id, _ in rows} == set(items_of(config))
    assert len(rows) == 7
    assert check_store(files).findings == ()


def test_items_that_stand_twice_are_once_again(config):
    files = StoreFiles(config.store)
    current = read_current(files)
    table = RecordTable(files, "items", current.items)
    twice = store_part(files, "items", f"part-{current.run_id}-rewrite-2.parquet", table.read().slice(0, 3), "")
    version = RecordTable(files, "items").commit_files("twice", [*table.parts(), twice])
    move_current(files, current.model_copy(update={"items": version}))
    assert check_store(files).number("error") > 0
    report, rows = refreshed(config, repair=True)
    assert (report.reasons, len(rows), len(items_of(config))) == ({"rows damaged": 3}, 8, 8)
    assert check_store(files).findings == ()


@pytest.mark.medium
def test_nothing_is_looked_at_where_another_model_replaces_all(config, make_run, tmp_path):
    files = lose(config)
    report, rows = refreshed(make_run(tmp_path / "in", segment_s=1.0), repair=True)
    assert (report.reasons, len(rows)) == ({"preprocessing changed": 8}, 8)
    assert check_store(files).findings == ()
