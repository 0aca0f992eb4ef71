"""Plans: their predictions, other numbers of stages, other fleets, and the comparison with equal parts."""

import json
import re
from dataclasses import replace

import pytest

from shards.costs import weight_bytes
from shards.model_errors import ModelError
from shards.plan import ShardPlan, check_plan, plan_placement, plan_shards
from shards.planning.devices import parse_devices
from shards.planning.explain import best_rate_of_cut, compare_with_equal_parts, equal_parts
from shards.planning.planning_costs import ENGINE_CALL_S, CallSizes, DataMix, estimate_costs, estimate_host
from shards.planning.problem import make_problem, predict
from shards.planning.solver.throughput_search import best_placement
from shards.planning.what_if import what_if

VISION = {"width": 384, "depth": 12, "num_heads": 6, "image_size": 224, "patch_size": 16}
TEXT = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768, "intermediate_size": 3072}


@pytest.fixture
def make(make_config):
    """Problems on a fleet, with estimated costs; a ViT-S and an ALBERT-base unless said otherwise."""

    def make(devices, mix=None, dtype="float32", vision=None, text=None, **limits):
        config = make_config(VISION | (vision or {}), TEXT | (text or {}))
        fleet = parse_devices(devices)
        costs = {device.name: estimate_costs(config, device, dtype) for _, device in fleet}
        return make_problem(config, fleet, costs, estimate_host(config), mix=mix or DataMix(), dtype=dtype, **limits)

    return make


def test_a_plan_says_what_it_is_made_from_and_survives_json(make):
    problem = make("2xA10, 1xT4, 32xCPU", DataMix(0.5, 2.0, 20))
    plan = plan_placement(problem, 3, model_fingerprint="0123456789abcdef")
    check_plan(plan, problem.config)
    assert ShardPlan.from_json(plan.to_json()) == plan
    assert (plan.mix, plan.dtype, plan.costs) == (DataMix(0.5, 2.0, 20), "float32", "estimated")
    for stage in plan.stages:
        assert stage.device in {"A10", "T4", "CPU"}
        assert stage.num_threads == (1 if stage.device == "CPU" else None)
        assert stage.memory_bytes > stage.weight_bytes == weight_bytes(problem.config, stage.spec, "float32")
    taken = {"A10": 0.0, "T4": 0.0, "CPU": 0.0}
    for stage in plan.stages:
        taken[stage.device] += stage.num_replicas * stage.num_gpus
    assert taken["A10"] <= 2
    assert taken["T4"] <= 1


@pytest.mark.parametrize("devices", ["8xCPU", "2xA10, 1xT4, 32xCPU", "1xH200", "3xT4, 4xCPU"])
def test_the_predicted_throughput_is_that_of_the_search(make, devices):
    problem = make(devices)
    placement = best_placement(problem, 3)
    prediction = predict(problem, placement.stages)
    if devices != "1xH200":
        assert prediction.items_per_s == pytest.approx(placement.items_per_s, rel=1e-6)
        return
    # The search gives each stage a part of the GPU's time, too; in fact each takes what the others leave.
    towers_s = [problem.towers_s(stage.pool, stage.spec) for stage in placement.stages]
    assert prediction.items_per_s == pytest.approx(1 / sum(towers_s), rel=1e-6)
    assert prediction.items_per_s > placement.items_per_s


@pytest.mark.medium
@pytest.mark.parametrize("num_stages", [3, 4, 6])
def test_stages_on_parts_of_several_gpus_share_their_time_and_one_more_is_no_loss(make, num_stages):
    problems = [make(f"{number}xH100", dtype="bfloat16") for number in (1, 2)]
    rates = [plan_placement(problem, num_stages).items_per_s for problem in problems]
    assert rates[0] <= rates[1] * (1 + 1e-6)
    for problem in problems:
        gains = [more.gain for more in what_if(problem, num_stages, 1000).one_more]
        assert min(gains) >= -1e-6, gains


