"""Errors that the user can fix, as one family.

The layers `shards` and `index` below this package have their own roots (`shards.ModelError`, `index.RetrievalError`).
The command line reports all three (`USER_MISTAKES`) in one line and exits with 2. Anything else keeps its traceback.
"""

from index.index_errors import RetrievalError
from shards.model_errors import ModelError


class EmbedderError(ValueError):
    """Mistake that the user can fix; the message says where, what was found, the rule, and the fix."""


class ConfigError(EmbedderError):
    """Configuration file, key or option that breaks a rule."""


class SourceError(EmbedderError):
    """Source that can't be listed as a whole: it is missing, of an unknown kind, or lacks a named column."""


class StoreError(EmbedderError):
    """Store that can't be used as requested: missing, of an unknown format, locked, or of another model."""


class CodeNotAllowedError(StoreError):
    """Model of a store whose code the reader has not allowed; the message names no place of this machine."""


class ArgumentTypeError(EmbedderError, TypeError):
    """Argument of a Python function with an unsupported type; the message names the supported ones."""


USER_MISTAKES = (EmbedderError, ModelError, RetrievalError)


class RunFailedError(Exception):
    """End of a command that is not the user's mistake. One line, exit 1.

    `details` is a traceback, for the run's log. `is_resumable` says whether a run that had begun can be resumed;
    `embedder.observability.run_observer` adds that to the message, only for runs, as other commands can't be resumed.
    """

    details = ""
    is_resumable = False


class HeadLostError(RunFailedError):
    """End of a command whose cluster has lost its head; Ray in this process would wait for it forever."""

    is_resumable = True


def check_argument(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise `ArgumentTypeError` unless a Python function's argument has one of the types."""
    if not isinstance(value, kinds):
        raise ArgumentTypeError(f"{name}: found {type(value).__name__}; give {expected}")
