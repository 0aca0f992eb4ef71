"""Two training workers on Ray: the weights of one, the same each time, resumed exactly; and what ends a run."""

import json
import os
import signal
from types import SimpleNamespace

import psutil
import pytest
import train_samples
from safetensors.torch import load_file
from torch.testing import assert_close
from train_samples import calling, metrics, training, weights

from embedder.errors import ConfigError, RunFailedError
from embedder.placement.fleet import Available
from embedder.plugins.train.train_run import train
from embedder.plugins.train.train_worker import WorkerResources, allocate_workers
from shards.model_errors import ModelError

pytestmark = pytest.mark.timeout(600)  # each run starts five processes, and they share what is left of two cores
TOGETHER = {"engine": "auto", "num_workers": 2, "decode": {"num_cpus": 0.5}, "no_progress_timeout_s": 150}
AUGMENTED = {"augmentation": {"rotate_deg": 10.0, "brightness": 0.2}, "num_steps": 8}


@pytest.fixture
def source(tmp_path):
    """60 pairs; one is broken, one lacks its caption."""
    rows = train_samples.rows_of(range(60))
    rows[7]["photo"] = b"\x89PNG\r\n\x1a\n broken"
    rows[8]["title"] = None
    return train_samples.table(tmp_path / "pairs.parquet", rows=rows)


def options(tiny_model, **changes):
    return {"model": str(tiny_model), "train": AUGMENTED, "max_reject_fraction": 0.1} | changes


