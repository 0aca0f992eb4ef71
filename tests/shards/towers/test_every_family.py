"""Each family of the registry, tiny and fresh: planned and cut, in int8, measured, trained, as a delta."""

import logging

import pytest
import torch
import transformers  # noqa: F401 - gives loggers `warning_once`
from tower_checks import check_every_cut, make_batch, run_stages, vectors
from tower_families import FAMILIES, beside_default, captions_for

from embedder.plugins.train.trainer.batch import TrainBatch
from embedder.plugins.train.trainer.export import write_delta
from embedder.plugins.train.trainer.train_settings import TrainSettings, is_trainable
from embedder.plugins.train.trainer.trainer import Trainer
from shards.costs import weight_bytes
from shards.delta import apply_delta
from shards.fingerprint import model_fingerprint
from shards.fresh import init_model
from shards.model_errors import ModelError
from shards.plan import plan_shards
from shards.planning.planning_costs import DataMix
from shards.profile import TimingSetting, measure_costs
from shards.ranges import LayerRange
from shards.reference import load_towers
from shards.shard import load_shard
from shards.shard_specs import whole_model
from shards.tensor_shapes import model_shapes, shard_shapes


@pytest.fixture(params=FAMILIES, ids=lambda family: family.model_fields["family"].default)
def config(request):
    """A tiny model of the family, next to a tower of the default family."""
    return beside_default(request.param)


@pytest.fixture
def model(config, tmp_path):
    """Its model folder, of fresh weights."""
    return init_model(config, tmp_path / "model", seed=0)


@pytest.mark.medium
def test_a_plan_for_three_devices_covers_it_and_gives_the_bits_of_the_unsplit_towers(config, model):
    plan = plan_shards(config, 3)
    specs = [stage.spec for stage in plan.stages]
    assert [stage.weight_bytes for stage in plan.stages] == [weight_bytes(config, spec, "float32") for spec in specs]
    assert min(stage.flops_per_image + stage.flops_per_caption for stage in plan.stages) > 0
    batch = make_batch(config, captions_for(config))
    with torch.inference_mode():  # as runs compute
        expected = vectors(load_towers(model)(batch))
        found = run_stages(model, specs, batch)
    assert all(torch.equal(found[side], rows) for side, rows in expected.items())
    assert {side: rows.shape[1] for side, rows in found.items()} == {"vision": 24, "text": 24}


@pytest.mark.medium
def test_every_cut_in_int8_has_the_planned_bytes_and_comes_close_to_float32(config, model):
    for stage in plan_shards(config, 3, dtype="int8").stages:
        shard = load_shard(model, stage.spec, dtype="int8")
        assert shard.weight_bytes == stage.weight_bytes
        assert shard.num_parameters == sum(
            torch.Size(each).numel() for each in shard_shapes(config, stage.spec).values()
        )
    batch = make_batch(config, captions_for(config))
    exact = vectors(load_towers(model)(batch))
    for dtype in ("int8", "bfloat16"):
        for side, rows in vectors(load_shard(model, whole_model(config), dtype=dtype)(batch)).items():
            assert not torch.equal(rows, exact[side])
            assert torch.cosine_similarity(rows, exact[side]).min() >= 0.995, dtype


@pytest.mark.medium
def test_every_cut_of_fresh_weights_is_exact(config, model):
    check_every_cut(model, make_batch(config, captions_for(config)))


@pytest.mark.medium
def test_its_costs_are_measured_layer_by_layer_and_plan_it(config, model):
    costs = measure_costs(model, TimingSetting(num_rows=2))
    for side in (costs.vision, costs.text):
        assert min(side.front_s, side.layer_s, side.head_s) > 0
    assert plan_shards(config, 2, mix=DataMix(caption_tokens=8)).stages


def test_building_it_warns_of_nothing(config, caplog):
    logging.Logger.warning_once.cache_clear()  # transformers' own; it reports each message once
    for tower in config.towers.values():
        with torch.device("meta"):
            tower.build()
    assert caplog.text == ""


@pytest.mark.parametrize("what", ["all", "layers"])
def test_training_moves_what_it_says_and_a_delta_over_the_base_is_the_trained_model(config, model, tmp_path, what):
    if config.vision.patch_px is not None:
        pytest.skip("training takes square images")
    if config.vision.is_whole:
        with pytest.raises(ModelError, match="test_convnext of timm, whole, .*; training takes towers of layers"):
            Trainer(model, TrainSettings())
        return
    layers = LayerRange(1, 2) if what == "layers" else LayerRange(0, 0)
    settings = TrainSettings(what=what, vision_layers=layers, text_layers=layers, num_steps=2, warmup_steps=0)
    trainer = Trainer(model, settings)
    before = {name: each.clone() for name, each in trainer.weights().items()}
    for _ in range(2):
        trainer.step(train_batch(config))
    after = trainer.weights()
    moved = {name for name in model_shapes(config) if not torch.equal(before[name], after[name])}
    learns = {name for name in model_shapes(config) if is_trainable(name, config, settings)}
    assert moved <= learns
    assert len(moved) > 0.8 * len(learns), sorted(learns - moved)
    names = tuple(sorted(learns))
    delta = write_delta(tmp_path / "delta", model, after, names, title="trained")
    whole = trainer.export(tmp_path / "whole", "trained")
    applied = apply_delta(model, delta, tmp_path / "applied")
    batch = make_batch(config, captions_for(config))
    expected = vectors(load_towers(whole)(batch))
    assert all(torch.equal(rows, expected[side]) for side, rows in vectors(load_towers(applied)(batch)).items())
    assert model_fingerprint(applied) != model_fingerprint(model)


def train_batch(config):
    """Images and captions of four concepts."""
    batch, concepts = make_batch(config, captions_for(config)), torch.arange(4)
    return TrainBatch(
        pixels=batch.vision.values,
        image_concepts=concepts,
        token_ids=batch.text.values,
        token_lengths=batch.text.lengths,
        caption_concepts=concepts,
        image_keys=concepts,
        epoch=0,
    )
