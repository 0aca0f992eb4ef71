"""The documentation names what is there: its modules and files exist, its examples run, its pages are current."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path

import docs_world
import generate_configuration_docs as configuration_docs
import generate_model_docs as model_docs
import pyarrow as pa
import pytest
import samples
from command_runs import run_here
from packaging.version import Version
from running_server import running

import embedder
from embedder.config import load_config
from embedder.config_toml.sections import IndexConfig
from embedder.entry_points import GROUPS

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
        if found not in GROUPS
    }
)
READER_PAGES = ["README.md", *(page for page in PAGES if page.startswith("docs/") and page != "docs/index.md")]
"""Pages whose examples run; docs/index.md repeats some of README's."""
PYTHON = [
    pytest.param(block, id=f"{page}-{number}")
    for page in READER_PAGES
    if page != "docs/servables.md"  # whose examples tests/test_servable_docs.py runs
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL))
]
WITH_RAY = [example for example in PYTHON if "ray.init(" in example.values[0]]
WITHOUT_RAY = [example for example in PYTHON if example not in WITH_RAY]
PYTHON_EXCEPTED = {
    "ray-head:6379": "a cluster: tests/embedder/executors/test_cluster_jobs.py",
    "embedder.submit(": "a cluster: tests/embedder/plugins/deploy/test_cluster_submission.py",
}
"""Text of an example in Python that doesn't run in these tests, and what it needs; it compiles, and its names exist."""
SHELL = re.compile(r"(?:embedder|curl|python|pip|docker|kubectl|sbatch|scripts/\w+|EMBEDDER_\w+=\S+) ?")
EXAMPLES = [
    (page, line.removeprefix("$ ").strip())
    for page in READER_PAGES
    for language, block in re.findall(r"```(\w*)\n(.*?)```", PAGES[page], re.DOTALL)
    if language == ""
    for line in re.sub(r"\\\n\s*", "", block).splitlines()
    if SHELL.match(line.removeprefix("$ ")) and not line.startswith("embedder: ")
]
"""Lines for a shell, of all pages."""
EXCEPTED = {
    r"embedder model import hf:": "the hub of Hugging Face",
    r"embedder model import path/to/timm-vit": "checkpoints: tests/embedder/cli/test_model_import.py",
    r"embedder .*models/dinov3": "a folder that the example before it brings from the hub",
    r"embedder .*s3://": "a bucket: tests/embedder/ingest/test_runs_in_bucket.py",
    r"embedder .*(ray-address|10\.77\.0)": "a cluster: tests/embedder/executors/test_cluster_jobs.py",
    r"embedder plan .*--cluster": "a cluster",
    r"embedder verify .*--dtype int8": "judges by this machine's times: tests/embedder/plugins/verify/test_verify.py",
    r"embedder (submit|jobs) ": "a cluster: tests/embedder/plugins/deploy/test_cluster_submission.py",
    r"embedder .*--device cuda": "a GPU",
    r"embedder demo --serve": "opens a browser: tests/embedder/cli/test_demo_command.py",
    r"embedder .*--model own": "a model of the reader's own code: tests/embedder/servables/test_written_captions.py",
    r"embedder serve --store runs/archive --config": "a model of the reader's own code",
    r"embedder serve --store /srv": "a machine with /srv and tokens: tests/embedder/plugins/serve/test_tokens.py",
    r"embedder search .*--token-file token$": "a service with tokens: tests/embedder/cli/test_search_server.py",
    r"scripts/(demo|test)": "makes an environment: tests/scripts",
    r"EMBEDDER_SECOND_PYTHON": "a second environment",
    r"EMBEDDER_STORE_TRACE": "a trace of a whole process: tests/embedder/store/test_protocol.py",
    r"python scripts/": "a benchmark or check of minutes",
    r"python -m venv|pip ": "an installation: .ci",
    r"docker |kubectl |sbatch ": "a container, a cluster of Kubernetes or Slurm: tests/embedder/plugins/deploy",
}
"""Examples that don't run in these tests, and what they need or which test runs the like; their commands and options
exist (tests/test_readme.py), and their scripts take the options that they are given."""


LINES_BEFORE = 10  # of a guide, before its first example
BEGIN_ELSEWHERE = {
    "docs/buckets.md": "with a bucket: tests/embedder/ingest/test_runs_in_bucket.py",
    "docs/cluster.md": "with a cluster: tests/embedder/executors/test_cluster_jobs.py",
    "docs/submit.md": "with a cluster: tests/embedder/plugins/deploy/test_cluster_submission.py",
}
"""Guides whose first example doesn't run in these tests, what it begins with, and which test runs the like."""


def exception_of(line: str) -> str | None:
    """Why an example doesn't run here; None where it does."""
    return next((reason for pattern, reason in EXCEPTED.items() if re.match(pattern, line)), None)


