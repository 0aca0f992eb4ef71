"""The benchmark of a GPU, on the CPU: what it prints, and its arithmetic; no clock is judged."""

import json
from dataclasses import replace
from itertools import count

import pyarrow as pa
import pytest
import torch
from gpu_simulation import SimulatedStage
from gpu_yardsticks import Library, idle_shares, loop_rate
from tower_families import beside_default

from embedder.batch_schema import TRACE
from shards.tokenizer import check_tokenizer, parse_tokenizer
from shards.towers.vit import VitTower


@pytest.fixture
def bench_gpu(monkeypatch):
    import bench_gpu

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return bench_gpu


def test_a_stage_is_idle_when_none_computes(bench_gpu):
    # Both have computed two batches at 4; the first runs dry at 10. In between: 4 to 6, 5 to 7, 9 to 10.
    first = [(0.0, 1.0, 8), (1.0, 1.0, 8), (4.0, 2.0, 8), (9.0, 1.0, 8)]
    second = [(2.0, 1.0, 8), (3.0, 1.0, 8), (5.0, 2.0, 8), (9.5, 2.0, 8)]
    calls = {"stage 0": first[::-1], "stage 1": second}
    assert bench_gpu.common_window(calls) == (4.0, 10.0)
    rate, idle = bench_gpu.rate_and_idle(calls, (4.0, 10.0))
    assert rate == pytest.approx(8 / 6)
    assert idle == pytest.approx(2 / 6)


def test_stages_that_never_computed_at_the_same_time_have_no_common_window(bench_gpu):
    first = [(0.0, 1.0, 8), (1.0, 1.0, 8)]
    second = [(2.0, 1.0, 8), (3.0, 1.0, 8)]
    assert bench_gpu.common_window({"stage 0": first, "stage 1": second}) is None
    assert bench_gpu.common_window({"stage 0": first[:1]}) is bench_gpu.common_window({}) is None


def test_blocks_are_taken_until_all_stages_have_computed_for_the_time_asked_for(bench_gpu):
    taken = []

    def block(number):
        taken.append(number)
        steps = [{"step": "decode", "started_s": 0.0, "wall_s": 9.0, "num_rows": 8}]
        for stage in range(3):
            steps.append(steps[0] | {"step": f"stage {stage}", "started_s": number + stage / 3, "wall_s": 1 / 3})
        return pa.table({"trace": pa.array([steps, None], TRACE)})

    calls = bench_gpu.calls_until(map(block, count()), 5.0)
    assert set(calls) == {"stage 0", "stage 1", "stage 2"}
    start_s, stop_s = bench_gpu.common_window(calls)
    assert (start_s, len(taken)) == (pytest.approx(2.0), 8) and 5.0 <= stop_s - start_s < 6.0
    assert len(bench_gpu.calls_until(map(block, range(3)), 5.0)["stage 2"]) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_well(bench_gpu, capsys):
    bench_gpu.main([])
    words, found = capsys.readouterr().out.splitlines()
    assert words.startswith("unmeasured: no GPU (")
    assert json.loads(found) == {"unmeasured": "no GPU"}


@pytest.mark.medium
def test_a_simulation_takes_the_time_asked_for_with_the_blocks_that_it_does_not_count(bench_gpu, capsys, monkeypatch):
    calls, simulate_stages = [], bench_gpu.simulate_stages
    call = SimulatedStage.__call__
    monkeypatch.setattr(SimulatedStage, "__call__", lambda stage, table: calls.append(stage) or call(stage, table))
    asked = []

    def watched(*args, slowness):
        calls.clear()
        found = simulate_stages(*args, slowness=slowness)
        asked.append((args[3], slowness, len(calls) / args[3]))
        return found

    monkeypatch.setattr(bench_gpu, "simulate_stages", watched)
    monkeypatch.setattr(bench_gpu, "MIN_BLOCK_S", 0.0)
    monkeypatch.setitem(bench_gpu.MODELS, "vit-b-32", lambda: beside_default(VitTower))
    sizes = ["--model", "vit-b-32", "--batch-size", "8", "--stages", "1,3", "--seconds", "1"]
    bench_gpu.main(["--simulated", "H100", *sizes])
    block_s = 8 / json.loads(capsys.readouterr().out.splitlines()[-1])["limit_rows_per_s"]
    assert [num_stages for num_stages, *_ in asked] == [1, 3]
    for _, slowness, num_blocks in asked:
        assert 0.5 < num_blocks * block_s * slowness < 1.5


@pytest.mark.slow
def test_on_a_simulated_gpu_stages_reach_what_forward_passes_alone_do(bench_gpu, capsys):
    sizes = ["--model", "vit-b-32", "--batch-size", "1024", "--seconds", "12"]
    bench_gpu.main(["--simulated", "H100", *sizes])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    limit, stages = found["limit_rows_per_s"], found["stages"]
    assert set(stages) == {"1", "2", "3"}
    for stage in stages.values():
        assert 0.95 * limit <= stage["rows_per_s"] <= 1.1 * limit
        assert set(stage["idle"]) == {"input", "copies", "launches"} and min(stage["idle"].values()) >= 0
        assert sum(stage["idle"].values()) < 1
    assert sum(stages["1"]["idle"].values()) <= 0.05 + 1e-9
    for stage in stages.values():
        assert stage["predicted_rows_per_s"] == pytest.approx(stage["rows_per_s"], rel=0.2)


