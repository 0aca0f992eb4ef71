"""Plans of one tower for pictures and texts, only from the configuration: published sizes, the best of all cuts."""

import json
from itertools import combinations

import pytest
import torch
import transformers
from transformers.initialization import no_init_weights

from shards.convert.checkpoint import import_config
from shards.costs import count_parameters, weight_bytes
from shards.model_errors import ModelError
from shards.plan import check_plan, place, plan_shards
from shards.planning.devices import parse_devices
from shards.planning.explain import best_rate_of_cut, find_num_stages
from shards.planning.planning_costs import DataMix, estimate_costs, estimate_host
from shards.planning.problem import make_problem
from shards.planning.solver.throughput_search import best_placement
from shards.shard_specs import whole_model
from shards.tensor_shapes import model_shapes

# Published config.json of Qwen3-VL-Embedding (2B, 8B) and of Qwen3-VL-32B, the largest dense one: the decoder's width,
# layers, heads and MLP; then the vision blocks' number, width, MLP, and those that feed the decoder.
SIZES = {
    "2B": ((2048, 28, 16, 6144), (24, 1024, 4096, [5, 11, 17])),
    "8B": ((4096, 36, 32, 12288), (27, 1152, 4304, [8, 16, 24])),
    "32B": ((5120, 64, 64, 25600), (27, 1152, 4304, [8, 16, 24])),
}
MIX = DataMix(captions_per_item=1, caption_tokens=64, image_patches=1024)


def published(size):
    """A published configuration, as the hub has it."""
    (width, layers, heads, mlp), (depth, vision_width, vision_mlp, indexes) = SIZES[size]
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": width,
            "intermediate_size": mlp,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": rope,
            "rope_theta": 5000000,
            "vocab_size": 151936,
        },
        "vision_config": {
            "deepstack_visual_indexes": indexes,
            "depth": depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": vision_width,
            "in_channels": 3,
            "intermediate_size": vision_mlp,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": width,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def config_of(size, tmp_path):
    folder = tmp_path / size
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published(size)))
    return import_config(folder, tmp_path / f"{size} model")


def problem_of(config, devices, dtype="bfloat16", mix=MIX, **limits):
    fleet = parse_devices(devices)
    costs = {device.name: estimate_costs(config, device, dtype, mix.caption_tokens) for _, device in fleet}
    return make_problem(config, fleet, costs, estimate_host(config), mix=mix, dtype=dtype, **limits)


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_the_published_sizes_are_transformers_own(size, tmp_path):
    config = config_of(size, tmp_path)
    with torch.device("meta"), no_init_weights():
        theirs = transformers.Qwen3VLModel(transformers.Qwen3VLConfig.from_dict(published(size)))
    found = count_parameters(model_shapes(config))
    assert found == sum(each.numel() for each in theirs.parameters())
    assert abs(weight_bytes(config, whole_model(config), "bfloat16") / (2 * found) - 1) < 1e-3  # norms are float32


@pytest.mark.medium
def test_the_8b_model_on_two_and_eight_devices_of_24_gb_is_as_computed_by_hand(tmp_path):
    config = config_of("8B", tmp_path)
    # By hand: 8,144,793,840 values; a decoder layer 4096 x (2 x 4096 + 2 x 1024 + 3 x 12288) + norms = 192,946,432,
    # the token table 151936 x 4096 = 622,329,856; the rest is vision.
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) + 2 * 4096 + 2 * 128
    table, last_norm = 151936 * 4096, 4096
    block = 4 * 1152**2 + 4 * 1152 + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152
    mergers = 4 * (4608**2 + 4608 + 4608 * 4096 + 4096) + 2 * 1152 + 3 * 2 * 4608
    front = 1152 * (3 * 2 * 16 * 16 + 1) + 2304 * 1152
    assert count_parameters(model_shapes(config)) == 36 * layer + table + last_norm + 27 * block + mergers + front
    for devices, num in (("2xL4", 2), ("8xL4", 8)):
        problem = problem_of(config, devices)
        plan = place(problem, find_num_stages(problem)).plan
        # 16.3 GB of weights fit one device of 24 GB with a batch next to them: whole copies need no transfers.
        assert [(len(stage.spec.vision), len(stage.spec.text), stage.num_replicas) for stage in plan.stages] == [
            (64, 36, num)
        ]
        assert plan.stages[0].weight_bytes == pytest.approx(2 * 8.145e9, rel=1e-3)
        assert plan.stages[0].memory_bytes < 24e9
    # By hand: 256 tokens of a picture and 64 of a text in 36 layers, 1,024 patches in blocks; attention is the rest.
    flops = 2 * 320 * 36 * layer + 2 * 1024 * 27 * block
    stage = plan.stages[0]
    assert stage.flops_per_image + stage.flops_per_caption == pytest.approx(flops, rel=0.05)


