"""`embedder deploy`: files where they were asked for, without anything heavy, and one line for what is wrong."""

import json
import subprocess
import sys

import pytest
from command_runs import run_here
from deployments import CONFIG, IMAGE, THREE_TYPES

HEAVY = {"torch", "timm", "transformers", "ray", "faiss", "PIL", "av"}
CODE = """
import json, sys
from embedder.cli import app
app(sys.argv[1:], standalone_mode=False)
print(json.dumps(sorted(sys.modules)))
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "plan.json").write_text(THREE_TYPES.to_json())
    return tmp_path


def kuberay(files, *more, image=IMAGE):
    plan, out = ("--plan", files / "plan.json"), ("--out", files / "new/manifests")
    return run_here("deploy", "kuberay", str(files / "run.toml"), *map(str, (*plan, *out)), "--image", image, *more)


def test_manifests_are_written_and_left_alone_where_they_are_the_same(files):
    done = kuberay(files, "--json")
    assert done.code == 0, done.stderr
    written = sorted((files / "new/manifests").iterdir())
    assert sorted(done.found["files"]) == [str(path) for path in written]
    assert [path.name for path in written] == sorted(
        ["config.yaml", "raycluster.yaml", "raycronjob.yaml", "rayjob.yaml", "rayservice.yaml"]
    )
    before = [path.stat().st_mtime_ns for path in written]
    assert kuberay(files).code == 0
    assert [path.stat().st_mtime_ns for path in written] == before


def test_the_script_is_written_where_it_was_asked_for(files):
    out = files / "jobs/night.sbatch"
    done = run_here("deploy", "slurm", str(files / "run.toml"), "--plan", str(files / "plan.json"), "--out", str(out))
    assert (done.code, done.stdout.strip()) == (0, str(out))
    assert f"--config {files / 'run.toml'} --plan {files / 'plan.json'}" in out.read_text()


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["kuberay", "slurm"])
def test_nothing_heavy_is_loaded(files, kind):
    arguments = ["deploy", kind, files / "run.toml", "--plan", files / "plan.json", "--out", files / "out"]
    arguments += ["--image", IMAGE] if kind == "kuberay" else []
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
    assert HEAVY & set(json.loads(done.stdout.splitlines()[-1])) == set()


@pytest.mark.parametrize("image", ["", "name with spaces", "-x", "a\nb", "Registry/name"])
def test_an_image_that_is_none_is_refused(files, image):
    done = kuberay(files, image=image)
    assert done.code == 2
    assert "this is no name of an image; write REGISTRY/NAME:TAG" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_is_missing_is_told_in_a_line_and_nothing_is_written(files):
    (files / "plan.json").unlink()
    assert "plan.json: it can't be read" in kuberay(files).stderr
    done = run_here("deploy", "slurm", str(files / "run.toml"), "--out", str(files / "new/x"))
    assert (done.code, done.stderr[:18]) == (2, "embedder: no plan,")
    (files / "run.toml").write_text('model = "a/b"\nstore = "s3://b/s"\n')
    (files / "plan.json").write_text(THREE_TYPES.to_json())
    assert "no [[source]]" in kuberay(files).stderr
    assert not (files / "new").exists()


def test_a_folder_that_cannot_be_made_is_named(files):
    (files / "new").write_text("a file")
    done = kuberay(files)
    assert done.code == 2
    assert "it can't be written" in done.stderr
