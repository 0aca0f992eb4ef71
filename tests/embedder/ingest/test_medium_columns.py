"""Columns of the medium in a store: filled by a run, asked for by searches, filled later from headers, left out."""

import datetime
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from embedding_runs import embedded
from refresh_runs import rows_of

import embedder
from embedder.config import load_config
from embedder.errors import ConfigError, RunFailedError, StoreError
from embedder.ingest.embed import embed, refresh
from embedder.medium_columns import BY_NAME, NOT_IN_HEADERS
from embedder.plugins.maintain.fill_metadata import HeaderReader, fill_metadata
from embedder.retrieval.hits import Hits
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.maintenance.compact import compact, same_index

PRICES = (3.0, float("nan"), 1.0)
FILES = Path(__file__).parents[1] / "media" / "foreign_files"
SAME = ("image_embedding", "text_embedding", "model_fingerprint", "preprocess_fingerprint", "content_version")


@pytest.fixture
def photos(tmp_path):
    """A folder with pictures and clips that other programs made, and one without any metadata."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("tagged.jpg", "tagged.png", "xmp.jpg", "frames.gif", "clip.mp4"):
        shutil.copy(FILES / name, folder)
    (folder / "drawn.png").write_bytes(samples.image_bytes(1))
    return folder


def medium_of(rows):
    return {key: {name: row[name] for name in BY_NAME if row.get(name) is not None} for key, row in rows.items()}


@pytest.mark.medium
def test_a_run_fills_the_columns_in_their_types(make_run, photos):
    _, rows = embedded(make_run(photos))
    found = medium_of(rows)
    tagged = found["tagged.jpg", 0]
    assert tagged["taken_at"] == datetime.datetime(2023, 7, 4, 12, 34, 56, 780_000)
    assert (tagged["width"], tagged["height"], tagged["orientation"]) == (32, 48, 6)
    assert (tagged["latitude"], tagged["iso"], tagged["camera"]) == (48.137154, 400, "Canon EOS R5")
    assert len(tagged["content_hash"]) == 32
    clip = found["clip.mp4", 0]
    assert clip["created_at"] == datetime.datetime(2023, 7, 4, 10, 34, 56, tzinfo=datetime.UTC)
    assert (clip["codec"], clip["duration_s"], clip["has_audio"]) == ("h264", 1.0, True)
    assert {"perceptual_hash", "sharpness", "content_hash"} <= clip.keys()
    assert "taken_at" not in found["drawn.png", 0]
    assert found["drawn.png", 0]["format"] == "PNG"


@pytest.mark.medium
def test_conditions_hits_and_tables_of_hits_have_them(make_run, photos, tmp_path):
    config = make_run(photos)
    embed(config)
    store = embedder.open_store(config.store)

    def ids(where):
        return {hit.item_id for hit in store.search("red", k=10, where=where)}

    assert ids("taken_at between '2023-07-01' and '2023-07-31' and height >= 48") == {"tagged.jpg", "tagged.png"}
    assert ids("within(48.1, 11.5, 25)") == {"tagged.jpg", "tagged.png", "clip.mp4"}
    assert ids("within(48.1, 11.5, 5)") == set()
    assert ids("within('München', 25) AND iso = 400") == {"tagged.jpg", "tagged.png"}
    assert ids("latitude < 0 and year(taken_at) = 2020") == {"xmp.jpg"}
    assert ids("is_animated") == {"frames.gif"}
    hits = store.search("red", k=10, where="camera = 'Canon EOS R5'")
    assert {hit.medium["lens"] for hit in hits} == {"RF 24-70mm"}
    assert all(hit.carryover == {} for hit in hits)
    everything = store.search("red", k=10)
    for column, first in (("taken_at", "xmp.jpg"), ("taken_at desc", "tagged.jpg"), ("width desc", "clip.mp4")):
        everything.order_by(column)
        assert everything[0].item_id == first
    everything.order_by("iso")
    assert [hit.medium.get("iso") for hit in everything] == [400, 400, *[None] * (len(everything) - 2)]
    for wrong in ("place", "taken_at down"):
        with pytest.raises(ConfigError, match=f"sort '{wrong}': write a column of the hits"):
            everything.order_by(wrong)
    priced = [replace(hit, carryover={"my price": price}) for hit, price in zip(everything, PRICES, strict=False)]
    for column, prices in (("my price desc", [3.0, 1.0]), ("my price", [1.0, 3.0])):
        (sorted_hits := Hits(priced)).order_by(column)
        assert [hit.carryover["my price"] for hit in sorted_hits][:2] == prices, "what is no number comes last"
    table = hits.to_arrow()
    assert table["taken_at"].to_pylist() == [hit.medium["taken_at"] for hit in hits]
    hits.save(tmp_path / "hits.csv")
    assert "RF 24-70mm" in (tmp_path / "hits.csv").read_text()


@pytest.mark.medium
def test_what_is_dropped_is_neither_read_nor_kept(make_run, photos):
    config = make_run(photos, metadata={"drop": ["gps", "creator", "hash"]})
    _, rows = embedded(config)
    row = rows["tagged.jpg", 0]
    assert row["credit"] == "Agency"
    assert not {"latitude", "longitude", "altitude_m", "creator", "content_hash"} & row.keys()
    whole = b"".join(path.read_bytes() for path in Path(config.store).rglob("*") if path.is_file())
    assert b"Ann Lee" not in whole


@pytest.mark.medium
def test_only_what_is_kept_is_there(make_run, photos):
    _, rows = embedded(make_run(photos, metadata={"keep": ["taken_at", "form"], "drop": ["width"]}))
    names = {name for name in rows["tagged.jpg", 0] if name in BY_NAME}
    assert names == {"taken_at", *(each.name for each in BY_NAME.values() if each.group == "form")} - {"width"}


def test_an_unknown_column_or_group_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'place' is no column of the medium; known are form"):
        load_config(overrides={"metadata": {"drop": ["place"]}})


@pytest.mark.medium
def test_vectors_and_fingerprints_are_those_of_a_store_without_columns(make_run, photos, tmp_path):
    _, rows = embedded(make_run(photos))
    _, without = embedded(make_run(photos, store=str(tmp_path / "other"), metadata={"keep": []}))
    assert rows.keys() == without.keys()
    for key, row in rows.items():
        for name in SAME:
            assert row[name] == without[key][name]
    assert not BY_NAME.keys() & without["tagged.jpg", 0].keys()


@pytest.mark.medium
def test_a_carried_column_of_that_name_wins(make_run, photos, tmp_path):
    table = pa.table({"image": [str(photos / "tagged.jpg")], "camera": ["by hand"], "width": [7.5]})
    pq.write_table(table, tmp_path / "list.parquet")
    source = [{"path": str(tmp_path / "list.parquet"), "carryover": ["camera", "width"], "columns": {"image": "image"}}]
    config = make_run(source)
    _, rows = embedded(config)
    (row,) = rows.values()
    assert (row["camera"], row["width"], row["height"]) == ("by hand", 7.5, 48)
    (hit,) = embedder.open_store(config.store).search("red", k=1)
    assert hit.carryover == {"camera": "by hand", "width": 7.5}
    assert hit.medium["height"] == 48


@pytest.fixture
def old_store(make_run, photos):
    """Configuration of a store whose rows were made before there were columns."""
    embed(make_run(photos, metadata={"keep": []}, rows_per_part=2))
    return make_run(photos)


def fill(config, **options):
    return fill_metadata(StoreFiles(config.store), config.metadata.columns, same_index, **options)


@pytest.mark.medium
def test_an_old_store_gains_the_columns_from_headers_alone(old_store, make_run, photos, tmp_path):
    before = rows_of(old_store)
    new, filled = fill(old_store)
    after = rows_of(old_store)
    assert new is not None
    assert (filled.num_rows, filled.num_files, filled.num_read) == (6, 6, 6)
    assert {key: {name: row[name] for name in before[key]} for key, row in after.items()} == before
    _, fresh = embedded(make_run(photos, store=str(tmp_path / "fresh")))
    expected = {
        key: {name: value for name, value in values.items() if name not in NOT_IN_HEADERS}
        for key, values in medium_of(fresh).items()
    }
    for name in ("num_frames", "is_animated"):
        del expected["frames.gif", 0][name]
    read = {key: {"keywords": []} | values for key, values in expected.items()}  # so that no file is read again
    assert medium_of(after) == read
    hits = embedder.open_store(old_store.store).search("red", k=9, where="within(48.1, 11.5, 25)")
    assert {hit.item_id for hit in hits} == {"tagged.jpg", "tagged.png", "clip.mp4"}
    assert fill(old_store) == (None, filled._replace(num_rows=0, num_files=0, num_read=0, bytes_read=0))


def test_a_dry_run_counts_and_changes_nothing(old_store):
    before = sorted(path.name for path in Path(old_store.store).rglob("*"))
    new, filled = fill(old_store, dry_run=True)
    assert new is None
    assert (filled.num_rows, filled.num_files, filled.num_read) == (6, 6, 0)
    assert sorted(path.name for path in Path(old_store.store).rglob("*")) == before


@pytest.mark.medium
def test_a_file_that_is_gone_or_has_changed_stays_as_it_is(old_store, photos):
    (photos / "xmp.jpg").unlink()
    (photos / "tagged.png").write_bytes(samples.image_bytes(5))
    _, filled = fill(old_store)
    assert (filled.num_files, filled.num_read) == (6, 4)
    found = medium_of(rows_of(old_store))
    assert found["xmp.jpg", 0] == found["tagged.png", 0] == {}
    assert found["tagged.jpg", 0]["iso"] == 400
    _, filled = fill(old_store, dry_run=True)
    assert filled.num_files == 2


@pytest.mark.medium
def test_filling_empties_what_is_dropped(make_run, photos):
    config = make_run(photos)
    embed(config)
    dropping = make_run(photos, metadata={"drop": ["gps"]})
    assert fill(dropping)[1].emptied == ("latitude", "longitude", "altitude_m")
    row = rows_of(config)["tagged.jpg", 0]
    assert row["latitude"] is row["altitude_m"] is None
    assert row["iso"] == 400
    assert row["content_hash"] is not None
    new, filled = fill(dropping)
    assert (new, filled.emptied, filled.num_rows) == (None, (), 0), "it is not published again"


@pytest.mark.medium
def test_a_refresh_of_an_old_store_adds_the_columns_for_new_items_alone(old_store, photos):
    before = rows_of(old_store)
    shutil.copy(FILES / "iptc.jpg", photos)
    report = refresh(old_store)
    assert report.num_items == 1
    after = rows_of(old_store)
    assert after["iptc.jpg", 0]["credit"] == "Keystone"
    for key, row in before.items():
        assert after[key] == row | dict.fromkeys(BY_NAME)


@pytest.mark.medium
def test_a_rolled_back_store_reads_as_before_and_can_go_on(old_store, photos):
    from embedder.store.maintenance.rollback import rollback

    before = rows_of(old_store)
    files = StoreFiles(old_store.store)
    first = read_current(files).run_id
    fill(old_store)
    rollback(files, first, same_index)
    assert {key: {name: row[name] for name in before[key]} for key, row in rows_of(old_store).items()} == before
    hits = embedder.open_store(old_store.store).search("red", k=3)
    assert [(hit.carryover, hit.medium) for hit in hits] == [({}, {})] * 3


@pytest.mark.medium
def test_what_is_left_out_later_is_not_filled_again(make_run, photos):
    config = make_run(photos)
    embed(config)
    shutil.copy(FILES / "iptc.jpg", photos)
    refresh(make_run(photos, metadata={"drop": ["hash", "creator"]}))
    rows = rows_of(config)
    assert rows["tagged.jpg", 0]["content_hash"] is not None
    assert rows["iptc.jpg", 0]["content_hash"] is rows["iptc.jpg", 0]["creator"] is None


@pytest.mark.medium
def test_a_carried_column_that_is_carried_no_more_is_not_filled_by_the_medium(make_run, photos, tmp_path):
    def listed(names):
        content = {"image": [str(photos / name) for name in names], "camera": ["by hand"] * len(names)}
        pq.write_table(pa.table(content), tmp_path / "list.parquet")

    def source(*carried):
        return [{"path": str(tmp_path / "list.parquet"), "carryover": [*carried], "columns": {"image": "image"}}]

    listed(["tagged.jpg"])
    config = make_run(source("camera"))
    embed(config)
    listed(["tagged.jpg", "tagged.png"])
    with pytest.raises(StoreError, match="its columns and this run's differ in camera; carry over"):
        refresh(make_run(source()))
    assert [row["camera"] for row in rows_of(config).values()] == ["by hand"]


def test_a_column_of_the_medium_gives_way_to_a_carried_one_of_another_case(make_run, photos, tmp_path):
    content = {"image": [str(photos / "tagged.jpg")], "Format": ["13 x 18"]}
    pq.write_table(pa.table(content), tmp_path / "list.parquet")
    source = {"path": str(tmp_path / "list.parquet"), "carryover": ["Format"], "columns": {"image": "image"}}
    config = make_run([source])
    embed(config)
    (found,) = rows_of(config).values()
    assert found["Format"] == "13 x 18"
    assert "format" not in found


@pytest.mark.medium
def test_a_former_steps_column_is_not_filled_by_the_medium(make_run, photos, tmp_path):
    code = "def look(batch):\n    return {'sharpness': ['by eye'] * len(batch)}\n"
    (tmp_path / "steps.py").write_text(code)
    step = {"name": "eye", "callable": f"{tmp_path}/steps.py:look", "inputs": ["image"]}
    config = make_run(photos, step=[step | {"outputs": {"sharpness": "string"}}])
    embed(config)
    shutil.copy(FILES / "iptc.jpg", photos)
    refresh(make_run(photos))
    rows = rows_of(config)
    assert rows["iptc.jpg", 0]["sharpness"] is None
    assert rows["iptc.jpg", 0]["brightness"] is not None


@pytest.mark.medium
@pytest.mark.parametrize(("keep", "num_rows"), [(["gps"], 2), (["look"], 0)])
def test_a_store_without_forms_counts_the_rows_whose_wanted_columns_are_empty(
    old_store, make_run, photos, keep, num_rows
):
    config = make_run(photos, metadata={"keep": keep})
    fill(config)
    new, filled = fill(config)
    assert (new, filled.num_rows) == (None, num_rows)


@pytest.mark.medium
def test_an_ended_fill_goes_on_where_it_was(make_run, old_store, photos, monkeypatch):
    shutil.copy(FILES / "iptc.jpg", photos)
    refresh(make_run(photos, metadata={"keep": []}))  # a second part file
    monkeypatch.setattr("embedder.plugins.maintain.fill_metadata.PUBLISH_EVERY_S", 0.0)
    real = HeaderReader.read

    def read(self, uri, item):
        if uri.endswith("iptc.jpg"):
            raise KeyboardInterrupt
        return real(self, uri, item)

    monkeypatch.setattr(HeaderReader, "read", read)
    with pytest.raises(KeyboardInterrupt):
        fill(old_store)
    monkeypatch.setattr(HeaderReader, "read", real)
    assert fill(old_store)[1].num_files == 1
    assert all(row["format"] for row in rows_of(old_store).values())


@pytest.mark.medium
@pytest.mark.parametrize("is_dropped_again", [False, True])
def test_a_store_of_earlier_columns_goes_on_after_a_refused_run_and_reads_rows_of_both(
    make_run, photos, tmp_path, is_dropped_again
):
    config = make_run(photos, metadata={"drop": ["keywords"]})
    embed(config)
    broken = [photos / f"broken{number}.png" for number in range(12)]
    for path in broken:
        path.write_bytes(b"\x89PNG\r\n\x1a\n broken")
    shutil.copy(FILES / "iptc.jpg", photos)
    with pytest.raises(RunFailedError, match="guard rejects"):
        refresh(make_run(photos))  # which has added the column to the table
    for path in broken:
        path.unlink()
    if is_dropped_again:
        refresh(config)
        assert {row["keywords"] for row in rows_of(config).values()} == {None}
    refresh(make_run(photos))
    assert refresh(make_run(photos)).num_items == 0
    rows = rows_of(config)
    assert rows["iptc.jpg", 0]["format"] == rows["tagged.jpg", 0]["format"] == "JPEG"
    assert embedder.open_store(config.store).to_arrow().num_rows == len(rows)
    assert compact(StoreFiles(config.store), choose_index=same_index)[0] is not None
