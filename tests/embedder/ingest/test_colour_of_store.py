"""How numbers of pixels are read in a store: recorded when it is made, and kept by whoever continues or searches."""

import json
import logging
from pathlib import Path

import pytest
import samples
from colour_twins import SRGB, in_profile, rgb_profile, scene
from embedding_runs import embedded

from embedder.errors import StoreError
from embedder.executors.job import preprocessing_of
from embedder.ingest.embed import embed, refresh
from embedder.ingest.inputs import open_inputs
from embedder.models.further_models import open_models
from embedder.models.model_folder import open_model
from embedder.retrieval.store_api import open_store
from shards.fingerprint import preprocess_fingerprint

SWAPPED = rgb_profile((SRGB[1], SRGB[2], SRGB[0]), 2.2)
SET = {"colour": "raw"}


def pictures(folder):
    """One picture as plain sRGB and in a profile of other primaries, and an ordinary one."""
    folder.mkdir()
    scene().save(folder / "plain.png")
    in_profile(scene(), SWAPPED).save(folder / "profile.png", icc_profile=SWAPPED)
    return folder


def record(config, name="store"):
    return json.loads(Path(config.store, f"{name}.json").read_text())


def forget(config):
    """Make a store's records those of a release that knew no other way."""
    for path in (*Path(config.store).glob("*.json"), *Path(config.store).glob("runs/*/published.json")):
        found = json.loads(path.read_text())
        found.pop("colour", None)
        path.write_text(json.dumps(found))


def vector(rows, name):
    return rows[name, 0]["image_embedding"]


def near(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_a_new_store_reads_what_files_say(make_run, tmp_path):
    config = make_run(pictures(tmp_path / "in"))
    assert config.decode.colour == "auto"
    _, rows = embedded(config)
    assert near(vector(rows, "plain.png"), vector(rows, "profile.png")) > 0.99
    assert record(config)["colour"] == record(config, "CURRENT")["colour"] == "srgb"


@pytest.mark.medium
def test_raw_is_the_fingerprint_and_the_vectors_of_before(make_run, tmp_path):
    config = make_run(pictures(tmp_path / "in"), decode=SET)
    _, rows = embedded(config)
    model = open_model(config.model)
    tokenizer = model.tokenizer_json.encode()
    before = preprocess_fingerprint(model.config.preprocess, tokenizer, config.segment_s, config.frames_per_segment)
    assert record(config)["preprocess_fingerprint"] == before == preprocessing_of(config.rows, model)
    assert preprocessing_of(make_run(tmp_path / "in").rows, model) != before
    assert near(vector(rows, "plain.png"), vector(rows, "profile.png")) < 0.99


@pytest.mark.medium
def test_a_store_without_the_record_goes_on_raw(make_run, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    source = pictures(tmp_path / "in")
    _, first = embedded(make_run(source, decode=SET))
    forget(make_run(source))
    (source / "another.png").write_bytes((source / "profile.png").read_bytes())
    config = make_run(source)
    report, rows = embedded(config)
    assert report.published
    assert near(vector(rows, "another.png"), vector(first, "profile.png")) > 0.99999
    assert record(config, "CURRENT")["colour"] == "raw"
    assert any(line.startswith('colour raw (decode.colour = "auto"): store ') for line in caplog.messages)


@pytest.mark.medium
def test_another_colour_than_the_stores_is_refused_until_all_is_made_anew(make_run, tmp_path):
    source = pictures(tmp_path / "in")
    embedded(make_run(source, decode=SET))
    forget(make_run(source))
    asked = make_run(source, decode={"colour": "srgb"})
    with pytest.raises(StoreError, match="preprocess fingerprint"):
        embed(asked)
    assert not refresh(make_run(source)).published  # auto keeps the store's
    assert refresh(asked).published
    assert record(asked, "CURRENT")["colour"] == "srgb"
    config = make_run(source)
    assert open_inputs(config).config.decode.colour == "srgb"
    assert not embed(config).published  # nothing to do


@pytest.mark.medium
def test_queries_are_read_as_the_store_is(make_run, tmp_path):
    source = pictures(tmp_path / "in")
    for colour in ("raw", "srgb"):
        store = str(tmp_path / colour)
        _, rows = embedded(make_run(source, store=store, decode={"colour": colour}))
        opened = open_store(store)
        found = opened.encoder.encode_image([source / "profile.png"])[0]
        assert opened.info.colour == colour
        assert near(found, vector(rows, "profile.png")) > 0.9999


@pytest.mark.medium
def test_pictures_that_say_nothing_give_the_same_bits_either_way(make_run, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=4)
    rows = {}
    for colour in ("raw", "srgb"):
        _, rows[colour] = embedded(make_run(source, store=str(tmp_path / colour), decode={"colour": colour}))
    assert {key: row["image_embedding"] for key, row in rows["raw"].items()} == {
        key: row["image_embedding"] for key, row in rows["srgb"].items()
    }


@pytest.mark.medium
def test_further_models_follow(make_run, tmp_path):
    config = make_run(pictures(tmp_path / "in"))
    tables = [{"uri": config.model}, {"name": "second", "kind": "towers", "uri": config.model}]
    infos = {}
    for colour in ("auto", "srgb", "raw"):
        config = make_run(tmp_path / "in", model=tables, decode={"colour": colour})
        (model,) = open_models(config.model_sections, config.rows)
        infos[colour] = model.info
    assert infos["auto"] == infos["srgb"]
    assert infos["raw"].colour == "raw"
    assert infos["raw"].preprocess_fingerprint != infos["srgb"].preprocess_fingerprint
    embedded(make_run(tmp_path / "in", model=tables))
    assert json.loads(Path(config.store, "CURRENT.json").read_text())["models"]["second"]["colour"] == "srgb"