@pytest.mark.medium
def test_one_call_at_a_time_leaves_the_simulated_device_waiting_for_its_input(bench_gpu, tmp_path):
    config = bench_gpu.MODELS["vit-b-32"]()
    folder = bench_gpu.write_config(config, tmp_path)
    found = [
        bench_gpu.simulate_stages(config, folder, bench_gpu.H100, 1, 256, 4, slowness=10, calls_at_once=number)
        for number in (1, 3)
    ]
    (slow, waits), (fast, fewer) = found
    assert slow < 0.9 * fast
    assert waits["input"] + waits["copies"] > fewer["input"] + fewer["copies"]


@pytest.mark.parametrize("name", ["vit-b-32", "vit-l-14", "so400m-384"])
def test_published_models_take_the_tokeniser_that_they_are_measured_with(bench_gpu, name):
    config, tokenizer_json = bench_gpu.with_tokenizer(bench_gpu.MODELS[name]())
    check_tokenizer(parse_tokenizer(tokenizer_json, name), config.required_text, name)


@pytest.mark.slow
def test_the_same_code_runs_on_the_cpu(bench_gpu, capsys, monkeypatch, ray_cluster):
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = tower | {"vocab_size": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}
    vision = tower | {"patch_size": 32, "image_size": 64}
    tiny = {"model_type": "clip", "projection_dim": 32, "vision_config": vision, "text_config": text}
    title = bench_gpu.TITLES["vit-b-32"]
    monkeypatch.setitem(bench_gpu.PUBLISHED, title, replace(bench_gpu.PUBLISHED[title], config=tiny))
    sizes = ["--stages", "1,2", "--seconds", "0.5", "--num-files", "96"]
    bench_gpu.main(["--device", "cpu", "--model", "vit-b-32", *sizes])
    *_, heading, one, two, last = capsys.readouterr().out.splitlines()
    assert heading.split() == ["stages", "rows/s", "of", "unsplit", "idle", "memory"]
    assert [one.split()[0], two.split()[0]] == ["1", "2"]
    found = json.loads(last)
    assert found["device"] == "cpu"
    assert [run["num_stages"] for run in found["runs"]] == [1, 2]
    for run in found["runs"]:
        assert run["rows_per_s"] > 0
        assert run["of_unsplit"] == pytest.approx(run["rows_per_s"] / found["unsplit_rows_per_s"])
        assert 0 <= run["idle_share"] <= 1
        assert run["memory_share"] is None
    library = found["library"]
    assert library["eager"] == {"64": pytest.approx(library["eager"]["64"])} and library["eager"]["64"] > 0
    assert library["compiled"] > 0 or library["not_compiled"]
    assert found["loop"]["rows_per_s"] > 0 and found["loop"]["first_s"] < found["loop"]["whole_s"]
    assert set(found["from_files"]) == {"1", "2"}
    for run in found["from_files"].values():
        assert run["rows_per_s"] > run["whole_rows_per_s"] > 0
        assert (run["gpu_busy"], run["watts"], run["idle"]) == (None, None, None)


def test_a_loop_by_hand_ends_after_the_time_asked_for_and_counts_what_it_did():
    encoded = []
    library = Library(None, "float32", "cpu")
    pairs = [(torch.zeros(3, 2, 2, dtype=torch.uint8), torch.tensor([number])) for number in range(7)]

    def encode(self, pixels, token_ids):
        encoded.extend(token_ids.flatten().tolist())
        return pixels.flatten(1), token_ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Library, "encode", encode)
        short, whole = (loop_rate(library, pairs, 2, 0, seconds) for seconds in (0.0, 1000.0))
    assert encoded == [*range(4), *range(7)]
    assert (short["num_rows"], whole["num_rows"]) == (4, 7)
    for loop, later in ((short, 2), (whole, 5)):
        assert loop["rows_per_s"] == pytest.approx(later / (loop["whole_s"] - loop["first_s"]))


def test_idle_time_of_a_run_is_shared_out_by_cause():
    nothing = {f"waited_{cause}_s": 0.0 for cause in ("input", "driver", "store", "unpack", "copy", "launch")}
    steps = [
        nothing | {"step": "decode", "wall_s": 9.0},
        nothing | {"step": "stage 0", "wall_s": 6.0, "waited_input_s": 3.0, "waited_copy_s": 1.0},
        nothing | {"step": "stage 1", "wall_s": 2.0, "waited_driver_s": 1.0, "waited_launch_s": 1.0},
    ]
    found = {"input": 0.15, "driver": 0.125, "store": 0.0, "unpack": 0.0, "copy": 0.05, "launch": 0.125}
    assert idle_shares(steps) == pytest.approx(found)
    assert idle_shares(steps[:1]) is None


def test_a_model_that_is_not_simulated_is_refused_with_those_that_are(bench_gpu, capsys):
    with pytest.raises(SystemExit):
        bench_gpu.main(["--simulated", "H100", "--model", "vit-g"])
    assert "--model vit-g: simulated are so400m-384, vit-b-32, vit-l-14" in capsys.readouterr().err
