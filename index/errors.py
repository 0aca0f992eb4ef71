"""The one root of the mistakes a user can repair in this package, and two kinds that callers act upon."""


class RetrievalError(ValueError):
    """An index can't be built or searched as asked; the message says where, what was found, the rule, and the cure."""


class RebuildNeededError(RetrievalError):
    """An index can't take the change, or not well; the message says why. The cure is to build it whole."""


class GateRefusedError(RetrievalError):
    """An index is not good enough to be published."""
