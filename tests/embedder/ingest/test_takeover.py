"""What rolled back runs embedded is taken over after the release, not computed again."""

import shutil
from contextlib import suppress
from itertools import count

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from embedding_runs import embedded
from refresh_runs import items_of, refreshed, rows_of, touch
from rollback_runs import back, let_go, nights, repaint
from store_states import Killed, dying, rows_at
from work_on_disk import in_memory_and_on_disk  # noqa: F401 - a fixture

import embedder
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.vacuum import vacuum
from embedder.steps import decode as decode_module
from embedder.steps.stage import TowerStage
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.lock import write_lock
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.publish.history import publications
from embedder.store.publish.publish import finish_publication
from embedder.store.publish.tombstones import allow_again
from embedder.store_index.keep_index import index_choice

pytestmark = pytest.mark.medium


@pytest.fixture
def source(tmp_path):
    return samples.folder(tmp_path / "in", num_images=6)


@pytest.fixture
def without_a_model(monkeypatch):
    """Lets nothing be computed: no stage loads, no picture is decoded, no caption is tokenised."""

    def forbid():
        def never(*arguments, **options):
            raise AssertionError("something is computed")

        monkeypatch.setattr(TowerStage, "__init__", never)
        monkeypatch.setattr(decode_module.ItemDecoder, "rows", never)

    return forbid


@pytest.mark.usefixtures("in_memory_and_on_disk")
def test_after_the_release_nothing_is_embedded_that_the_rolled_back_runs_hold(make_run, source, without_a_model):
    config = make_run(source, rows_per_part=2)
    rows = nights(config, source, 2)
    runs = [each.run_id for each in publications(StoreFiles(config.store))]
    records = items_of(config)
    back(config, runs[0])
    assert rows_of(config) == rows[0]
    let_go(config)
    without_a_model()
    report, taken = refreshed(config)
    assert taken == rows[2], "vectors, run and time are those of the run that embedded them"
    assert items_of(config) == records
    assert (report.published, report.steps, report.num_new, report.num_changed) == (True, (), 0, 0)
    assert (report.num_taken_over, report.taken_from) == (3, {runs[2]: 3})
    assert (report.num_items, report.num_rejected, report.num_left) == (3, 0, 0)
    assert read_current(StoreFiles(config.store)).hold is None
    assert_found(config, taken)
    assert refreshed(config)[0].outcome == "nothing to do"


def test_what_came_after_the_rollback_is_embedded_and_what_went_is_retired(make_run, source):
    config = make_run(source, max_retire_fraction=1)
    _, second = nights(config, source, 1)
    back(config)
    (source / "pictures" / "0300.png").write_bytes(samples.image_bytes(300))
    repaint(source / "pictures" / "0003.png", seed=301)
    (source / "pictures" / "0005.png").unlink()
    let_go(config)
    report, rows = refreshed(config)
    assert (report.num_taken_over, report.num_new, report.num_changed, report.num_retired) == (1, 1, 1, 1)
    assert rows["pictures/0101.png", 0] == second["pictures/0101.png", 0]
    stored = second["pictures/0003.png", 0]
    assert rows["pictures/0003.png", 0]["content_version"] != stored["content_version"]
    assert rows.keys() == (second.keys() - {("pictures/0005.png", 0)}) | {("pictures/0300.png", 0)}
    _, undisturbed = refreshed(make_run(source, store=str(source.parent / "undisturbed")))
    for key, row in undisturbed.items():
        assert rows[key]["image_embedding"] == pytest.approx(row["image_embedding"], abs=1e-6)
        assert (rows[key]["content_version"], rows[key]["caption"]) == (row["content_version"], row["caption"])


@pytest.mark.usefixtures("in_memory_and_on_disk")
def test_files_that_were_touched_are_read_and_taken_over_where_their_content_is_the_same(
    make_run, source, without_a_model
):
    config = make_run(source)
    _, second = nights(config, source, 1)
    before = items_of(config)["pictures/0101.png"]["modified"]
    back(config)
    for name in ("0101.png", "0003.png"):
        touch(source / "pictures" / name)
    let_go(config)
    without_a_model()
    report, rows = refreshed(config)
    assert rows == second
    assert (report.num_taken_over, report.num_new, report.num_changed, report.num_left) == (2, 1, 1, 0)
    assert items_of(config)["pictures/0101.png"]["modified"] != before
    assert refreshed(config)[0].outcome == "nothing to do"