def assert_about_equal(folder, other):
    """But for what no output depends on: Adam scales up the rounding that is a key bias's whole gradient."""
    found, expected = (load_file(each / "model.safetensors") for each in (folder, other))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.endswith("attention.key.bias"):
            continue
        of_both = [tensor, found[name]]
        if name.endswith("attn.qkv.bias"):
            of_both = [each[i * len(each) // 3 :][: len(each) // 3] for i in (0, 2) for each in of_both]
        for one, two in zip(of_both[::2], of_both[1::2], strict=True):
            assert_close(one, two, atol=3e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
def test_two_workers_train_the_weights_of_one_and_go_on_exactly(source, tiny_model, tmp_path, ray_cluster):
    alone = train(training(source, tmp_path / "alone" / "run", **options(tiny_model)))
    config = training(source, tmp_path / "whole" / "run", **options(tiny_model), **TOGETHER)
    report = train(config)
    assert (report.engine, report.num_workers, report.device) == ("ray", 2, "2 x cpu")
    assert (report.num_rejected, report.num_unpaired, report.num_steps) == (1, 1, 8)
    assert (report.num_rejected, report.num_unpaired) == (alone.num_rejected, alone.num_unpaired)
    whole = tmp_path / "whole" / "run"
    assert_about_equal(whole / "last", tmp_path / "alone" / "run" / "last")
    lines, expected = metrics(whole), metrics(tmp_path / "alone" / "run")
    assert [line["kind"] for line in lines] == [line["kind"] for line in expected]
    for name in ("step", "loss", "grad_norm", "r_at_10", "num_images", "num_captions"):
        values = [[line[name] for line in each if name in line] for each in (lines, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-3), name

    stopped = training(source, tmp_path / "stopped" / "run", **options(tiny_model), **TOGETHER)
    with pytest.raises(RunFailedError, match=r"after step 4 of 8.*--resume"):
        train(stopped, show_steps=calling(lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 4 else None))
    assert (tmp_path / "stopped" / "run" / "last" / "config.json").is_file()
    train(stopped, resume=True)
    out = tmp_path / "stopped" / "run"
    assert [weights(out / folder) for folder in ("model", "last")] == [
        weights(whole / folder) for folder in ("model", "last")
    ]
    assert metrics(out) == metrics(whole)


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run_in_a_line_and_one_worker_goes_on(source, tiny_model, tmp_path, ray_cluster):
    out = tmp_path / "out"
    config = training(source, out, **options(tiny_model, checkpoint_every_s=1e-9), **TOGETHER)

    def kill_one(step):
        if step == 4:
            # `info` is None of a process that ends just now.
            processes = psutil.process_iter(["cmdline"])
            workers = [each for each in processes if "ray::TrainWorker" in " ".join(each.info["cmdline"] or ())]
            mine = [each for each in workers if psutil.Process() in each.parents()]
            assert len(mine) == 2
            mine[1].kill()

    with pytest.raises(RunFailedError, match="one of 2 training workers died after step 4 .*--resume continues"):
        train(config, show_steps=calling(kill_one))
    report = train(config.model_copy(update={"num_workers": 1, "engine": "local"}), resume=True)
    assert (report.num_workers, report.num_steps) == (1, 8)
    steps = [line["step"] for line in metrics(out) if line["kind"] == "train"]
    assert steps == list(range(1, 9))
    assert json.loads((out / "report.json").read_text())["num_rejected"] == 1


def test_an_error_in_a_worker_comes_out_as_it_is_and_a_death_as_one_line(ray_cluster):
    from embedder.plugins.train.worker_group import WorkerGroup

    class Worker:  # stands for `TrainWorker`, whose imports take seconds
        def measure(self):
            raise ModelError("step 4: the loss is nan; lower learning_rate")

        def state(self):
            os._exit(1)

    prepared = SimpleNamespace(
        trainer=SimpleNamespace(num_steps_done=3), config=SimpleNamespace(no_progress_timeout_s=60)
    )
    worker = ray_cluster.remote(Worker).options(num_cpus=0.5, max_restarts=0).remote()
    group = WorkerGroup([worker], prepared, WorkerResources(1, 0.5, 0.0, 1, 0.5))
    with pytest.raises(ModelError, match=r"^step 4: the loss is nan; lower learning_rate$"):
        group.measure()
    with pytest.raises(RunFailedError, match="^the training worker died after step 3 .*--resume continues"):
        group.state_dict()


def allocated(available, **changes):
    return allocate_workers(training("in", "out", model="m", **{"num_threads": None} | changes), available)


def test_workers_leave_a_cpu_to_decode_with_however_small_the_machine():
    on = {"engine": "ray", "num_workers": 2}
    assert allocated(Available(2.0), **on) == WorkerResources(2, 0.5, 0.0, 1, 1.0)
    assert allocated(Available(1.0), **on) == WorkerResources(2, 0.25, 0.0, 1, 0.5)
    assert allocated(Available(16.0), **on) == WorkerResources(2, 7.0, 0.0, 7, 1.0)
    assert allocated(Available(16.0, 2.0), **on, device="auto").num_gpus == 1.0
    for available in (Available(2.0), Available(1.0), Available(16.0)):
        found = allocated(available, **on)
        assert found.num_workers * found.num_cpus + found.decode_cpus <= available.num_cpus


def test_what_could_only_wait_for_ever_is_refused_before_anything_starts(tiny_model, tmp_path):
    on = {"engine": "ray", "num_workers": 2}
    with pytest.raises(ConfigError, match=r"there are 1; lower num_workers, or write device = \"cpu\""):
        allocated(Available(8.0, 1.0), **on, device="cuda")
    with pytest.raises(ConfigError, match=r"wait for ever; lower decode.num_cpus"):
        allocated(Available(2.0), **on, decode={"num_cpus": 2.0})
    with pytest.raises(ConfigError, match="several workers need Ray"):
        allocated(Available(2.0), engine="local", num_workers=2)
    with pytest.raises(ConfigError, match="batch_size = 15 has no equal shares"):
        allocated(Available(2.0), **on, batch_size=15)
    with pytest.raises(ConfigError, match="write num_workers = 1"):
        allocated(Available(2.0), **on, train={"what": "projections"})
    few = train_samples.table(tmp_path / "few.parquet", 12)
    with pytest.raises(ConfigError, match=r"items to train on fill no batch of 16"):
        train(training(few, tmp_path / "out", model=str(tiny_model), **on))
