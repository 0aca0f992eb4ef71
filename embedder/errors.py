"""The user's mistakes, as one family.

`shards` and `index` stand below this package and have roots of their own (`shards.ModelError`, `index.RetrievalError`);
the command line reports all three (`USER_MISTAKES`) in one line and exits with 2. Anything else keeps its traceback.
"""

from index.errors import RetrievalError
from shards.errors import ModelError


class EmbedderError(ValueError):
    """A mistake that the user can repair; the message says where, what was found, the rule, and the cure."""


class ConfigError(EmbedderError):
    """A configuration file, key or option breaks a rule."""


class SourceError(EmbedderError):
    """A source as a whole can't be listed: it is missing, of an unknown kind, or lacks a named column."""


class StoreError(EmbedderError):
    """A store can't be used as asked: missing, of an unknown format, locked, or of another model."""


USER_MISTAKES = (EmbedderError, ModelError, RetrievalError)


class RunFailedError(Exception):
    """A run ended without publishing, through no mistake of the command; what it finished is kept. One line, exit 1."""
