"""The benchmark of a GPU, on the CPU: what it prints, and its arithmetic; no clock is judged."""

import json

import pytest
import torch


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_well(bench_gpu, capsys):
    bench_gpu.main([])
    words, found = capsys.readouterr().out.splitlines()
    assert words.startswith("unmeasured: no GPU (")
    assert json.loads(found) == {"unmeasured": "no GPU"}


@pytest.mark.slow
def test_on_a_simulated_gpu_stages_reach_what_forward_passes_alone_do(bench_gpu, capsys):
    sizes = ["--model", "vit-b-32", "--batch-size", "1024", "--stages", "1,3", "--seconds", "5"]
    bench_gpu.main(["--simulated", "H100", *sizes])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    limit, stages = found["limit_rows_per_s"], found["stages"]
    assert stages["1"]["rows_per_s"] >= 0.95 * limit
    assert stages["3"]["rows_per_s"] >= 0.8 * stages["1"]["rows_per_s"]
    for stage in stages.values():
        assert set(stage["idle"]) == {"input", "copies", "launches"} and min(stage["idle"].values()) >= 0
        assert sum(stage["idle"].values()) < 1
    assert sum(stages["1"]["idle"].values()) <= 0.05 + 1e-9
    for stage in stages.values():
        assert stage["predicted_rows_per_s"] == pytest.approx(stage["rows_per_s"], rel=0.2)


def test_one_call_at_a_time_leaves_the_simulated_device_waiting_for_its_input(bench_gpu, tmp_path):
    config = bench_gpu.MODELS["vit-b-32"]()
    folder = bench_gpu.write_config(config, tmp_path)
    found = [
        bench_gpu.simulate_stages(
            config, folder, bench_gpu.H100, 1, num_rows=256, num_blocks=4, slowness=10, calls_at_once=number
        )
        for number in (1, 3)
    ]
    (slow, waits), (fast, fewer) = found
    assert slow < 0.9 * fast
    assert waits["input"] + waits["copies"] > fewer["input"] + fewer["copies"]


@pytest.mark.slow
def test_the_same_code_runs_on_the_cpu(bench_gpu, capsys, tmp_path, ray_cluster):
    from tiny_models import tiny_config

    from corpus import DEMO_MODEL
    from shards.fresh import init_model

    tokenizer_json = (DEMO_MODEL / "tokenizer.json").read_text()
    config = tiny_config()
    config = config.model_copy(update={"text": config.text.model_copy(update={"vocab_size": 4096})})
    folder = init_model(config, tmp_path / "tiny", seed=0, tokenizer_json=tokenizer_json)
    bench_gpu.main(["--device", "cpu", "--model", str(folder), "--stages", "1,2", "--seconds", "0.5"])
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


def test_a_model_that_is_not_simulated_is_refused_with_those_that_are(bench_gpu, capsys):
    with pytest.raises(SystemExit):
        bench_gpu.main(["--simulated", "H100", "--model", "vit-g"])
    assert "--model vit-g: simulated are so400m-384, vit-b-32, vit-l-14" in capsys.readouterr().err
