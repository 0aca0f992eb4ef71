"""The one root of the mistakes a user can repair in this package."""


class RetrievalError(ValueError):
    """An index can't be built or searched as asked; the message says where, what was found, the rule, and the cure."""