@pytest.mark.slow
def test_on_ray_too_what_is_held_is_not_computed_again(make_run, source, ray_cluster):
    local = make_run(source)
    _, second = nights(local, source, 1)
    back(local)
    touch(source / "pictures" / "0101.png")
    let_go(local)
    report, rows = refreshed(make_run(source, engine="ray", num_stages=1))
    assert rows == second, "vectors, run and time are those of the run that embedded them"
    assert (report.engine, report.num_taken_over, report.num_left) == ("ray", 2, 0)
    assert_found(local, second)


def assert_found(config, rows):
    """Each picture is found by its own vector, through the index."""
    opened = embedder.open_store(config.store)
    assert opened.current.index is not None
    for (item_id, _), row in rows.items():
        assert opened.search(pa.array(row["image_embedding"], pa.float32()).to_numpy(), 1)[0].item_id == item_id


def test_a_table_that_was_written_anew_gives_places_and_carried_columns_of_today(make_run, tmp_path, without_a_model):
    path = tmp_path / "catalogue.parquet"

    def write(skus, price):
        pictures = pa.array([samples.image_bytes(sku) for sku in skus], pa.binary())
        prices = pa.array([price + sku for sku in skus])
        pq.write_table(pa.table({"sku": pa.array(skus), "photo": pictures, "price": prices}), path, row_group_size=4)

    columns = {"id": "sku", "image": "photo"}
    config = make_run([{"path": str(path), "columns": columns, "carryover": ["price"]}], rows_per_part=4)
    write(list(range(10)), 0.5)
    refreshed(config)
    write(list(range(16)), 0.5)
    _, second = refreshed(config)
    back(config)
    write(list(range(16))[::-1], 100.5)  # all rows lie elsewhere, at another price
    let_go(config)
    without_a_model()
    report, rows = refreshed(config)
    assert (report.num_taken_over, report.num_equal) == (6, 10)
    for key, row in rows.items():
        assert row["price"] == 100.5 + int(key[0])
        for name in ("image_embedding", "run_id", "content_version"):
            assert row[name] == second[key][name]
    assert len({row["uri"] for row in rows.values()}) == 16
    opened = embedder.open_store(config.store)
    assert {hit.item_id for hit in opened.search(opened.to_arrow()["image_embedding"][0].values.to_numpy(), 16)} == {
        str(sku) for sku in range(16)
    }


