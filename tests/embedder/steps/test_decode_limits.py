"""The decode step at its limits: files that are too large, or that go away while they are read."""

from dataclasses import replace

import pytest
import samples

from embedder.config_toml.run_sections import SourceConfig
from embedder.executors.job import decode_spec
from embedder.models.model_folder import open_model
from embedder.sources.fetch import Fetcher
from embedder.sources.listing import list_sources
from embedder.steps import content_reader
from embedder.steps.decode import ItemReader


@pytest.fixture
def decode_folder(make_run, tiny_model):
    """Decode a folder's items, with some limits changed: rows by id."""

    def run(root, before_read=lambda: None, **limits):
        spec = decode_spec(make_run(root).rows, open_model(str(tiny_model)))
        reader = ItemReader(replace(spec, limits=replace(spec.limits, **limits)))
        rows = []
        for listing in list_sources([SourceConfig(path=str(root))]):
            before_read()
            for table in reader.decode(listing, lambda: False):
                rows += table.drop_columns(["pixels", "token_ids", "trace"]).to_pylist()
        return {row["item_id"]: row for row in rows}

    return run


def test_a_file_of_a_terabyte_is_refused_without_reading_it(decode_folder, tmp_path):
    for name, head in (("a.jpg", samples.image_bytes(1, "JPEG")), ("b.mp4", b"\0\0\0\x18ftypmp42")):
        with (tmp_path / name).open("wb") as file:
            file.write(head)
            file.truncate(1 << 40)
    rows = decode_folder(tmp_path)
    for name in ("a.jpg", "b.mp4"):
        assert rows[name]["error_type"] == "TooLarge"
        assert "decode.max_video_bytes allows" in rows[name]["error"]
        assert rows[name]["content_version"] is None
        assert not rows[name]["transient"]


def test_an_image_over_its_limit_is_refused_without_reading_it(decode_folder, tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(samples.image_bytes(1) + b"\0" * 100_000)
    (tmp_path / "a.txt").write_text("a red car")
    monkeypatch.setattr(Fetcher, "content_hash", lambda *_: pytest.fail("it was read whole"))
    row = decode_folder(tmp_path, max_file_bytes=50_000)["a.png"]
    assert row["error_type"] == "FileTooLarge"
    assert row["num_vectors"] == 1, "its caption is embedded all the same"
    assert row["content_version"]


def test_a_source_that_goes_away_after_its_listing_is_tried_again_another_day(decode_folder, tmp_path):
    samples.folder(tmp_path / "in", num_images=4)
    rows = decode_folder(tmp_path / "in", before_read=lambda: (tmp_path / "in").rename(tmp_path / "gone"))
    assert len(rows) == 4
    for row in rows.values():
        assert (row["step"], row["error_type"], row["transient"]) == ("read", "FileNotFound", True)


@pytest.mark.parametrize("moment", ["content_hash", "fetch"])
def test_a_large_file_that_goes_away_while_it_is_read_is_one_reject(decode_folder, tmp_path, monkeypatch, moment):
    """Between two of the opens that reading takes; its neighbours are embedded."""
    monkeypatch.setattr(content_reader, "READ_BYTES", 0)
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(samples.image_bytes(number))
    before = getattr(Fetcher, moment)

    def vanish(self, what, **options):
        done = before(self, what, **options) if moment == "fetch" else None
        if "1.png" in str(what):
            (tmp_path / "1.png").unlink(missing_ok=True)
        return done if moment == "fetch" else before(self, what, **options)

    monkeypatch.setattr(Fetcher, moment, vanish)
    rows = decode_folder(tmp_path)
    assert {name: row["error_type"] for name, row in rows.items()} == {
        "0.png": None,
        "1.png": "FileNotFound",
        "2.png": None,
    }
    assert rows["1.png"]["transient"]


def test_frames_of_clips_are_counted_as_embedded_and_as_decoded(make_run, tmp_path):
    samples.folder(tmp_path / "in", num_images=2, num_clips=2)
    config = make_run(tmp_path / "in", segment_s=1.0, frames_per_segment=2)
    (listing,) = list_sources(config.source)
    reader = ItemReader(decode_spec(config.rows, open_model(config.model)))
    tables = list(reader.decode(listing, lambda: False))
    calls = [call for table in tables for calls in table["trace"].drop_null().to_pylist() for call in calls]
    num_images, num_frames = (sum(call[name] for call in calls) for name in ("num_images", "num_frames"))
    assert num_images == 2 + num_frames
    assert num_frames < sum(call["num_decoded_frames"] for call in calls)


def test_images_before_and_after_clips_keep_their_places(make_run, tmp_path):
    """They wait for their neighbours; a clip, which the same sandbox decodes, begins after them."""
    (tmp_path / "in").mkdir()
    for number in range(9):
        if number % 3 == 2:
            samples.clip(tmp_path / "in" / f"{number}.mp4", seconds=3)
        else:
            (tmp_path / "in" / f"{number}.png").write_bytes(samples.image_bytes(number))
    (tmp_path / "in" / "4.png").write_bytes(samples.image_bytes(4)[:-30])
    config = make_run(tmp_path / "in", segment_s=1.0, frames_per_segment=1)
    (listing,) = list_sources(config.source)
    reader = ItemReader(decode_spec(config.rows, open_model(config.model)))
    rows = [row for table in reader.decode(listing, lambda: False) for row in table.to_pylist()]
    segments = [(row["item_id"], row["segment"]) for row in rows]
    assert segments == [
        (f"{number}.{'mp4' if number % 3 == 2 else 'png'}", segment)
        for number in range(9)
        for segment in (range(3) if number % 3 == 2 else [0])
    ]
    single = {}
    for number in range(listing.num_rows):
        for table in reader.decode(listing.slice(number, 1), lambda: False):
            single |= {(row["item_id"], row["segment"]): row["pixels"] for row in table.to_pylist()}
    assert {(row["item_id"], row["segment"]): row["pixels"] for row in rows} == single


def test_a_stop_between_images_that_wait_for_each_other_is_seen(make_run, tmp_path):
    samples.folder(tmp_path / "in", num_images=20)
    config = make_run(tmp_path / "in")
    (listing,) = list_sources(config.source)
    reader = ItemReader(decode_spec(config.rows, open_model(config.model)))
    asked = []

    def should_stop():
        asked.append(1)
        return len(asked) > 20 + 5

    num_rows = sum(table.num_rows for table in reader.decode(listing, should_stop))
    assert num_rows == 8 + 2, "the first batch, and two of the second"
