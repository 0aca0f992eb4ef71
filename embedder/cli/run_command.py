"""The command `embedder`: reads options, calls one function, prints. Loads nothing heavy before a command needs it.

Exit 0: done. Exit 2: the user's mistake, in one line; of a configuration, each in one line. Exit 128 + n: broken off by
signal n. Exit 1: anything else.
"""

import gc
import os
import sys
import traceback
from functools import cache
from importlib.metadata import EntryPoint
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer

from embedder.cli.options import add_command, add_plugins
from embedder.cli.results import Result, print_result
from embedder.cli.terminal import MAX_LINE_CHARACTERS, TerminalLog
from embedder.compat.light_imports import spare_pandas
from embedder.config_toml.mistakes import ConfigMistakesError
from embedder.entry_points import COMMANDS as PLUGINS
from embedder.entry_points import find_plugins
from embedder.errors import USER_MISTAKES, HeadLostError, RunFailedError
from embedder.executors.interrupts import SignalInterrupt, interruptible
from embedder.installation import InstallationError, explain_missing
from embedder.observability.log import messages_to
from embedder.redaction import mask
from embedder.storage.printable import printable
from embedder.version import __version__

HELP = """Embed pictures, clips and captions with a twin tower, and search them.

Exit 0: done. Exit 1: the run or the check failed. Exit 2: a mistake in options, configuration or input, in one line.
Exit 128 + n: broken off by signal n.
"""
# Importing creates a million objects that all stay; with garbage collection after each 700 it takes a fifth longer.
OBJECTS_PER_COLLECTION = 100_000
USAGE_ERRORS: tuple[type[Exception], ...] = typer.BadParameter.__bases__  # of all versions of typer

COMMANDS = {
    "demo": "demo_command:demo",
    "embed": "embed_command:embed",
    "refresh": "refresh_command:refresh",
    "search": "search_command:search",
    "index": "index_command:app",
    "rejects": "refresh_command:rejects",
    "report": "report_command:report",
    "history": "store_command:history",
    "rollback": "store_command:rollback",
    "compact": "store_command:compact",
    "export-query-towers": "store_command:export_query_towers",
    "model": "model_command:app",
    "config": "config_command:config",
    "doctor": "doctor_command:doctor",
}
"""Modules of this package, and their commands or applications of subcommands, in the order of `--help`."""


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print_result(False, Result({}, [f"embedder {__version__}"]))
        raise typer.Exit()


def _take_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def make_app(only: str | None = None) -> typer.Typer:
    """Make the application of one command, or of all: importing the others takes longer than most searches."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP)
    app.callback()(_take_options)
    own = {name: EntryPoint(name, f"{__package__}.{place}", "") for name, place in COMMANDS.items()}
    if only in own:
        own = {only: own[only]}
    plugins = {} if only in own else {name: at for name, at in find_plugins(PLUGINS).items() if name not in own}
    if only in plugins:
        own, plugins = {}, {only: plugins[only]}
    for name, point in own.items():
        add_command(app, name, point.load())
    add_plugins(app, plugins)
    return app


@cache
def whole_app() -> typer.Typer:
    """Return the application of all commands."""
    return make_app()


def _prepare_process() -> None:
    """Set up what the environment left out or has otherwise: streams, a home folder."""
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    spare_pandas()
    sys.excepthook = _show_traceback
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by what started the command
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: PTH123, SIM115
    try:
        Path.home()
    except RuntimeError:  # a user without an entry, and without HOME: as containers set it
        os.environ["HOME"] = "/"
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal without Unicode shows escapes, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Run the command line, and turn errors into exit codes."""
    _prepare_process()
    with interruptible(), messages_to(TerminalLog()):
        try:
            # Typer itself would print errors in its own style, and replace the hook for tracebacks.
            called = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
            sys.exit(typer.main.get_command(make_app(called))(standalone_mode=False))
        except USAGE_ERRORS as error:
            sys.exit(_show_usage_error(error))
        except typer.Abort:
            sys.exit(_fail("aborted", 1))
        except ConfigMistakesError as error:
            sys.exit(max(_fail(line, 2) for line in error.lines))
        except USER_MISTAKES as error:
            sys.exit(_fail(str(error), 2))
        except ModuleNotFoundError as error:
            refusal = explain_missing(error, " ".join(["embedder", *sys.argv[1:2]]))
            if not isinstance(refusal, InstallationError):
                raise
            sys.exit(_fail(str(refusal), 2))
        except HeadLostError as error:
            sys.stdout.flush()
            os._exit(_fail(str(error), 1))  # Ray's own shutdown would wait for the head
        except RunFailedError as error:
            sys.exit(_fail(str(error), 1))
        except SignalInterrupt as error:
            sys.exit(_fail(str(error), error.exit_code))


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"embedder: {printable(mask(message), MAX_LINE_CHARACTERS)}\n")
    return code


def _show_usage_error(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # a command without arguments, which has printed its help
        return 2
    message = " ".join(error.format_message().split()).rstrip(".")
    see = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
    return _fail(message + see, 2)


def _show_traceback(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Print a traceback whose messages can't control the terminal."""
    for piece in traceback.format_exception(kind, error, where):
        for line in piece.rstrip("\n").split("\n"):
            sys.stderr.write(printable(line) + "\n")
