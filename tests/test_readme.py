"""The README and the documentation cannot lie: their commands, options, files, names and examples exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer

import embedder
from embedder.cli import app
from embedder.config import load_config
from embedder.plugins.train.train_config import load_train_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    if path.name != "CHANGELOG.md"
}
BLOCKS = [
    (page, *found) for page, text in PAGES.items() for found in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
]
LINES = [line for _, _, block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]


def everywhere(pattern: str) -> list[str]:
    """All that a pattern finds in the pages."""
    return sorted({found for text in PAGES.values() for found in re.findall(pattern, text)})


COMMANDS = sorted(
    {re.split(r"\s#", line)[0].removeprefix("$ ").strip() for line in LINES if re.match(r"(?:\$ )?embedder ", line)}
    | set(everywhere(r"`(embedder [^`]+)`"))
)
COMMANDS = [line for line in COMMANDS if not line.startswith(("embedder greet", "embedder deploy nomad"))]


def leaf(words):
    """The command that the words name, and what is left of them."""
    command = typer.main.get_command(app)
    while words and getattr(command, "commands", None) and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_and_option_exists(line):
    words = shlex.split(line.replace("...", ""))[1:]
    words = words[: words.index("--")] if "--" in words else words  # what follows is for another command
    command, rest = leaf(words)
    assert not getattr(command, "commands", None), f"{line}: no such command"
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in rest if word.startswith("-")} <= options


def test_all_commands_are_in_the_table():
    listed = set(typer.main.get_command(app).commands)
    named = {re.match(r"embedder ([\w-]+)", line)[1] for line in re.findall(r"\| `(embedder [^`]+)`", README)}
    assert listed == named


TOML = [
    (page, block)
    for page, language, block in BLOCKS
    if language == "toml" and page not in ("docs/servables.md", "docs/plugins.md")  # whose sections other tests read
]


@pytest.mark.parametrize(("page", "block"), TOML, ids=[f"{page}-{number}" for number, (page, _) in enumerate(TOML)])
def test_each_configuration_is_valid(tmp_path, page, block):
    path = tmp_path / "run.toml"
    path.write_text(block)
    code = (text for each, language, text in BLOCKS if each == page and language == "python")
    (tmp_path / "own_steps.py").write_text("\n".join(code))
    load = load_train_config if re.search(r"^out = ", block, re.MULTILINE) else load_config
    assert load(path).model_fields_set


LINKS = [
    (page, link) for page, text in PAGES.items() for link in sorted(set(re.findall(r"\]\(([^)#:]+)[^):]*\)", text)))
]


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_each_link_leads_to_a_file(page, link):
    assert (ROOT / page).parent.joinpath(link).exists()


@pytest.mark.parametrize("path", everywhere(r"\bscripts/\w+(?:\.\w+)?"))
def test_each_script_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", everywhere(r"\bstore\.(\w+)\("))
def test_each_method_of_a_store_exists(name):
    assert callable(getattr(embedder.Store, name))
