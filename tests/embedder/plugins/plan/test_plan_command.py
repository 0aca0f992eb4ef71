"""`embedder plan`: from a folder with only its config.json, in a fresh interpreter; and plans that runs follow."""

import json
import re
import subprocess
import sys

import pytest
import samples
from command_runs import run_here
from published_models import PUBLISHED

from embedder.cli.options import parse_size
from embedder.config import load_config
from embedder.errors import ConfigError
from embedder.placement import hardware
from embedder.placement.fleet import Available
from embedder.placement.resources import allocate
from shards.plan import PlannedStage
from shards.planning.devices import LAUNCH_S
from shards.planning.planning_costs import ENGINE_CALL_S
from shards.towers.vit import VitTower

HEAVY = {"torch", "timm", "transformers", "ray", "faiss", "PIL", "av"}


@pytest.fixture
def config_only(tiny_model, tmp_path):
    folder = tmp_path / "config only"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    return folder


@pytest.mark.medium
@pytest.mark.parametrize(
    "options", [["--devices", "2xA100:80GB, 4xL4, 8xCPU", "--what-if"], ["--devices", "4xA100:80GB,32xCPU"], []]
)
def test_planning_from_a_config_alone_loads_nothing_heavy(config_only, options):
    code = "import json, sys; from embedder.cli import app; app(sys.argv[1:], standalone_mode=False); print(json.dumps(sorted(sys.modules)))"  # noqa: E501
    arguments = ["plan", "--model", str(config_only), "--explain", *options]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    assert HEAVY & set(json.loads(result.stdout.splitlines()[-1])) == set()


@pytest.mark.parametrize("num", [1, 2, 8])
def test_a_model_of_8b_is_planned_for_devices_of_24_gb_without_options(num, run_embedder, tmp_path):
    PUBLISHED["Qwen3-VL-Embedding 8B"].describe(tmp_path)
    code, plan, stderr = run_embedder("plan", "--model", tmp_path / "model", "--devices", f"{num}xL4", "--json")
    assert code == 0, stderr
    (stage,) = plan["stages"]
    assert stage["num_replicas"] == num
    assert stage["weight_bytes"] == pytest.approx(2 * 8.145e9, rel=1e-3)
    assert stage["memory_bytes"] < 20e9


def test_a_batch_size_of_ones_own_is_planned_with_its_launches(run_embedder, tmp_path):
    PUBLISHED["CLIP ViT-L/14"].describe(tmp_path)
    command = ["plan", "--model", tmp_path / "model", "--devices", "1xH100", "--set", "compile=false", "--json"]
    seconds = {
        batch_size: run_embedder(*command, "--set", f"batch_size={batch_size}")[1]["stages"][0]["seconds_per_item"]
        for batch_size in ('"auto"', 256, 8)
    }
    assert seconds[256] == seconds['"auto"']
    launches_s = 36 * VitTower.kernels_per_layer * LAUNCH_S
    assert seconds[8] >= launches_s / 8 > 2 * seconds[256]


def test_a_gpu_that_gets_small_blocks_is_planned_at_the_pace_of_rays_driver(run_embedder, tmp_path):
    PUBLISHED["CLIP ViT-L/14"].describe(tmp_path)
    command = ["plan", "--model", tmp_path / "model", "--devices", "1xH100", "--estimate", "--json"]
    plans = {
        number: run_embedder(*command, "--set", f"decode.items_per_task={number}")[1] for number in ('"auto"', 256, 8)
    }
    assert plans[256] == plans['"auto"']
    assert plans[256]["bottleneck"] == "stage 0"
    assert (plans[8]["bottleneck"], len(plans[8]["stages"])) == ("Ray's driver", 1)
    assert plans[8]["items_per_s"] == pytest.approx(1 / (ENGINE_CALL_S * (2 / 8 + 1 / 512)))


