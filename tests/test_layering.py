"""Imports run one way, between the packages and between the folders of embedder; pyproject.toml has the contracts."""

import shutil
import subprocess
import sys
from pathlib import Path

import networkx
import pytest
from count_code import Trail, file_circles, import_graph, product_trees, structure

ROOT = Path(__file__).resolve().parent.parent
LINT_IMPORTS = Path(sys.executable).parent / "lint-imports"
PACKAGES = ("embedder", "shards", "index")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, LINT_IMPORTS, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def copy_of_the_code(tmp_path: Path) -> Path:
    for name in PACKAGES:
        sources = shutil.ignore_patterns("demo_data", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=sources)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_all_import_contracts_are_kept() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


INTRUDERS = [
    ("index", "import torch"),
    ("index", "import shards"),
    ("index", "import embedder.errors"),
    ("shards", "import ray"),
    ("shards", "import index.index_errors"),
    ("shards", "import embedder"),
    ("embedder/store", "import embedder.sources.uris"),
    ("embedder/executors", "import embedder.ingest.embed"),
    ("embedder/steps", "from embedder.cli import main"),
    ("embedder/storage", "import embedder.store.files"),
    ("embedder/plugins/train", "import embedder.plugins.evaluate.retrieval_metrics"),
    ("embedder/ingest", "from rich.table import Table"),
    ("embedder/cli", "import uvicorn"),
    ("embedder/retrieval", "import embedder.plugins.serve.serve_settings"),
]


def test_each_forbidden_import_breaks_a_contract(copy_of_the_code: Path) -> None:
    for number, (module, statement) in enumerate(INTRUDERS):
        path = copy_of_the_code / module / f"intruder_{number:02}.py"
        path.write_text(f"def late() -> None:\n    {statement}\n")
    result = lint(copy_of_the_code)
    assert result.returncode == 1, result.stdout + result.stderr
    modules = {f"{module.replace('/', '.')}.intruder_{number:02}" for number, (module, _) in enumerate(INTRUDERS)}
    assert {each for each in modules if each not in result.stdout} == set()


@pytest.fixture(scope="module")
def imports() -> networkx.DiGraph:
    return import_graph(ROOT, product_trees(ROOT))


def test_files_import_each_other_in_no_circle(imports: networkx.DiGraph) -> None:
    """Imports in functions, and for types, count."""
    assert file_circles(imports) == []


def test_a_circle_of_files_is_found(imports: networkx.DiGraph) -> None:
    closing = networkx.DiGraph([*imports.edges, ("shards.ranges", "shards.shard_specs")])
    (circle,) = file_circles(closing)
    assert {"shards.ranges", "shards.shard_specs"} <= set(circle)


def test_the_configuration_is_split_at_the_entrance() -> None:
    """Below `embedder.ingest` functions take the keys that they read, and nothing imports the whole."""
    assert structure(ROOT)["RunConfig below ingest"] == 0
    figures = Trail(ROOT, "embedder/ingest/embed.py:ingest:config").figures()
    assert figures["files"] <= 40
    assert figures["ways back"] <= 10


def test_files_have_names_of_their_own_and_few_functions_are_long() -> None:
    figures = structure(ROOT)
    assert figures["file names twice"] == 0
    assert figures["functions over 40 lines"] <= 10
