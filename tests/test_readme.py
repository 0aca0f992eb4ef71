"""The README cannot lie: its commands, options, files and names exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer

import embedder
from embedder.cli import app
from embedder.config import load_config
from embedder.training.config import load_train_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = sorted(
    {
        line.split("#")[0].strip()
        for _, block in BLOCKS
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("embedder ")
    }
    | set(re.findall(r"`(embedder [^`]+)`", README))
)


def leaf(words):
    """The command that the words name, and what is left of them."""
    command = typer.main.get_command(app)
    while words and getattr(command, "commands", None) and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_and_option_exists(line):
    words = shlex.split(line.replace("...", ""))[1:]
    command, rest = leaf(words)
    assert not getattr(command, "commands", None), f"{line}: no such command"
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in rest if word.startswith("-")} <= options


def test_all_commands_are_in_the_table():
    listed = set(typer.main.get_command(app).commands)
    named = {re.match(r"embedder (\w+)", line)[1] for line in re.findall(r"\| `(embedder [^`]+)`", README)}
    assert listed == named


def test_the_configuration_is_valid(tmp_path):
    run, train = (block for language, block in BLOCKS if language == "toml")
    (tmp_path / "run.toml").write_text(run)
    assert load_config(tmp_path / "run.toml").stage[0].num_gpus == 0.5
    (tmp_path / "train.toml").write_text(train)
    assert load_train_config(tmp_path / "train.toml").train.num_steps == 20000


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_each_link_leads_to_a_file(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\bscripts/\w+(?:\.\w+)?", README))))
def test_each_script_exists(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bembedder\.([A-Za-z]\w*)\b(?!\.)", README)) - {"py"}))
def test_each_python_name_exists(name):
    assert hasattr(embedder, name)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bstore\.(\w+)\(", README))))
def test_each_method_of_a_store_exists(name):
    assert callable(getattr(embedder.Store, name))