def test_captions_of_any_length_are_launched_as_often(run_embedder, tmp_path):
    """A batch of few tokens is bound by its launches, which captions of 8 and of 32 tokens have as many of."""
    PUBLISHED["CLIP ViT-L/14"].describe(tmp_path)
    options = ["--devices", "1xH100", "--images-per-item", 0, "--set", "batch_size=64", "--set", "compile=false"]
    rates = [
        run_embedder("plan", "--model", tmp_path / "model", *options, "--caption-tokens", number, "--json")[1]
        for number in (8, 16, 32)
    ]
    launches_s = 12 * VitTower.kernels_per_layer * LAUNCH_S
    assert [plan["stages"][0]["seconds_per_item"] for plan in rates] == [pytest.approx(launches_s / 64, rel=0.05)] * 3


def test_a_plan_in_json_has_all_that_is_shown(config_only, run_embedder):
    options = [
        "--stages",
        3,
        "--devices",
        "1xT4@0.5, 8xCPU@0.05",
        "--explain",
        "--what-if",
        "--num-items",
        1000,
        "--images-per-item",
        0.5,
    ]
    code, plan, stderr = run_embedder("plan", "--model", config_only, *options, "--json")
    assert code == 0, stderr
    assert plan["mix"] == {"images_per_item": 0.5, "captions_per_item": 1.0, "caption_tokens": 16}
    assert len(plan["stages"]) == 3
    assert plan["items_per_s"] > 0
    assert [reason.split(":")[0] for reason in plan["reasons"]] == ["2 stages", "4 stages"]
    assert [other["num_stages"] for other in plan["alternatives"]] == [2, 4]
    assert plan["num_stages_fixed_by"] == "num_stages"
    assert plan["what_if"]["num_items"] == 1000
    assert plan["what_if"]["cost"] > 0
    assert 0 < plan["equal_parts_items_per_s"] <= plan["items_per_s"] * (1 + 1e-6)


def test_bytes_and_the_size_of_an_item_make_a_number_of_items(config_only, run_embedder):
    options = ["--devices", "1000xT4, 9000xCPU", "--what-if", "--bytes", "200TB", "--item-bytes", "150kB"]
    code, plan, stderr = run_embedder("plan", "--model", config_only, *options, "--json")
    assert code == 0, stderr
    assert plan["what_if"]["num_items"] == 200 * 10**12 // 150_000


def shown_plan(folder, *options):
    ended = run_here("plan", "--model", folder, *options)
    assert ended.code == 0, ended.stderr
    return ended.stdout


def test_the_number_of_stages_is_searched_unless_it_is_fixed(config_only, run_embedder):
    devices = ["--devices", "2xA100:80GB, 4xT4, 64xCPU"]
    command = ["plan", "--model", config_only, *devices, "--json"]
    by_number = [run_embedder(*command, "--stages", number)[1] for number in range(1, 5)]
    rates = [plan["items_per_s"] for plan in by_number]
    code, found, stderr = run_embedder(*command)
    assert code == 0, stderr
    assert found["num_stages_fixed_by"] is None
    number = len(found["stages"])
    assert found["stages"] == by_number[number - 1]["stages"]
    assert max(rates) < 1.02 * rates[number - 1]
    assert all(1.02 * rate < max(rates) for rate in rates[: number - 1]), "a smaller number would have done"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "1 stage, the fewest that no other number up to 8 beats by 2 %: 2 stages would do "),
        (["--stages", "2"], "2 stages, fixed by --stages: 1 stage would do "),
        (["--set", "num_stages=2"], "2 stages, fixed by num_stages: 1 stage would do "),
        (["--stages", "1"], "1 stage, fixed by --stages: 2 stages would do "),
        (["--stages", "8", "--devices", "4xCPU"], "8 stages, fixed by --stages: 7 stages would do "),
    ],
)
def test_the_number_of_stages_is_told_with_what_fixes_it(options, line, config_only):
    lines = shown_plan(config_only, "--devices", "8xCPU", *options).splitlines()
    assert any(each.startswith(line) and each.count("(") <= 2 for each in lines), lines


def test_a_fixed_number_that_costs_much_says_how_to_have_the_best(config_only):
    devices = ["--devices", "3xA100:80GB"]
    assert "without --stages the best number is searched" in shown_plan(config_only, *devices, "--stages", "2")
    assert "is searched" not in shown_plan(config_only, *devices)


