"""The night after a rollback, a compaction, a purge: the refresh does what is left to do, and no more."""

import pytest
import samples
from refresh_runs import items_of, refreshed, rows_of
from store_states import build_store_index

import embedder
from embedder.errors import StoreError
from embedder.ingest.dry_run import forecast
from embedder.ingest.work import IngestOptions
from embedder.plugins.maintain.purge.purge import purge
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.lock import write_lock
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.publish.history import publications
from embedder.store.publish.tombstones import allow_again
from embedder.store_index.keep_index import index_choice

pytestmark = pytest.mark.medium


@pytest.fixture
def source(tmp_path):
    return samples.folder(tmp_path / "in", num_images=6)


def test_after_a_compaction_nothing_is_to_be_done_and_changes_find_their_rows(make_run, source):
    config = make_run(source, rows_per_part=2)
    _, before = refreshed(config)
    compact(StoreFiles(config.store), PartTarget())
    report, rows = refreshed(config)
    assert (report.num_unchanged, rows) == (6, before)
    (source / "pictures" / "0001.png").unlink()
    _, rows = refreshed(config, forced=("retire",))
    assert rows == {key: row for key, row in before.items() if key[0] != "pictures/0001.png"}


@pytest.mark.parametrize(
    ("run", "limit"),
    [(embedder.refresh, "MIN_SAVED"), (embedder.embed, "MIN_SAVED_BY_EMBED")],
    ids=["refresh", "embed"],
)
def test_a_run_compacts_where_it_pays_and_keeps_the_index(make_run, source, monkeypatch, run, limit):
    monkeypatch.setattr(f"embedder.ingest.publish_or_refuse.{limit}", 2)
    config = make_run(source, rows_per_part=2)
    run(config)
    files = StoreFiles(config.store)
    build_store_index(files)
    (source / "pictures" / "0100.png").write_bytes(samples.image_bytes(100))
    run(config)
    assert [each.kind for each in publications(files)][-2:] == [run.__name__, "compaction"]
    night, compaction = publications(files)[-2:]
    assert night.index == compaction.index
    assert len(rows_of(config)) == 7


def test_purged_items_stay_away_until_they_are_allowed_again(make_run, source):
    config = make_run(source)
    _, before = refreshed(config)
    files = StoreFiles(config.store)
    with write_lock(files):
        purge(
            files,
            ["pictures/0002.png"],
            index_choice(files, reuse=False),
        )
    assert forecast(config, IngestOptions(kind="refresh")).num_to_embed == 0
    report, rows = refreshed(config)
    assert (report.num_new, report.num_unchanged) == (0, 5)
    assert rows == {key: row for key, row in before.items() if key[0] != "pictures/0002.png"}
    assert "pictures/0002.png" not in items_of(config)
    allow_again(files, ["pictures/0002.png"])
    report, rows = refreshed(config)
    assert (report.num_new, len(rows)) == (1, 6)


def test_a_command_names_the_versions_that_can_be_searched(make_run, source, run_embedder):
    config = make_run(source)
    refreshed(config)
    run_id = read_current(StoreFiles(config.store)).run_id
    code, found, _ = run_embedder("search", "a red car", "--store", config.store, "--version", run_id, "--json")
    assert (code, len(found["hits"])) == (0, 6)
    with pytest.raises(StoreError, match="no run yesterday"):
        embedder.open_store(config.store, version="yesterday")