@pytest.mark.medium
def test_reasons_are_the_neighbours_own_plans(make):
    problem = make("2xT4, 16xCPU")
    plan = plan_placement(problem, 3)
    assert len(plan.reasons) == 2
    for number, reason in zip((2, 4), plan.reasons, strict=True):
        items_per_s = float(re.match(rf"{number} stages: ([\d.e+]+) items/s", reason)[1])
        assert items_per_s == pytest.approx(plan_placement(problem, number).items_per_s, rel=1e-3)


def test_one_stage_has_one_neighbour_and_the_finest_cut_too(make):
    problem = make("8xCPU", vision={"depth": 2}, text={"num_hidden_layers": 1})
    assert [reason[:8] for reason in plan_placement(problem, 1).reasons] == ["2 stages"]
    assert [reason[:8] for reason in plan_placement(problem, 3).reasons] == ["2 stages"]


def test_decoding_is_named_where_it_is_the_bottleneck(make):
    assert plan_placement(make("4xH200, 4xCPU"), 3).bottleneck == "decode"
    assert plan_placement(make("4xCPU"), 3).bottleneck == "shared cores"
    assert plan_placement(make("1xT4, 640xCPU"), 1).bottleneck in {"stage 0", "shared cores"}
    assert re.fullmatch(r"stage \d", plan_placement(make("1xT4"), 3).bottleneck)


def test_rays_driver_bounds_a_plan_of_small_blocks_alone(make):
    h100, small = {"devices": "1xH100", "dtype": "bfloat16"}, CallSizes(64, 64, part=512)
    usual = plan_placement(make(**h100), 1)
    large = plan_placement(make(**h100, calls=CallSizes(1024, 256, part=512)), 1)
    assert replace(large, reasons=()) == replace(usual, reasons=())
    for number in (1, 3):
        bound = plan_placement(make(**h100, calls=small), number)
        assert bound.bottleneck == "Ray's driver"
        assert bound.items_per_s == pytest.approx(1 / (ENGINE_CALL_S * ((number + 1) / 64 + 1 / 512)))
        # Its loop was seen to make 58 to 95 calls a second, each of several steps' tasks for 64 rows.
        assert 0.8 * 58 * 64 / number < bound.items_per_s < 1.2 * 95 * 64 / number
    compared = compare_with_equal_parts(make(**h100, calls=small), 3)
    assert compared.planned == pytest.approx(bound.items_per_s) == compared.equal_parts
    answer = what_if(make(**h100, calls=small), 1, 1000)
    assert (answer.bottleneck, max(more.gain for more in answer.one_more)) == ("Ray's driver", pytest.approx(0))


def test_a_stage_more_costs_the_driver_calls_and_blocks_of_activations_are_smaller(make):
    problem = make("8xH100", dtype="bfloat16", calls=CallSizes(1024, 128, part=512))
    one, two = (plan_placement(problem, number) for number in (1, 2))
    assert (one.bottleneck, two.bottleneck) == ("Ray's driver",) * 2
    assert one.items_per_s == pytest.approx(1 / (ENGINE_CALL_S * (2 / 1024 + 1 / 512)))
    assert two.items_per_s == pytest.approx(1 / (ENGINE_CALL_S * (3 / 128 + 1 / 512)))


def test_a_refused_plan_names_the_nearest_that_can_and_it_can(make):
    whole = make("8xCPU")
    weights = sum(stage.weight_bytes for stage in plan_placement(whole, 1).stages)
    problem = make("8xCPU", weights_cap_bytes=int(weights * 0.6))
    with pytest.raises(ModelError) as refusal:
        plan_placement(problem, 1)
    message = str(refusal.value)
    assert "1 stage of 'tiny': no cut keeps each replica's weights within" in message
    number = int(re.search(r"--stages (\d+)", message)[1])
    assert max(stage.weight_bytes for stage in plan_placement(problem, number).stages) <= weights * 0.6
    megabytes = float(re.search(r"--weights-cap ([\d.]+)MiB", message)[1])
    assert weights <= megabytes * 2**20 < 1.03 * weights
    plan_placement(replace(problem, weights_cap_bytes=int(megabytes * 2**20)), 1)


