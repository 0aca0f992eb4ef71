"""The count of code: what counts on a tiny tree, and what the table says of two."""

import pytest
from script_runs import run_script

pytestmark = pytest.mark.medium


def test_lines_are_counted_by_package_and_the_longest_file_is_named(tmp_path):
    for name, number in (("one", 12), ("two", 24)):
        for package, lines in (("embedder", number), ("embedder/plugins/serve", 3), ("index/deep", 1)):
            folder = tmp_path / name / package
            folder.mkdir(parents=True)
            (folder / "module.py").write_text("x = 1\n" * lines)
    done = run_script("count_code.py", tmp_path / "one", tmp_path / "two", timeout_s=60)
    assert done.returncode == 0, done.stderr
    heading, one, two = (line.split() for line in done.stdout.splitlines())
    assert heading[:8] == ["checkout", "embedder", "shards", "index", "scripts", "tests", "plug-ins", "all"]
    assert one == ["one", "15", "0", "1", "0", "0", "3", "16", "embedder/module.py", "(12)", "1.000"]
    assert two == ["two", "27", "0", "1", "0", "0", "3", "28", "embedder/module.py", "(24)", "1.750"]


def test_the_figures_of_the_structure_are_those_of_the_files(tmp_path):
    files = {
        "ingest/embed.py": "from embedder.config import RunConfig\nfrom embedder.store.files import A\n",
        "store/files.py": "def f():\n    from embedder.store import lock\nclass A: ...\n",
        "store/lock.py": "import embedder.store.files\nfrom embedder.config import RunConfig\nclass A: ...\n",
        "serve/lock.py": "def f():\n" + "    x = 1\n" * 40,
        "config.py": "class RunConfig: ...\n",
    }
    for name, text in files.items():
        path = tmp_path / "one" / "embedder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = run_script("count_code.py", "--structure", tmp_path / "one", timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split() == ["one", "5", "2", "1", "1", "1", "1"]


def test_a_value_is_followed_through_what_takes_it_and_a_part_of_it_is_a_stop(tmp_path):
    files = {
        "ingest/embed.py": (
            "from embedder.config import RunConfig\nfrom embedder.ingest.inputs import Inputs, open_inputs\n"
            "from embedder.store.files import open_store, read\n"
            "def ingest(config: RunConfig):\n"
            "    inputs = open_inputs(config)\n    open_store(config.store)\n"
            "    finish(inputs)\n    read(inputs.files)\n"
            "def finish(inputs: Inputs):\n    open_store(inputs.config.store)\n"
        ),
        "ingest/inputs.py": (
            "from embedder.config import RunConfig\nfrom embedder.engine.plan import decide\n"
            "class Inputs:\n    config: RunConfig\n    files: str\n"
            "def open_inputs(config: RunConfig) -> Inputs:\n    decide(config.compute)\n    return Inputs(config, '')\n"
        ),
        "engine/plan.py": "from embedder.serve.lost import never\ndef decide(compute):\n    never(compute)\n",
        "store/files.py": "def open_store(address): ...\ndef read(files): ...\n",
        "serve/lost.py": "def never(compute): ...\n",
        "config.py": "class RunConfig: ...\n",
    }
    for name, text in files.items():
        path = tmp_path / "one" / "embedder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    layers = '[[tool.importlinter.contracts]]\ncontainers = ["embedder"]\nlayers = ["ingest", "engine", "store"]\n'
    (tmp_path / "one" / "pyproject.toml").write_text(layers)
    followed = "embedder/ingest/embed.py:ingest:config"
    done = run_script("count_code.py", "--follow", followed, tmp_path / "one", timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split() == ["one", "4", "1"], "embed, inputs, plan; files; embed again; files"
