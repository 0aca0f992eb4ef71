"""Errors that the user can repair, as one family.

`shards` and `index` stand below this package and have roots of their own (`shards.ModelError`, `index.RetrievalError`);
the command line reports all three (`USER_MISTAKES`) in one line and exits with 2. Anything else keeps its traceback.
"""

from index.errors import RetrievalError
from shards.errors import ModelError


class EmbedderError(ValueError):
    """Mistake that the user can repair; the message says where, what was found, the rule, and the cure."""


class ConfigError(EmbedderError):
    """Configuration file, key or option that breaks a rule."""


class SourceError(EmbedderError):
    """Source that can't be listed as a whole: it is missing, of an unknown kind, or lacks a named column."""


class StoreError(EmbedderError):
    """Store that can't be used as asked: missing, of an unknown format, locked, or of another model."""


class ArgumentTypeError(EmbedderError, TypeError):
    """Argument of a Python function of a type that it doesn't take; the message names those that it does."""


USER_MISTAKES = (EmbedderError, ModelError, RetrievalError)


class RunFailedError(Exception):
    """End of a command through no mistake of the user's. One line, exit 1.

    Attributes:
        details: a traceback, for the run's log.
        is_resumable: whether a run that had begun can go on; `embedder.observability.run_observer` adds that to the
            message of such a run, as other commands have nothing to go on with.
    """

    details = ""
    is_resumable = False


class HeadLostError(RunFailedError):
    """End of a command whose cluster has lost its head; Ray in this process would wait for it for ever."""

    is_resumable = True


def check_argument(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Refuse an argument of a type that a Python function doesn't take.

    Raises:
        ArgumentTypeError: it is of none of them.
    """
    if not isinstance(value, kinds):
        raise ArgumentTypeError(f"{name}: found {type(value).__name__}; give {expected}")