def test_a_plan_is_shown_in_numbers_that_people_write(config_only):
    devices = ["--devices", "600xA100@1.80, 10000xCPU@0.04", "--explain", "--what-if", "--num-items", "50000000000"]
    out = shown_plan(config_only, *devices, "--set", "currency=EUR")
    assert not re.search(r"\de[+-]\d|\d%|\(s\)", out), out
    assert "50,000,000,000 items: " in out
    assert re.search(r"; cost [\d,]+ EUR\n", out)
    assert " images and " not in out and "1 image and 1 caption of 16 tokens" in out
    unnamed = shown_plan(config_only, *devices)
    assert re.search(r'; cost [\d,]+ \(currency = "EUR" in the configuration names', unnamed)


def test_a_search_that_finds_no_number_names_the_cap_that_would_do(config_only, run_embedder):
    command = ["plan", "--model", config_only, "--estimate"]
    code, _, stderr = run_embedder(*command, "--weights-cap", "30KiB")
    assert code == 2
    cap = re.search(r"no number of stages up to \d+ of .* give --weights-cap (\S+)$", stderr.strip())[1]
    assert run_embedder(*command, "--weights-cap", cap)[0] == 0


DTYPES = {
    "2xA100:80GB, 64xCPU": ("bfloat16", "A100 computes in it natively"),
    "1xH100, 2xL4": ("bfloat16", "H100 and L4 compute in it natively"),
    "2xA100:80GB, 4xT4:16GB@0.5": ("float16", "T4 doesn't compute in bfloat16 natively"),
    "4xT4, 8xCPU": ("float16", "T4 doesn't compute in bfloat16 natively"),
    "8xCPU": ("float32", "the stages compute on CPUs"),
}


@pytest.mark.parametrize("devices", DTYPES)
def test_a_plan_is_made_for_the_dtype_of_its_devices_and_says_why(devices, config_only, run_embedder):
    dtype, reason = DTYPES[devices]
    code, found, stderr = run_embedder("plan", "--model", config_only, "--devices", devices, "--json")
    assert code == 0, stderr
    assert (found["dtype"], found["dtype_reason"]) == (dtype, reason)
    assert f'dtype {dtype} (dtype = "auto"): {reason}' in shown_plan(config_only, "--devices", devices)
    asked = shown_plan(config_only, "--devices", devices, "--dtype", "float32")
    assert "auto" not in asked and "in float32" in asked


def test_a_plan_for_old_gpus_leaves_the_slow_cores_to_decoding(config_only, run_embedder):
    _, found, _ = run_embedder("plan", "--model", config_only, "--devices", "4xT4, 8xCPU", "--what-if", "--json")
    assert {stage["device"] for stage in found["stages"]} == {"T4"}
    code, _, stderr = run_embedder("plan", "--model", config_only, "--devices", "4xT4, 8xCPU", "--dtype", "float16")
    assert code == 2 and "CPU: it doesn't compute in float16" in stderr


@pytest.mark.parametrize(("has_bf16", "is_faster"), [(True, True), (False, False)])
def test_bfloat16_is_planned_as_fast_as_this_cpu_computes_in_it(
    has_bf16, is_faster, config_only, run_embedder, monkeypatch
):
    monkeypatch.setattr(hardware, "has_bf16", lambda: has_bf16)
    rates = {}
    for dtype in ("auto", "float32", "bfloat16"):
        command = ["plan", "--model", config_only, "--estimate", "--dtype", dtype, "--stages", 2, "--json"]
        _, found, _ = run_embedder(*command)
        rates[dtype] = 1 / max(stage["seconds_per_item"] for stage in found["stages"])
    assert rates["auto"] == rates["float32"]
    assert (rates["bfloat16"] > rates["float32"]) == is_faster


