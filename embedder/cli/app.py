"""The command `embedder`: reads options, calls one function, prints. Loads nothing heavy before a command needs it.

Exit 0: done. Exit 2: the user's mistake, in one line; of a configuration, each in one line. Exit 128 + n: broken off by
signal n. Exit 1: anything else.
"""

import gc
import os
import sys
import traceback
from collections.abc import Callable
from io import TextIOWrapper
from types import TracebackType
from typing import Annotated, Any

import typer

from embedder.cli import config_command as config
from embedder.cli import demo_command as demo
from embedder.cli import doctor_command as doctor
from embedder.cli import embed_command as embed
from embedder.cli import index_command as index
from embedder.cli import model_command as model
from embedder.cli import plan_command as plan
from embedder.cli import purge_command as purge
from embedder.cli import refresh_command as refresh
from embedder.cli import report_command as report
from embedder.cli import search_command as search
from embedder.cli import store_check_command as store_check
from embedder.cli import store_command as store
from embedder.cli import verify_command as verify
from embedder.cli.options import add_plugins
from embedder.cli.terminal import MAX_LINE_CHARACTERS, TerminalLog
from embedder.config_toml.mistakes import ConfigMistakesError
from embedder.entry_points import COMMANDS as PLUGIN_COMMANDS
from embedder.errors import USER_MISTAKES, HeadLostError, RunFailedError
from embedder.executors.interrupts import SignalInterrupt, interruptible
from embedder.installation import InstallationError, explain_missing
from embedder.observability.log import messages_to
from embedder.redaction import mask
from embedder.storage.printable import printable
from embedder.version import __version__

# Importing creates a million objects that all stay; with garbage collection after each 700 it takes a fifth longer.
OBJECTS_PER_COLLECTION = 100_000
USAGE_ERRORS: tuple[type[Exception], ...] = typer.BadParameter.__bases__  # of all versions of typer

COMMANDS: tuple[Callable[..., None], ...] = (
    refresh.refresh,
    refresh.rejects,
    store.history,
    report.report,
    store.rollback,
    store.vacuum,
    store.compact,
    purge.purge,
    store.migrate,
    store.export_query_towers,
    search.search,
    demo.demo,
    embed.embed,
    plan.plan,
    verify.verify,
    doctor.doctor,
    config.config,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(model.app, name="model")
app.add_typer(index.app, name="index")
app.add_typer(store_check.app, name="store")
for command in COMMANDS:
    app.command()(command)
add_plugins(PLUGIN_COMMANDS, app)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        sys.stdout.write(f"embedder {__version__}\n")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def main() -> None:
    """Run the command line, and turn errors into exit codes."""
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    sys.excepthook = _show_traceback
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal without Unicode shows escapes, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    with interruptible(), messages_to(TerminalLog()):
        try:
            # Typer itself would print errors in its own style, and replace the hook for tracebacks.
            sys.exit(typer.main.get_command(app)(standalone_mode=False))
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
