"""Script for sbatch: it asks for what the plan has, and under a real Slurm a requeued run ends in the same rows."""

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import samples
import slurm_cluster
import typer
from deployments import CONFIG, GOLDEN, plan_of, slurm_text, stage
from embedding_runs import assert_same, embedded

import embedder
from embedder.cli import app
from embedder.config import load_config
from embedder.errors import ConfigError
from embedder.plugins.deploy.shipped_config import read_files
from embedder.plugins.deploy.slurm import slurm_script, time_text

ROOT = Path(embedder.__file__).parents[1]
NUM_IMAGES = 1_000  # so many that some are not begun when the first batches are done
RUN = """\
model = "{model}"
store = "store"
rows_per_part = 8
stop_timeout_s = 1

[[source]]
path = "in"

[decode]
items_per_task = 8

[deploy]
start_timeout_s = 120

[[deploy.group]]
device = "CPU"
replicas = 2
cpus = 1
memory_bytes = 3221225472
shm_bytes = 268435456

[deploy.slurm]
setup = ['export PATH={bin}:$PATH PYTHONPATH={root} OMP_NUM_THREADS=1']
"""


def options(text):
    """Options for sbatch, by group."""
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    parts = "\n".join(lines).split("#SBATCH hetjob\n")
    return [dict(each.removeprefix("#SBATCH --").partition("=")[::2] for each in part.splitlines()) for part in parts]


def test_the_script_is_the_golden_one_and_bash_reads_it(tmp_path):
    text = slurm_text(tmp_path)
    assert text == (GOLDEN / "embedder.sbatch").read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_groups_of_the_allocation_have_the_devices_of_the_plan(tmp_path):
    found = options(slurm_text(tmp_path))
    assert [(each["nodes"], each.get("gres"), each["cpus-per-task"], each.get("partition")) for each in found] == [
        ("2", "gpu:l4:1", "8", None),
        ("2", "gpu:a100:1", "8", "large"),
        ("2", None, "4", None),
    ]
    assert found[0]["signal"] == "B:TERM@70"


def test_the_command_line_parses_with_the_real_command(tmp_path):
    (line,) = (line for line in slurm_text(tmp_path).splitlines() if line.strip().startswith("embedder "))
    words = shlex.split(line.rstrip("& "))
    context = typer.main.get_command(app).commands[words[1]].make_context(words[1], words[2:])
    assert str(context.params["config"]) == "/shared/run.toml"
    assert context.params["settings"] == ["cluster.max_cpus=56", "cluster.max_gpus=6", "cluster.wait_s=1800"]


def test_a_single_group_is_no_heterogeneous_job(tmp_path):
    config = CONFIG[: CONFIG.index("[[deploy.group]]")]
    text = slurm_text(tmp_path, config, plan_of(stage(threads=2)))
    assert "het" not in text
    assert len(options(text)) == 1


def test_what_the_user_writes_stays_one_word(tmp_path):
    slurm = '[deploy.slurm]\naccount = "a b; rm -rf /"\nsetup = ["module load python/3.11"]\n'
    text = slurm_text(tmp_path, CONFIG + slurm)
    assert "#SBATCH '--account=a b; rm -rf /'\n" in text
    assert "\nmodule load python/3.11\n" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('scratch = "/tmp/a b"', "scratch = '/tmp/a b': write a path of plain letters"),
        ('scratch = "/tmp/$(id)"', "write a path of plain letters"),
        ('account = "a\\nb"', "one line of text"),
        ("time_limit_s = 60", "time_limit_s = 60: the run's end may take 70 s"),
    ],
)
def test_what_slurm_could_not_run_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        slurm_text(tmp_path, f"{CONFIG}[deploy.slurm]\n{text}\n")


def test_the_setup_may_read_variables_that_nobody_has_set(tmp_path):
    setup = '[deploy.slurm]\nsetup = ["export SEEN=/opt/lib:$NOBODY_HAS_SET_THIS", "echo $SEEN; exit 7"]\n'
    script = slurm_text(tmp_path, CONFIG + setup)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "/opt/lib:\n"), done.stderr


def test_a_plan_of_the_first_model_is_one_that_the_command_takes(tmp_path):
    model = f'[[model]]\nuri = "s3://team/models/products"\nplan = "{tmp_path}/plan.json"\n'
    text = slurm_text(tmp_path, CONFIG.partition("\n")[2] + model).replace("/shared", str(tmp_path))
    (line,) = (line for line in text.splitlines() if line.strip().startswith("embedder "))
    plan = re.search(r"--plan (\S+)", line)[1]
    assert load_config(tmp_path / "run.toml", {"plan": plan}).plan == plan


def test_types_of_gpus_need_their_names_in_slurm(tmp_path):
    with pytest.raises(ConfigError, match="L4: the plan has 2 types of GPUs, and without gres"):
        slurm_text(tmp_path, CONFIG.replace('gres = "l4"\n', ""))


