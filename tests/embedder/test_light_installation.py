"""The light installation: what it does without the packages of any extra, and the line it refuses the rest with."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import samples
from light_runs import commands_light, run_light

from embedder.config import load_config
from embedder.ingest.embed import embed
from embedder.installation import EXTRAS, InstallationError, describe, explain_missing, missing
from embedder.retrieval.store_api import open_store

ROOT = Path(__file__).parents[2]
LACKS = "which this installation lacks; pip install 'embedder[embed]'"
NAMES = [
    *["embed", "refresh", "search", "serve", "plan", "evaluate", "train", "demo", "verify", "history", "report"],
    *["rejects", "doctor", "rollback", "vacuum", "compact", "purge", "migrate"],
    *(f"index {name}" for name in ("build", "update", "status", "rollback")),
    *(f"model {name}" for name in ("import", "info", "apply-delta")),
]
READ = """
import json, sys
import numpy as np
import embedder
from embedder.installation import EXTRAS

store = embedder.open_store(sys.argv[1])
vector = np.array(store.to_arrow(["image_embedding"])["image_embedding"][0].as_py(), np.float32)
found = {
    "items": store.items().num_rows,
    "vector": store.search(vector, k=3)[0].item_id,
    "text": [hit.item_id for hit in store.search("a red square", k=3)],
    "image": store.search(image=sys.argv[2], k=1)[0].item_id,
    "hybrid": [hit.item_id for hit in store.search("red square", hybrid=True, where="modality = 'image'")],
    "pixels": store.search(vector, k=1)[0].image(32).size,
}
try:
    embedder.train
except Exception as error:
    found["train"] = [type(error).__name__, str(error)]
