"""Captions in the groups of a GPU, one rectangle for nearly all: cuts and unsplit towers give the same vectors."""

import pytest
import torch
from tower_checks import make_batch, vectors
from tower_families import FAMILIES, beside_default, captions_for

from shards.fresh import init_model
from shards.length_groups import gpu_groups
from shards.plan import plan_shards
from shards.reference import load_towers
from shards.shard import load_shard
from shards.shard_specs import whole_model

TOLERANCE = 1e-6
ONE_RECTANGLE = dict.fromkeys(("vision", "text"), gpu_groups(1e3, 15, 1e15))


def run_as_on_gpu(model, specs, batch):
    for spec in specs:
        shard = load_shard(model, spec)
        batch = shard.compute(shard.arrange(batch, ONE_RECTANGLE))
    return vectors(batch)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_fields["family"].default)
def test_cuts_equal_one_shard_to_the_bit_and_the_unsplit_towers_but_for_rounding(family, tmp_path):
    config = beside_default(family)
    model, batch = init_model(config, tmp_path / "model", seed=0), make_batch(config, captions_for(config))
    with torch.inference_mode():
        expected = vectors(load_towers(model)(batch))
        whole = run_as_on_gpu(model, [whole_model(config)], batch)
        cut = run_as_on_gpu(model, [stage.spec for stage in plan_shards(config, 3).stages], batch)
    for side, rows in expected.items():
        assert torch.equal(cut[side], whole[side])
        assert torch.allclose(whole[side], rows, rtol=0, atol=TOLERANCE)