def test_a_picture_with_its_caption_holds_both_at_once(tmp_path):
    """Memory of a picture and of its caption; apart, the larger of the two."""
    apart = config_of("2B", tmp_path)
    joined = apart.model_copy(update={"preprocess": apart.preprocess.model_copy(update={"joins_captions": True})})
    problems = [problem_of(each, "1xL4") for each in (apart, joined)]
    stages = [place(each, 1).plan.stages[0] for each in problems]
    costs = estimate_costs(apart, parse_devices("1xL4")[0][1], "bfloat16", MIX.caption_tokens)
    smaller = min(costs.workspace_bytes_per_image, costs.workspace_bytes_per_caption)
    assert stages[1].memory_bytes - stages[0].memory_bytes == problems[0].rows_per_batch * smaller > 0


@pytest.mark.medium
def test_a_model_larger_than_a_device_is_cut_and_no_layer_is_held_twice(tmp_path):
    config = config_of("32B", tmp_path)
    with pytest.raises(ModelError, match="memory"):
        place(problem_of(config, "8xL4"), 2)
    plan = place(problem_of(config, "8xL4"), 4).plan
    check_plan(plan, config)
    assert sum(stage.weight_bytes for stage in plan.stages) == weight_bytes(config, whole_model(config), "bfloat16")
    assert all(stage.memory_bytes < 24e9 for stage in plan.stages)
    for stage in plan.stages:
        assert config.shared_layers(stage.spec.vision) == stage.spec.text or not len(stage.spec.text)


@pytest.mark.medium
@pytest.mark.parametrize("devices", ["2xL4", "1xA10,1xT4", "1xL4,4xCPU"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_plan_is_the_best_of_all_cuts(devices, num_stages, tmp_path):
    config = config_of("2B", tmp_path)
    vision = config.vision.model_copy(update={"depth": 3, "deepstack_visual_indexes": (0, 2)})
    vision = vision.model_copy(update={"decoder": vision.decoder.model_copy(update={"num_hidden_layers": 5})})
    config = config.model_copy(update={"vision": vision, "text": vision.decoder})
    problem = problem_of(config, devices, "float16" if "T4" in devices else "float32")
    depth = config.num_layers["vision"]
    cuts = [[0, *inner, depth] for inner in combinations(range(1, depth), num_stages - 1)]
    best = max(best_rate_of_cut(problem, problem.specs([(cut, 0) for cut in each])) for each in cuts)
    assert best_placement(problem, num_stages).items_per_s == pytest.approx(best, rel=1e-6)
    # Stages on parts of one GPU take of its time what the others leave.
    assert place(problem, num_stages).plan.items_per_s >= best * (1 - 1e-6)


def test_a_cut_into_equal_devices_balances_layers_that_differ(tmp_path):
    config = config_of("8B", tmp_path).at_patches(1024)
    flops = [stage.flops_per_image + stage.flops_per_caption for stage in plan_shards(config, 4).stages]
    assert max(flops) < 1.1 * sum(flops) / 4
