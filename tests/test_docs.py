"""The documentation names what is there: its modules and files exist, its examples run, its pages are current."""

import ast
import re
import shutil
import tomllib
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path

import generate_configuration_docs as configuration_docs
import generate_model_docs as model_docs
import pytest
import samples
from embedding_runs import embedded
from running_server import running
from tiny_models import tiny_config

import embedder
from embedder.config import load_config
from embedder.config_toml.index_section import IndexConfig
from embedder.training.tokenizer import train_tokenizer
from shards.fresh import init_model

ROOT = Path(__file__).parents[1]
SERVICE = "http://127.0.0.1:8765"
PACKAGES = ("embedder", "shards", "index")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
}
PATHS = sorted(
    {
        (page, found.rstrip("."))
        for page, text in PAGES.items()
        for found in re.findall(r"(?<![\w/.-])(?:embedder|shards|index|scripts|tests|examples)/(?!0)[\w./-]*\w", text)
        if "." in found or page in ("ARCHITECTURE.md", "CONTRIBUTING.md")
    }
)
NAMES = sorted(
    {
        (page, found)
        for page, text in PAGES.items()
        for found in re.findall(r"(?<![\w/.-])(?:embedder|shards|index)(?:\.[A-Za-z_]\w*)+", text)
        if not found.endswith((".prom", ".log", ".run_id"))  # files, and a tag of trackers
    }
)
PYTHON = [
    pytest.param(block, id=f"{page}-{number}")
    for page, text in PAGES.items()
    if page.startswith("docs/") and page != "docs/servables.md"  # whose examples tests/test_servable_docs.py runs
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
]


@pytest.mark.parametrize(("page", "path"), PATHS)
def test_each_path_exists(page, path):
    assert (ROOT / path).exists()


@cache
def names_in(path: Path) -> set[str]:
    """What a module defines, imports or has among its fields and methods; it is read, not imported."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name)
    return names


@pytest.mark.parametrize(("page", "name"), NAMES)
def test_each_module_and_name_exists(page, name):
    first, *rest = name.split(".")
    place = ROOT / first
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    module = place / f"{rest.pop(0)}.py" if rest and (place / f"{rest[0]}.py").is_file() else place / "__init__.py"
    keys = set(IndexConfig.model_fields) if first == "index" else set()  # `index.min_recall` is a key of a run
    public = set(getattr(import_module(first), "__all__", ()))
    assert module.is_file()
    assert set(rest[:1]) <= names_in(module) | public | keys  # what follows is a method


def test_the_drawn_layers_are_those_of_the_contract():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each.get("containers") == ["embedder"])
    (block,) = re.findall(r"## Layers\n.*?```\n(.*?)```", PAGES["ARCHITECTURE.md"], re.DOTALL)
    assert [re.split(r"  +", line)[0] for line in block.splitlines()] == layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a configuration and a store where the examples look for them."""
    folder = tmp_path_factory.mktemp("docs")
    init_model(tiny_config(), folder / "model", seed=0, tokenizer_json=train_tokenizer(samples.SENTENCES, 300))
    samples.folder(folder / "in")
    run = folder / "run.toml"
    run.write_text('model = "model"\nstore = "runs/demo/store"\n[[source]]\npath = "in"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)  # in a checkout whose demo was run, `runs/demo/store` exists below the root, too
        embedded(load_config(run, {"engine": "local"}))
        yield folder


@pytest.mark.parametrize("block", PYTHON)
def test_each_python_example_runs(folder, block, monkeypatch):
    monkeypatch.chdir(folder)
    with running("runs/demo/store") if SERVICE in block else nullcontext(SERVICE) as url:
        exec(compile(block.replace(SERVICE, url), "docs", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_each_example_configuration_is_valid(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(shutil.copy(path, tmp_path / "run.toml"))
    assert config.model
    assert config.store
    assert config.source


def test_the_page_of_the_configuration_is_current():
    assert configuration_docs.PAGE.read_text(encoding="utf-8") == configuration_docs.page()


def test_the_table_of_models_is_current():
    assert model_docs.PAGE.read_text(encoding="utf-8") == model_docs.page()


def test_every_key_has_a_type_and_a_meaning():
    rows = [line for line in configuration_docs.page().splitlines() if line.startswith("| `")]
    empty = [row for row in rows if row.endswith("|  |") or not row.split(" | ")[1]]
    assert len(rows) > 100
    assert empty == []


def test_the_site_lists_every_page():
    listed = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {path.name for path in ROOT.glob("docs/*.md")}


def test_the_version_is_that_of_the_changelog():
    assert re.search(r"^## (\S+)", PAGES["CHANGELOG.md"], re.MULTILINE)[1] == embedder.__version__


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_marked_as_typed(package):
    assert (ROOT / package / "py.typed").is_file()