RUN = [(page, line) for page, line in EXAMPLES if exception_of(line) is None]
LINES = {page: [line for place, line in RUN if place == page] for page, _ in RUN}
"""Those of each page; they stay together, as later ones need what earlier ones made."""
COMMAND_IN_TEXT = re.compile(r"`(?:python )?(?:scripts/)?([\w/]+\.py) ([^`]+)`(?! of (?:\[?commit )?[0-9a-f]{7})")
SCRIPTS_IN_TEXT = [
    (page, *found)
    for page in READER_PAGES
    for found in COMMAND_IN_TEXT.findall(" ".join(re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL).split()))
]
"""Commands of scripts in sentences, with their page; those that name a commit were measured once."""
SCRIPTS = sorted(
    {line for _, line in EXAMPLES if line.startswith("python scripts/")}
    | {f"python scripts/{name} {given}" for _, name, given in SCRIPTS_IN_TEXT if (ROOT / "scripts" / name).exists()}
)


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
    """A folder with what the pages ask the reader to have, and the working directory."""
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        docs_world.build(folder, PAGES)
        yield folder


@pytest.fixture(scope="module")
def service(folder):
    """Address of a service over the demo's store."""
    with running("runs/demo/store") as url:
        yield url


@pytest.mark.medium
@pytest.mark.parametrize("block", WITHOUT_RAY)
def test_each_python_example_runs(folder, block, monkeypatch, request):
    monkeypatch.chdir(folder)
    docs_world.settle(folder, "", "")
    if named := re.match(r"# (\w+\.py)\n", block):
        assert (folder / named[1]).read_text() == block  # another example names it
    if SERVICE in block:
        block = block.replace(SERVICE, request.getfixturevalue("service"))
    if "ray_dataset" in block:
        block = block.partition("predictor = ")[0]  # which the next test runs
    code = compile(block, "docs", "exec")
    if not any(text in block for text in PYTHON_EXCEPTED):
        exec(code, {"__name__": "example"})


@pytest.mark.slow
@pytest.mark.parametrize("block", WITH_RAY)
def test_each_python_example_with_ray_runs(tmp_path, block, ray_cluster, monkeypatch):
    monkeypatch.chdir(tmp_path)
    docs_world.make_shop(tmp_path)
    block = block.replace("catalogue.parquet", f"{tmp_path}/catalogue.parquet")  # this Ray began elsewhere
    exec(compile(block, "docs", "exec"), {"__name__": "example"})


@pytest.mark.medium
def test_the_predictor_of_the_readme_takes_a_dataset_of_ray(ray_cluster, monkeypatch):
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL)
    (block,) = (each for each in blocks if "predictor" in each)
    table = pa.table({"image": [samples.image_bytes(0), None], "caption": ["a red car", "rain"], "price": [1, 2]})
    names = {"embedder": embedder, "ray_dataset": ray_cluster.data.from_arrow(table)}
    exec(block[block.index("predictor = ") :], names)
    rows = names["embeddings"].sort("price").take_all()
    assert [row["price"] for row in rows] == [1, 2]
    assert [row["text_embedding"] is not None for row in rows] == [True, True]


@pytest.mark.medium
@pytest.mark.parametrize("page", LINES)
def test_the_examples_of_a_page_for_a_shell_run(folder, page, monkeypatch, request):
    monkeypatch.chdir(folder)
    docs_world.settle(folder, page, PAGES[page])
    for line in LINES[page]:
        if line.startswith("curl"):
            check_answer(line, request.getfixturevalue("service"))
        elif line.startswith("embedder serve"):
            check_serves(line)
        else:
            run_command(line)


def run_command(line):
    """Run a command as it stands; an id of a run means one that its store has."""
    if named := re.search(r"\d{8}T\d{6}Z-[0-9a-f]{4}", line):
        store = re.search(r"runs/[\w/]+", line)[0]
        line = line.replace(named[0], docs_world.first_run(store))
    words = shlex.split(line, comments=True)
    ended = run_here(*words[1:])
    assert ended.code == 0, f"{line}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    if words[1] == "search":
        assert "nothing found" not in ended.stdout, line