@pytest.mark.parametrize(
    ("devices", "num_stages", "message"),
    [
        ("1xT4", 9, r"too few devices.*--stages 8 "),
        ("1xT4:1MB", 2, r"don't fit into the devices' memory.*give more or larger devices"),
    ],
)
def test_devices_that_are_too_few_or_too_small_are_refused_in_one_line(make, devices, num_stages, message):
    with pytest.raises(ModelError, match=message) as refusal:
        plan_placement(make(devices), num_stages)
    assert "\n" not in str(refusal.value)


def test_plans_of_before_still_load(make_config):
    plan = plan_shards(make_config(), 3)
    tree = json.loads(plan.to_json())
    old = {"model_fingerprint": None, "stages": []}
    keys = (
        "spec",
        "weight_bytes",
        "flops_per_image",
        "flops_per_caption",
        "cut_bytes_per_image",
        "cut_bytes_per_caption",
    )
    old["stages"] = [{key: stage[key] for key in keys} for stage in tree["stages"]]
    assert ShardPlan.from_json(json.dumps(old)).stages == plan.stages


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_replicas", 0),
        ("num_threads", 0),
        ("num_gpus", -0.5),
        ("num_gpus", float("nan")),
        ("seconds_per_item", float("inf")),
        ("weight_bytes", -1),
    ],
)
def test_a_plan_edited_to_what_cannot_be_is_refused_by_the_key(make_config, key, value):
    tree = json.loads(plan_shards(make_config(), 3).to_json())
    tree["stages"][1][key] = value
    with pytest.raises(ModelError, match=rf"plan: stages\.1\.{key}: .*found {value}.*; make it again"):
        ShardPlan.from_json(json.dumps(tree))


def test_a_file_without_a_stage_or_text_is_no_plan(make_config):
    with pytest.raises(ModelError, match="plan: stages: .* at least 1 item .*; make it again"):
        ShardPlan.from_json('{"model_fingerprint": null, "stages": []}')
    with pytest.raises(ModelError, match="plan: .*Invalid JSON.*; make it again"):
        ShardPlan.from_json(b"\xff\xfe")


LARGE = {"vision": {"width": 1280, "num_heads": 16}, "text": {"hidden_size": 2048, "num_attention_heads": 16}}
FIVE = {"vision": {"depth": 5}, "text": {"num_hidden_layers": 5}}


@pytest.mark.parametrize(
    ("devices", "num_stages", "settings", "least", "most", "said"),
    [
        # Equal devices, depths that divide, and layers that outweigh the transfers: there is nothing to balance.
        ("3xT4", 3, {"mix": DataMix(1.0, 1.0)} | LARGE, 1.0, 1.1, ""),
        ("3xT4", 3, {"mix": DataMix(1.0, 0.1)} | LARGE, 1.0, 1.1, ""),
        ("3xT4", 3, {"mix": DataMix(0.1, 5.0)} | LARGE, 1.0, 1.1, ""),
        # A core that has nothing to do in one stage works in another: only the sum counts.
        ("8xCPU", 3, {"mix": DataMix(0.2, 6.0)}, 1.0, 1.02, "as good as the planned cut"),
        # A small model on fast GPUs: activations take longer to pass on than layers to compute; equal parts pass most.
        ("3xH100", 3, {"dtype": "bfloat16"}, 1.05, 100, ""),
        # One fast and two slow devices: equal parts wait for the slow ones.
        ("1xL40S, 2xT4", 3, {}, 1.3, 100, "the planned cut does"),
        ("4xA10", 4, FIVE, 1.05, 100, ""),  # depths that do not divide
    ],
)
def test_the_planned_cut_gains_on_equal_parts_where_they_are_uneven(
    make, devices, num_stages, settings, least, most, said
):
    comparison = compare_with_equal_parts(make(devices, **settings), num_stages)
    assert least <= comparison.gain < most
    assert said in str(comparison)


