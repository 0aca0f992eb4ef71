"""Options of a function, and of records among its parameters, as those of a command."""

from dataclasses import dataclass
from inspect import signature
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from embedder.cli import app
from embedder.cli.options import ReadConfig, command
from embedder.cli.results import Result


@dataclass(frozen=True)
class PaintOptions:
    """Options of how something is painted."""

    colour: Annotated[str, typer.Option(help="Colour of it.")] = "red"
    coats: Annotated[int, typer.Option("--coat-count", min=1)] = 2


def make_command(seen: list[object]):
    @command
    def paint(read: ReadConfig, name: str = "door", *, options: PaintOptions, dry: bool = False) -> Result:
        """Paint something."""
        seen.append((name, options, dry))
        return Result({}, [])

    return paint


def run(seen: list[object], *arguments: str):
    app = typer.Typer()
    app.command()(make_command(seen))
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ("door", PaintOptions("red", 2), False)),
        (["--coat-count", "3", "--dry"], ("door", PaintOptions("red", 3), True)),
        (["--colour", "blue", "--name", "wall"], ("wall", PaintOptions("blue", 2), False)),
    ],
)
def test_a_record_is_filled_with_the_options_of_its_fields(arguments, expected):
    seen: list[object] = []
    assert run(seen, *arguments).exit_code == 0
    assert seen == [expected]


def test_options_of_a_record_stand_in_its_place_and_keep_their_bounds():
    names = list(signature(make_command([])).parameters)
    assert names == ["name", "colour", "coats", "dry", "config", "settings", "as_json"]
    seen: list[object] = []
    assert run(seen, "--coat-count", "0").exit_code == 2
    assert seen == []


def test_a_command_is_called_from_python_with_the_options_that_are_given():
    seen: list[object] = []
    make_command(seen)(colour="green")
    assert seen == [("door", PaintOptions("green", 2), False)]


def texts_of(command):
    """Help texts of a command, of its options and of all subcommands."""
    yield command.help or ""
    yield from (getattr(each, "help", None) or "" for each in command.params)
    for each in getattr(command, "commands", {}).values():
        yield from texts_of(each)


def test_no_help_has_brackets_which_rich_takes_as_its_own_markup_and_leaves_out():
    texts = list(texts_of(typer.main.get_command(app)))
    assert len(texts) > 300
    assert [each for each in texts if "[" in each] == []