@pytest.mark.usefixtures("in_memory_and_on_disk")
def test_videos_are_taken_over_with_all_their_segments_and_rejects_with_their_reason(make_run, source, without_a_model):
    config = make_run(source, segment_s=1.0, rows_per_part=2, max_reject_fraction=1, min_vector_spread=0)
    refreshed(config)
    (source / "clips").mkdir()
    samples.clip(source / "clips" / "a.mp4")
    (source / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (source / "half.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (source / "half.txt").write_text("its caption is embedded though its picture is broken")
    _, second = refreshed(config)
    assert len([key for key in second if key[0] == "clips/a.mp4"]) == 3
    records = items_of(config)
    back(config)
    let_go(config)
    without_a_model()
    report, rows = refreshed(config)
    assert (rows, items_of(config)) == (second, records)
    assert (report.num_taken_over, report.num_rejected) == (1, 2)
    assert refreshed(config)[0].outcome == "nothing to do"


def test_a_new_model_that_was_rolled_back_is_taken_over_whole(make_run, source, other_model, without_a_model):
    old = make_run(source)
    _, before = refreshed(old)
    new = make_run(source, model=other_model)
    _, after = refreshed(new)
    back(new)
    assert rows_of(new) == before
    let_go(new)
    without_a_model()
    report, rows = refreshed(new)
    assert (rows, report.num_taken_over) == (after, 6)
    assert read_current(StoreFiles(new.store)).model == other_model


def test_vectors_of_another_model_are_never_taken_over(make_run, source, other_model):
    config = make_run(source)
    nights(config, source, 1)
    back(config)
    let_go(config)
    report, rows = refreshed(make_run(source, model=other_model))
    assert report.num_taken_over == 0
    assert len({row["model_fingerprint"] for row in rows.values()}) == 1
    assert {row["run_id"] for row in rows.values()} == {report.run_id}


def test_purged_items_never_come_back_that_way(make_run, source):
    config = make_run(source)
    _, second = nights(config, source, 1)
    back(config)
    files = StoreFiles(config.store)
    with write_lock(files):
        purge(files, ["pictures/0101.png"], index_choice(files, reuse=False))
    let_go(config)
    _, rows = refreshed(config)
    assert rows.keys() == second.keys() - {("pictures/0101.png", 0)}
    with write_lock(files):
        allow_again(files, ["pictures/0101.png"])
    report, rows = refreshed(config)
    assert (report.num_new, report.num_taken_over, rows.keys()) == (1, 0, second.keys())


def test_what_a_vacuum_took_is_computed(make_run, source):
    config = make_run(source)
    _, second = nights(config, source, 1)
    back(config)
    files = StoreFiles(config.store)
    with write_lock(files):
        vacuum(files, keep_days=0, keep_versions=1)
    let_go(config)
    report, rows = refreshed(config)
    assert (report.num_taken_over, report.num_new, report.num_changed) == (0, 1, 1)
    assert rows.keys() == second.keys()


@pytest.mark.parametrize(("table", "is_touched"), [("items", False), ("embeddings", False), ("embeddings", True)])
def test_what_a_damaged_file_held_is_computed(make_run, source, table, is_touched):
    config = make_run(source)
    _, second = nights(config, source, 1)
    files = StoreFiles(config.store)
    left = publications(files)[-1].run_id
    back(config)
    for info in list(files.list(table)):
        if left in info.path and info.path.endswith(".parquet"):
            files.write(info.path, b"damaged")
    let_go(config)
    for name in ("0003.png", "0101.png") if is_touched else ():
        touch(source / "pictures" / name)
    report, rows = refreshed(config)
    assert (report.num_taken_over, report.num_left) == (0, 0)
    for key, row in second.items():
        assert rows[key]["image_embedding"] == pytest.approx(row["image_embedding"], abs=1e-6)


def test_a_compaction_in_between_changes_nothing_of_it(make_run, source, without_a_model):
    config = make_run(source, rows_per_part=2, batch_size=2)
    _, second = nights(config, source, 1)
    files = StoreFiles(config.store)
    with write_lock(files):
        compact(files, PartTarget())
    first = publications(files)[0].run_id
    back(config, first)
    with write_lock(files):
        compact(files, PartTarget())
    let_go(config)
    without_a_model()
    report, rows = refreshed(config)
    assert (report.num_taken_over, rows) == (2, second)


def test_embed_takes_over_and_leaves_the_rest_to_the_next_refresh(make_run, source, without_a_model):
    config = make_run(source)
    _, second = nights(config, source, 1)
    back(config)
    let_go(config)
    away = source.parent / "away.png"
    (source / "pictures" / "0101.png").rename(away)
    without_a_model()
    report, _ = embedded(config)
    assert (report.num_taken_over, report.num_changed) == (1, 0)
    away.rename(source / "pictures" / "0101.png")
    report, rows = refreshed(config)
    assert (report.num_taken_over, rows) == (1, second)


def test_what_was_embedded_between_a_release_and_the_next_rollback_is_taken_over(make_run, source, without_a_model):
    config = make_run(source)
    nights(config, source, 1)
    first = publications(StoreFiles(config.store))[0].run_id
    back(config, first)
    let_go(config)
    (source / "pictures" / "0102.png").write_bytes(samples.image_bytes(102))
    _, rows = embedded(config)
    back(config, first)
    let_go(config)
    without_a_model()
    report, again = refreshed(config)
    assert (report.num_taken_over, again) == (3, rows)


@pytest.mark.slow
def test_killed_at_any_step_of_it_the_next_refresh_ends_in_the_same_rows(make_run, source, monkeypatch):
    config = make_run(source, rows_per_part=1)
    rows = nights(config, source, 2)
    touched = source / "pictures" / "0101.png"
    back(config, publications(StoreFiles(config.store))[0].run_id)
    touch(touched)
    let_go(config)
    kept = StoreFiles(shutil.copytree(config.store, source.parent / "kept"))
    for number in count(1, 3):
        shutil.rmtree(config.store)
        shutil.copytree(kept.folder, config.store)
        with dying(monkeypatch, number) as made, suppress(Killed):
            refreshed(config)
        report, found = refreshed(config)
        assert found == rows[2], f"killed after {number} changes"
        assert report.num_new + report.num_changed <= 1, "only what was touched may have to be read again"
        assert [run for run in publications(StoreFiles(config.store)) if run.run_id == read_current(kept).run_id]
        if len(made) < number:
            break
    assert number > 8


def test_a_store_that_nobody_rolled_back_looks_nowhere(make_run, source, monkeypatch):
    from embedder.ingest import takeover

    monkeypatch.setattr(takeover, "readable", None)
    monkeypatch.setattr(takeover, "read_record", None)
    config = make_run(source)
    nights(config, source, 2)
    assert all(rows_at(StoreFiles(config.store), each) for each in publications(StoreFiles(config.store)))
    assert finish_publication(StoreFiles(config.store)) is None