def check_answer(line, url):
    """Ask the service by a line for curl, and look at what it answers."""
    found = subprocess.run(
        ["bash", "-c", f"{line.replace(SERVICE, url)} -w '%{{stderr}}%{{http_code}}'"],
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert found.stderr.endswith(b"200"), found
    if " -o " not in line:
        answer = json.loads(found.stdout)
        assert "error" not in answer
        assert all(each["hits"] for each in answer.get("answers", ())), answer


def check_serves(line):
    """Start a server on a free port, and end it when it serves."""
    command = [sys.executable, "-m", *shlex.split(line, comments=True), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout.readline().startswith("serving ")
        finally:
            server.terminate()
        assert server.wait(60) == 0


def test_a_shell_can_read_each_example():
    script = "\n".join(line for _, line in EXAMPLES)
    found = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_every_exception_is_one_of_an_example():
    unused = [pattern for pattern in EXCEPTED if not any(re.match(pattern, line) for _, line in EXAMPLES)]
    unused += [text for text in PYTHON_EXCEPTED if not any(text in PAGES[page] for page in READER_PAGES)]
    assert unused == []


def test_the_tests_that_exceptions_name_exist():
    reasons = " ".join([*EXCEPTED.values(), *PYTHON_EXCEPTED.values(), *BEGIN_ELSEWHERE.values()])
    assert [path for path in re.findall(r"tests/[\w/.]*\w", reasons) if not (ROOT / path).exists()] == []


GUIDES = [
    f"docs/{name}"
    for name in re.findall(
        r"(\S+\.md)$",
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("Guides:")[2].partition("Reference:")[0],
        re.MULTILINE,
    )
]


@pytest.mark.parametrize("page", GUIDES)
def test_each_guide_begins_with_an_example_that_runs_here(page):
    before, _, rest = PAGES[page].partition("```")
    blocks = re.findall(r"```(\w*)\n(.*?)```", f"```{rest}", re.DOTALL)
    language, block = next(each for each in blocks if each[0] != "toml")  # a configuration stands before its command
    first = re.sub(r"\\\n\s*", "", block).splitlines()
    run = [line for line in first if (page, line.removeprefix("$ ").strip()) in RUN]
    assert (language == "python" or bool(run)) == (page not in BEGIN_ELSEWHERE)
    assert before.count("\n") <= LINES_BEFORE


def test_every_guide_that_begins_elsewhere_is_one():
    assert set(BEGIN_ELSEWHERE) <= set(GUIDES)


def test_three_of_four_commands_of_embedder_run_here():
    commands = [line for _, line in EXAMPLES if line.startswith(("embedder", "curl"))]
    run = [line for _, line in RUN]
    assert len(run) >= 0.7 * len(commands), f"{len(run)} of {len(commands)}"


@pytest.mark.parametrize("line", SCRIPTS)
def test_each_script_takes_the_options_that_it_is_given(line):
    script = shlex.split(line, comments=True)[1]
    text = (ROOT / script).read_text(encoding="utf-8")
    given = shlex.split(line.partition(" embedder ")[0], comments=True)[2:]  # what follows is for another command
    given = given[: given.index("--")] if "--" in given else given
    own = [word for word in given if word.startswith("--")]
    libraries = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("*/*.py"))
    assert [option for option in own if f'"{option}"' not in text + libraries] == []


def test_each_script_of_a_sentence_is_here_or_was_measured_once():
    here = [(page, name) for page, name, _ in SCRIPTS_IN_TEXT if (ROOT / "scripts" / name).exists()]
    assert len(here) >= 10
    elsewhere = {(page, name) for page, name, _ in SCRIPTS_IN_TEXT} - set(here)
    assert [each for each in sorted(elsewhere) if "#measured-once" not in PAGES[each[0]]] == []


def test_the_twelve_keys_that_people_set_are_a_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block, *_ = re.findall(r"```toml\n(.*?)```", PAGES["docs/configuration.md"], re.DOTALL)
    (tmp_path / "run.toml").write_text(block)
    config = load_config(tmp_path / "run.toml")
    assert len(re.findall(r"^\w+ = ", block, re.MULTILINE)) == 12
    assert config.index.recall == 0.95


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_each_example_configuration_is_valid(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(shutil.copy(path, tmp_path / "run.toml"))
    assert config.model
    assert config.store
    assert config.source


def test_the_page_of_the_configuration_is_current():
    assert configuration_docs.PAGE.read_text(encoding="utf-8") == configuration_docs.page()


@pytest.mark.medium
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


def test_older_versions_whose_lacks_are_told_are_ones_that_can_be_installed():
    versions = re.findall(r"^\| (\w+) before ([\d.]+) \|", PAGES["docs/installation.md"], re.MULTILINE)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    floors = dict(re.findall(r'^ *"(\w+)(?:\[data\])?>=([\d.]+)"', project, re.MULTILINE))
    assert versions
    assert [name for name, version in versions if Version(version) <= Version(floors[name.lower()])] == []


def test_the_version_is_that_of_the_changelog():
    assert re.search(r"^## (\S+)", PAGES["CHANGELOG.md"], re.MULTILINE)[1] == embedder.__version__


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_marked_as_typed(package):
    assert (ROOT / package / "py.typed").is_file()