def test_a_signal_that_comes_before_the_commands_number_is_known_stops_it_all_the_same(tmp_path):
    """Slurm sends no second one: the command would continue until it is killed, and the job would not be requeued."""
    programs = {"hostname": "echo 127.0.0.1", "srun": "exit", "sleep": "exit", "embedder": "exec /bin/sleep 20"}
    (tmp_path / "bin").mkdir()
    for name, text in (programs | {"scontrol": 'echo "scontrol $*"'}).items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "signal.sh").write_text("""trap '[[ $BASH_COMMAND != "run=\\$!" ]] || kill -TERM $$' DEBUG\n""")
    environment = {"BASH_ENV": str(tmp_path / "signal.sh"), "SLURM_JOB_ID": "7"}
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch, socket.socket(socket.AF_UNIX) as raylet:
        sockets = Path(scratch, "ray-7-0/session_latest/sockets")
        sockets.mkdir(parents=True)
        raylet.bind(str(sockets / "raylet"))
        text = slurm_text(tmp_path, f'{CONFIG}[deploy.slurm]\nscratch = "{scratch}"\n')
        began_s = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", text],
            env=environment | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert time.monotonic() - began_s < 15, done
    assert (done.returncode, done.stdout.splitlines()[-1]) == (143, "scontrol requeue 7"), done


def test_times_are_written_as_slurm_reads_them():
    assert [time_text(each) for each in (60, 3_661, 90_000)] == ["0-00:01:00", "0-01:01:01", "1-01:00:00"]


@pytest.fixture
def job(tmp_path):
    """A folder with images, a configuration, a plan of two cores and its script."""
    for number in range(NUM_IMAGES):
        path = tmp_path / "in" / f"{number:03}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(samples.image_bytes(number))
    text = RUN.format(model=ROOT / "embedder/demo_model", bin=Path(sys.executable).parent, root=ROOT)
    (tmp_path / "run.toml").write_text(text)
    plan = [sys.executable, "-m", "embedder", "plan", "--model", ROOT / "embedder/demo_model", "--devices", "2xCPU"]
    plan += ["--estimate", "--stages", "2", "--out", tmp_path / "plan.json"]
    subprocess.run(plan, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    script = tmp_path / "embedder.sbatch"
    script.write_text(slurm_script(read_files(tmp_path / "run.toml", tmp_path / "plan.json"), script.name))
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(slurm_cluster.MISSING is not None, reason=f"no {slurm_cluster.MISSING}: apt-get install slurm-wlm")
@pytest.mark.usefixtures("starts_ray")
def test_a_run_that_is_requeued_on_two_nodes_ends_in_the_rows_of_an_undisturbed_one(job):
    with slurm_cluster.slurm(job / "slurm") as cluster:
        number = cluster.submit(job / "embedder.sbatch")
        log = job / "slurm" / f"embedder-{number}.log"
        is_over = lambda: cluster.show(number)["JobState"] in ("FAILED", "COMPLETED")  # noqa: E731
        assert cluster.wait(number, {"RUNNING"}, 60)["Restarts"] == "0"
        wait_for(lambda: list(job.glob("store/runs/*/journal/*.json")) or is_over(), 400, log)
        journal = list(job.glob("store/runs/*/journal/*.json"))
        assert journal, log.read_text()
        assert not is_over(), log.read_text()
        run_id = journal[0].parts[-3]
        cluster.run("scancel", "--batch", "--signal=TERM", number)
        stopped = cluster.wait(number, {"PENDING"}, 180)
        assert stopped["Restarts"] == "1", log.read_text()
        num_finished = len(list((job / "store/runs" / run_id / "journal").glob("*.json")))
        assert not (job / "store/CURRENT.json").exists()
        assert 0 < num_finished < NUM_IMAGES / 8
        cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now")  # Slurm would wait two minutes
        cluster.wait(number, {"RUNNING"}, 60)
        assert cluster.wait(number, {"COMPLETED", "FAILED", "CANCELLED"}, 600)["JobState"] == "COMPLETED", (
            log.read_text()
        )
        text = log.read_text()
        assert "put back into the queue" in text
        wait_for(lambda: not list(Path("/tmp").glob(f"ray-{number}-*")), 30, log)
    assert [each.name for each in (job / "store/runs").iterdir()] == [run_id]
    rows = embedder.open_store(str(job / "store")).to_arrow().to_pylist()
    _, expected = embedded(load_config(job / "run.toml", {"store": str(job / "local"), "engine": "local"}))
    found = {(row["item_id"], row["segment"]): row for row in rows}
    assert len(rows) == len(found) == NUM_IMAGES
    assert_same(found, expected)


def wait_for(look, within_s, log):
    """Wait until something is there, and return it."""
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.2)
    return found
