"""Measurements are kept by what they depend on, and a damaged file is measured again."""

from dataclasses import replace

import pytest
import samples

from embedder.models.model_folder import open_model
from embedder.planning import profile_machine as profile
from embedder.planning.sample import sample_items
from embedder.sources.listing import list_sources
from embedder.storage.cost_cache import read_or_make
from embedder.storage.user_cache import cache_folder
from shards.planning.devices import DEVICES
from shards.planning.planning_costs import DataMix, HostCosts, estimate_costs
from shards.shard_specs import whole_model

COSTS = HostCosts(0.001, 0.002, 0.003, 0.004, 15.0, "measured")


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def never():
    raise AssertionError("it was kept")


def test_a_measurement_is_taken_once_for_each_key():
    assert read_or_make(HostCosts, {"cpu": "a"}, lambda: COSTS) == COSTS
    assert read_or_make(HostCosts, {"cpu": "a"}, never) == COSTS
    with pytest.raises(AssertionError):
        read_or_make(HostCosts, {"cpu": "b"}, never)


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"decode_s_per_image": "much"}'])
def test_a_broken_file_is_measured_again_and_replaced(damage):
    read_or_make(HostCosts, {}, lambda: COSTS)
    (path,) = cache_folder("costs").iterdir()
    path.write_bytes(damage)
    assert read_or_make(HostCosts, {}, lambda: COSTS) == COSTS
    assert read_or_make(HostCosts, {}, never) == COSTS
    assert [entry.suffix for entry in cache_folder("costs").iterdir()] == [".json"]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert read_or_make(HostCosts, {}, lambda: COSTS) == COSTS


@pytest.mark.medium
def test_costs_are_measured_on_the_machine_and_kept(make_run, tiny_model, tmp_path, monkeypatch):
    config, model = make_run(tmp_path, batch_size=4, rows_per_part=32), open_model(str(tiny_model))
    model_costs, host = profile.measured_costs(config.compute, config.rows, model)
    assert (model_costs.model_fingerprint, model_costs.source, host.source) == (
        model.fingerprint,
        "measured",
        "measured",
    )
    assert 1e-5 < model_costs.vision.layer_s < 1e-1
    assert 1e-5 < host.decode_s_per_image < 1e-1
    assert 0 < host.tokenise_s_per_caption < host.decode_s_per_image
    assert min(host.write_s_per_item, host.engine_s_per_item, model_costs.call_s, model_costs.send_s_per_byte) > 0
    monkeypatch.setattr(profile, "measure_call", never)
    monkeypatch.setattr(profile, "measure_write", never)
    assert profile.measured_costs(config.compute, config.rows, model) == (model_costs, host)


def test_a_sample_of_the_run_s_own_items_tells_their_mix(make_run, tiny_model, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=8, num_clips=1)  # 4 of them with captions; clips of 3 s
    config = make_run(source, segment_s=1.5, frames_per_segment=2)
    (listing,) = list_sources(config.source)
    sample = sample_items(config.rows, open_model(str(tiny_model)), listing)
    # The first four items warm the decoder up and are not counted: one clip and three pictures.
    assert sample.rows["item_id"].to_pylist() == [f"pictures/{number:04d}.png" for number in range(3, 8)]
    assert (sample.mix.images_per_item, sample.mix.captions_per_item) == (1.0, pytest.approx(2 / 5))
    assert sample.decode_s_per_image > 0


@pytest.mark.medium
def test_captions_alone_have_no_decode_costs_of_pictures(make_run, tiny_model, tmp_path):
    (tmp_path / "in").mkdir()
    for number, caption in enumerate(samples.SENTENCES[:12]):
        (tmp_path / "in" / f"{number:02d}.txt").write_text(caption)
    config = make_run(tmp_path / "in")
    (listing,) = list_sources(config.source)
    costs, host, mix = profile.measure(config.compute, config.rows, open_model(str(tiny_model)), listing)
    assert (mix.images_per_item, mix.captions_per_item) == (0.0, 1.0)
    assert host.decode_s_per_image > 0, "from shipped images, for what-if questions"
    assert mix.caption_tokens == costs.caption_tokens


def test_ray_s_share_of_an_item_fills_the_cores(make_run, tiny_model, tmp_path, monkeypatch):
    config, model = make_run(tmp_path, batch_size=8, num_stages=3, rows_per_part=32), open_model(str(tiny_model))
    core = DEVICES["CPU"]
    costs = replace(estimate_costs(model.config, core, "float32"), call_s=0.0)
    monkeypatch.setattr(profile.hardware, "num_cpus", lambda: 2)
    host = profile.with_engine(config.compute, model.config, costs, COSTS, DataMix())
    tower_s = costs.vision.of(whole_model(model.config).vision, model.config.vision.depth)
    tower_s += costs.text.of(whole_model(model.config).text, model.config.text.num_hidden_layers)
    items_per_s = 2 / (tower_s + host.item_s(DataMix()))
    calls_s = profile.ENGINE_CALL_S * (4 / 8 + 1 / 32)
    busy = items_per_s * (tower_s + replace(COSTS, engine_s_per_item=0.0).item_s(DataMix()) + calls_s)
    assert busy + profile.ENGINE_CORES == pytest.approx(2)