def test_the_best_rate_of_the_planned_cut_is_the_plans(make):
    for devices in ("2xA10, 1xT4, 32xCPU", "8xCPU", "1xH200"):
        problem = make(devices)
        plan = plan_placement(problem, 3)
        rate = best_rate_of_cut(problem, [stage.spec for stage in plan.stages])
        assert rate == pytest.approx(best_placement(problem, 3).items_per_s, rel=1e-6)
        assert rate <= plan.items_per_s * (1 + 1e-6)


def test_equal_parts_that_do_not_fit_are_said_so(make):
    problem = make("3xA10")
    weights = [weight_bytes(problem.config, spec, "float32") for spec in equal_parts(problem, 3)]
    comparison = compare_with_equal_parts(replace(problem, weights_cap_bytes=max(weights) - 1), 3)
    assert comparison.equal_parts == 0
    assert str(comparison) == "each tower in equal parts: doesn't fit"


@pytest.mark.medium
def test_what_if_adds_up(make):
    problem = make("2xA10@1.5, 64xCPU@0.05")
    found = what_if(problem, 3, 1_000_000_000, startup_s=36.0)
    assert found.hours == pytest.approx(0.01 + 1e9 / found.items_per_s / 3600)
    assert found.device_hours == {"A10": 2 * found.hours, "CPU": 64 * found.hours}
    assert found.cost == pytest.approx((2 * 1.5 + 64 * 0.05) * found.hours)
    assert found.items_per_s == pytest.approx(plan_placement(problem, 3).items_per_s, rel=1e-6)
    assert what_if(make("2xA10@1.5, 64xCPU"), 3, 10).cost is None


def test_the_best_ratio_of_cores_to_gpus_is_where_neither_waits(make):
    found = what_if(make("2xA10, 4xCPU"), 2, 1000)
    enough = what_if(make(f"2xA10, {found.cores_needed + 1}xCPU"), 2, 1000)
    few = what_if(make(f"2xA10, {found.cores_needed // 2}xCPU"), 2, 1000)
    assert not enough.bottleneck.startswith("decode")
    assert few.bottleneck == "decode"
    assert enough.items_per_s > 1.5 * few.items_per_s


def test_gpus_beyond_what_the_cores_feed_buy_nothing(make):
    found = what_if(make("1xA10, 64xCPU"), 2, 1000)
    many = what_if(make(f"{found.decode_bound_gpus + 1}xA10, 64xCPU"), 2, 1000)
    assert many.bottleneck == "decode"
    gpu = next(more for more in many.one_more if more.where == "fleet" and more.device == "A10")
    core = next(more for more in many.one_more if more.where == "fleet" and more.device == "CPU")
    assert gpu.gain == pytest.approx(0, abs=1e-6)
    assert core.gain == pytest.approx(1 / 64, rel=0.1)


@pytest.mark.medium
def test_one_more_device_in_the_slowest_stage_buys_the_most(make):
    found = what_if(make("2xA10, 1xT4"), 3, 1000)
    slowest = found.bottleneck
    gains = {more.where: more.gain for more in found.one_more if more.where != "fleet"}
    assert gains[slowest] == max(gains.values())
    assert all(gain >= -1e-9 for gain in gains.values())


def test_a_thousand_devices_are_planned_in_seconds(make):
    problem = make("600xA100@2, 400xL4@0.8, 10000xCPU@0.04", dtype="bfloat16")
    found = what_if(problem, 3, 200 * 10**12 // 150_000)
    assert found.hours * found.items_per_s * 3600 == pytest.approx(200e12 / 150e3, rel=1e-6)
