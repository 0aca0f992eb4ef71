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


USER_MISTAKES = (EmbedderError, ModelError, RetrievalError)


class RunFailedError(Exception):
    """End of a run without publishing, through no mistake of the command; finished items are kept. One line, exit 1.

    Attributes:
        details: a traceback, for the run's log.
    """

    details = ""


class HeadLostError(RunFailedError):
    """End of a run whose cluster has lost its head; Ray in this process would wait for it for ever."""