hidden = {package for packages in EXTRAS.values() for package in packages}
print(json.dumps(found | {"loaded": sorted(hidden & sys.modules.keys())}))
"""


@pytest.fixture(scope="module")
def _module_run(tmp_path_factory, tiny_model):
    root = tmp_path_factory.mktemp("light")
    source = samples.folder(root / "images", num_images=4)
    settings = {"model": str(tiny_model), "store": str(root / "store"), "engine": "local"}
    config = load_config(overrides=settings | {"source": [{"path": str(source)}]})
    embed(config)
    return config


@pytest.fixture(scope="module")
def store(_module_run):
    """A published store with its query towers."""
    return _module_run.store


@pytest.fixture(scope="module")
def images(_module_run):
    return _module_run.source[0].path


@pytest.mark.medium
def test_a_store_is_read_and_searched(store):
    here = open_store(store)
    image = here.items()["uri"][0].as_py()
    found = json.loads(run_light("-c", READ, store, image))
    assert found["items"] == 4
    assert found["vector"] == here.to_arrow()["item_id"][0].as_py()
    assert found["text"] == [hit.item_id for hit in here.search("a red square", k=3)]
    assert found["image"] == here.search(image=image, k=1)[0].item_id
    hybrid = here.search("red square", hybrid=True, where="modality = 'image'")
    assert found["hybrid"] == [hit.item_id for hit in hybrid]
    assert found["pixels"] == [32, 32]
    assert found["train"][0] == "InstallationError"
    assert found["train"][1].startswith("embedder.train: needs torch, ")
    assert found["loaded"] == []


@pytest.mark.medium
def test_commands_work_that_write_to_no_table(store, tiny_model, tmp_path):
    helps = [[*command.split(), "--help"] for command in ("", *NAMES)]
    plan = ["plan", "--model", tiny_model, "--json"]
    works = [
        ["search", "a red square", "--store", store, "--sheet", tmp_path / "hits.png", "--json"],
        [*plan, "--estimate"],
        [*plan, "--devices", "2xT4", "--what-if", "--explain"],
        ["history", "--store", store, "--json"],
        ["rejects", "--store", store, "--json"],
        ["report", "--store", store, "--json"],
        ["model", "info", tiny_model, "--json"],
        ["index", "build", "--store", store, "--json"],
        ["index", "status", "--store", store, "--json"],
        ["vacuum", "--dry-run", "--store", store, "--json"],
        ["doctor", "--json"],
    ]
    ended = commands_light(*helps, *works)
    assert [(each.code, each.stderr) for each in ended if each.code] == []
    search, *_, doctor = (each.found for each in ended[len(helps) :])
    assert len(search["hits"]) == 4
    assert (tmp_path / "hits.png").read_bytes().startswith(b"\x89PNG")
    assert doctor["installation"].startswith("light")
    assert doctor["gpus"].endswith("torch is missing")


@pytest.mark.medium
def test_other_commands_are_refused_in_one_line_before_they_begin(store, images, tiny_model, tmp_path):
    new, config = tmp_path / "new", tmp_path / "nightly.toml"
    config.write_text(f'model = "{tiny_model}"\nstore = "{new}"\n[[source]]\npath = "{images}"\n')
    refused = {
        "embedder embed": ["embed", images, "--model", tiny_model, "--store", new],
        "embedder refresh": ["refresh", config],
        "embedder demo": ["demo", "--out", new],
        "embedder plan without --estimate": ["plan", "--model", tiny_model],
        "embedder plan --cluster": ["plan", "--cluster", "--model", tiny_model],
        "embedder evaluate": ["evaluate", "--store", store],
        "embedder verify": ["verify", "--set", f"model={tiny_model}"],
        "embedder compact": ["compact", "--store", store],
        "embedder rollback": ["rollback", "--store", store],
        "embedder purge": ["purge", "nothing", "--yes", "--store", store],
        "embedder model": ["model", "apply-delta", tiny_model, tmp_path, "--out", new],
    }
    ended = commands_light(*refused.values())
    for where, each in zip(refused, ended, strict=True):
        assert each.code == 2, (where, each)
        line = each.stderr.splitlines()[-1]
        assert line.startswith(f"embedder: {where}"), line
        assert LACKS in line
        assert "Traceback" not in each.stderr
    assert not new.exists()


def test_a_whole_installation_lacks_nothing_and_other_errors_stay_as_they_are():
    assert missing("embed") == missing("serve") == ()
    assert describe().startswith("embedder[embed,serve")
    other = ModuleNotFoundError("No module named 'nothing'", name="nothing")
    assert explain_missing(other, "here") is other
    refusal = explain_missing(ModuleNotFoundError("No module named 'ray.data'", name="ray.data"), "here")
    assert isinstance(refusal, InstallationError)
    assert str(refusal) == "here: needs ray, which this installation lacks; pip install 'embedder[embed]'"


def test_extras_of_the_refusals_are_those_of_the_project():
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert EXTRAS.keys() <= project["optional-dependencies"].keys()
    named = {"fonttools": "fontTools", "prometheus-client": "prometheus_client", "python-multipart": "python_multipart"}
    named |= {"opentelemetry-sdk": "opentelemetry.sdk"}
    named |= {"opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http"}
    named |= {"mlflow-skinny": "mlflow"}
    named |= {"pillow-heif": "pillow_heif", "pillow-jxl-plugin": "pillow_jxl"}
    faster = {"simplejpeg"}  # nothing is refused without it
    for extra, packages in EXTRAS.items():
        asked = [name.partition(">")[0].partition("[")[0] for name in project["optional-dependencies"][extra]]
        assert {named.get(name, name) for name in asked} - faster <= set(packages), extra
        assert not any(name.partition(">")[0] in packages for name in project["dependencies"])


def install(python: Path, source: Path) -> None:
    """Install the light installation from a copy of this checkout, in which pip may write."""
    source.mkdir()
    for name in ("embedder", "shards", "index"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", source], check=True)


def installed_bytes(python: Path) -> int:
    """Bytes on the disk of all packages of an environment."""
    place = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = subprocess.run([python, "-c", place], check=True, capture_output=True, text=True).stdout.strip()
    return sum(path.lstat().st_blocks * 512 for path in Path(folder).rglob("*"))


@pytest.mark.slow
def test_a_fresh_environment_does_the_same(store, images, tiny_model, tmp_path):
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    before_bytes = installed_bytes(python)
    reach = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path / "reach", "packaging"]
    if subprocess.run(reach, capture_output=True, check=False).returncode:
        pytest.skip("pip reaches no package index from here, so no fresh environment can be made")
    install(python, tmp_path / "source")
    assert (installed_bytes(python) - before_bytes) / (1 << 20) <= 710

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [python, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    image = open_store(store).items()["uri"][0].as_py()
    read = run("-c", READ, store, image)
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout)["loaded"] == []
    searched = run("-m", "embedder", "search", "a red square", "--store", store, "--json")
    assert len(json.loads(searched.stdout)["hits"]) == 4
    assert run("-m", "embedder", "plan", "--model", tiny_model, "--estimate").returncode == 0
    refused = run("-m", "embedder", "embed", images, "--model", tiny_model, "--store", tmp_path / "new")
    assert refused.returncode == 2
    assert refused.stderr.startswith("embedder: embedder embed: needs torch, ")
    assert refused.stderr.count("\n") == 1