MISTAKES = {
    "devices": (["--devices", "2xB9000"], "is not in the table"),
    "dtype": (["--devices", "1xT4", "--dtype", "bfloat16"], "doesn't compute in bfloat16"),
    "cap": (["--weights-cap", "lots"], "this is no size"),
    "tight cap": (["--stages", "1", "--weights-cap", "30KiB"], "the nearest that can run: --"),
    "stages": (["--stages", "99"], "num_stages = 99: each stage needs a layer"),
    "devices too few": (["--stages", "8", "--devices", "1xT4:0.5MB"], "give more or larger devices"),
    "mix": (["--images-per-item", "-1"], "images_per_item is -1"),
    "empty mix": (["--images-per-item", "0", "--captions-per-item", "0"], "neither images nor captions"),
    "bytes of what": (["--what-if", "--bytes", "1TB"], "--item-bytes"),
    "bytes and items": (["--bytes", "1TB", "--num-items", "3"], "one of the two"),
    "out in no folder": (["--devices", "2xB9000", "--out", "/none/plan.json"], "--out /none/plan.json: there is no"),
    "out is a folder": (["--devices", "8xCPU", "--out", "/"], "--out /: Is a directory"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_plan_that_cannot_be_is_refused_in_one_line(mistake, config_only, run_embedder):
    options, message = MISTAKES[mistake]
    code, _, stderr = run_embedder("plan", "--model", config_only, *options)
    assert code == 2
    assert message in stderr
    assert len(stderr.strip().splitlines()) == 1


def planned(**changes):
    settings = {"weight_bytes": 1, "flops_per_image": 1.0, "flops_per_caption": 1.0}
    settings |= {"cut_bytes_per_image": 1, "cut_bytes_per_caption": 1, "spec": None}
    return PlannedStage(**(settings | changes))


def test_a_plan_fills_in_what_stages_leave_out():
    plan = [
        planned(device="T4", num_replicas=2, num_gpus=1.0),
        planned(device="T4", num_replicas=1, num_gpus=0.5),
        planned(device="CPU", num_replicas=3, num_gpus=0.0, num_threads=2),
    ]
    stages = allocate(load_config().compute, Available(16, num_gpus=3), plan).stages
    assert [(stage.min_replicas, stage.max_replicas, stage.num_gpus) for stage in stages] == [
        (2, 2, 1.0), (1, 1, 0.5), (3, 3, 0.0),
    ]  # fmt: skip
    assert [stage.device for stage in stages] == ["cuda", "cuda", "cpu"]
    assert stages[2].num_threads == 2


def test_what_the_configuration_says_stands_before_the_plan():
    config = load_config(
        overrides={"stage": [{"replicas": {"min": 2, "max": 5}, "num_threads": 4}, {}], "num_stages": 2}
    )
    plan = [planned(device="CPU", num_replicas=3, num_gpus=0.0, num_threads=1)] * 2
    stages = allocate(config.compute, Available(8), plan).stages
    assert [(stage.min_replicas, stage.max_replicas, stage.num_threads) for stage in stages] == [(2, 5, 4), (3, 3, 1)]


def test_a_plan_for_gpus_is_refused_where_there_are_none():
    with pytest.raises(ConfigError, match="2 GPUs and there are 0.*plan for what there is"):
        allocate(load_config().compute, Available(8), [planned(device="T4", num_replicas=2, num_gpus=1.0)])


@pytest.mark.parametrize("num_replicas", [1, 7, 60])
def test_replicas_of_a_plan_never_ask_for_more_cores_than_there_are(num_replicas):
    plan = [planned(device="CPU", num_replicas=num_replicas, num_gpus=0.0, num_threads=1)] * 3
    assert allocate(load_config().compute, Available(2), plan).min_cpus <= 2


def test_a_run_takes_the_dtype_of_its_plan(tiny_model, tmp_path, run_embedder):
    folder, path = samples.folder(tmp_path / "in", num_images=2, num_clips=0), tmp_path / "plan.json"
    run_embedder("plan", "--model", tiny_model, "--stages", 2, "--estimate", "--dtype", "bfloat16", "--out", path)
    options = ["--model", tiny_model, "--store", tmp_path / "s", "--plan", path, "--json"]
    code, _, stderr = run_embedder("embed", folder, *options)
    assert code == 0, stderr
    assert f'dtype bfloat16 (dtype = "auto"): plan {path} is made for it' in stderr
    assert json.loads((tmp_path / "s/store.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("1.5 GiB", 3 << 29), ("500MB", 500_000_000), ("200TB", 2 * 10**14), ("7", 7)]
)
def test_sizes_are_read(text, size):
    assert parse_size("--x", text) == size
