"""Measured seconds and bytes: of the right order, from one layer at a time, and larger for larger layers."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from shards.fresh import init_model
from shards.length_groups import GroupCosts
from shards.model_config import ModelConfig, load_model_config
from shards.planning.planning_costs import ModelCosts
from shards.preprocess import PreprocessConfig
from shards.profile import TimingSetting, _SampleBatch, measure_costs, measure_part
from shards.ranges import LayerRange
from shards.towers.albert import AlbertTower
from shards.towers.vit import VitTower


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A ViT of broad layers next to a text tower of narrow ones."""
    vision = VitTower(image_size=32, patch_size=4, width=512, depth=3, num_heads=8)
    text = AlbertTower(
        vocab_size=100,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    preprocess = PreprocessConfig(image_size=32, max_caption_tokens=32)
    config = ModelConfig(
        name="uneven", trained=False, embedding_dim=24, vision=vision, text=text, preprocess=preprocess
    )
    return init_model(config, tmp_path_factory.mktemp("measured") / "model", seed=0)


@pytest.mark.medium
def test_layers_with_more_operations_take_longer_and_the_costs_survive_their_file(model):
    costs = measure_costs(model, TimingSetting(num_rows=8), "a fingerprint")
    assert (costs.source, costs.device, costs.model_fingerprint) == ("measured", "cpu x1", "a fingerprint")
    assert costs.vision.layer_s > 4 * costs.text.layer_s > 0, "100 times the operations"
    assert min(costs.vision.front_s, costs.vision.head_s, costs.text.front_s, costs.text.head_s) > 0
    assert 1e-12 < costs.send_s_per_byte < 1e-7
    assert ModelCosts.from_json(costs.to_json()) == costs
    whole = costs.vision.of(LayerRange(0, 3), 3)
    assert whole == pytest.approx(costs.vision.front_s + 3 * costs.vision.layer_s + costs.vision.head_s)


def test_captions_are_timed_in_the_groups_in_which_a_stage_computes_them(model):
    tower = load_model_config(model).required_text
    setting = TimingSetting(num_rows=64)
    one = GroupCosts(price_tokens=1e9, max_tokens=1 << 17, max_computed=10.0, few_tokens=0)
    grouped = replace(setting, group_costs=(("text", one),))
    layers = LayerRange(0, 1)
    numbers = [len(_SampleBatch("text", tower, each)._make_groups(64, layers)) for each in (setting, grouped)]
    assert numbers[0] > numbers[1] == 1


def test_workspace_is_what_is_alive_beside_the_output():
    def run(num_rows):
        hidden = torch.ones(num_rows, 1000) * 2  # 4,000 bytes a row, gone at the end
        return hidden[:, :10] + 1

    part = measure_part(run, TimingSetting(num_rows=16))
    assert part.workspace_bytes == pytest.approx(2 * 4000, rel=0.01), "the product and the ones that it is made of"


@pytest.mark.medium
def test_threads_are_left_as_they_were(model):
    before = torch.get_num_threads()
    measure_costs(model, TimingSetting(num_threads=before + 1, num_rows=1))
    assert torch.get_num_threads() == before


@pytest.mark.medium
def test_a_slow_part_is_measured_with_few_rows():
    asked = []

    def slow(num_rows):
        asked.append(num_rows)
        torch.ones(400, 400) @ torch.ones(400, 400 * 40 * num_rows)
        return torch.ones(1)

    measure_part(slow, TimingSetting(num_rows=1024))
    assert max(asked) < 1024


@pytest.mark.slow
def test_measuring_reads_one_layer_of_each_tower_at_a_time_and_loads_no_ray(model):
    program = (
        "import sys, shards.shard as s\n"
        "held = []\n"
        "load = s.load_shard\n"
        "def spy(folder, spec, **options):\n"
        "    held.append((len(spec.vision), len(spec.text)))\n"
        "    return load(folder, spec, **options)\n"
        "s.load_shard = spy\n"
        "from shards.profile import TimingSetting, measure_costs\n"
        f"measure_costs({str(model)!r}, TimingSetting(num_rows=1))\n"
        "print(sorted(set(held)), 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[(0, 1), (1, 0)] False"
    assert "profiler" not in done.stderr, "torch's profiler stays silent"
