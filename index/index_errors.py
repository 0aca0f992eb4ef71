"""Errors that a user can fix: their root class, and three kinds that callers handle."""


class RetrievalError(ValueError):
    """An index can't be built or searched as asked; the message says where, what was found, the rule, and the cure."""


class RebuildNeededError(RetrievalError):
    """An index can't take the change, or not well; the message says why. The cure is a full build."""


class ConstraintsMissedError(RetrievalError):
    """No design keeps the constraints; the message names the nearest."""


class GateRefusedError(RetrievalError):
    """An index is not good enough to be published."""
