"""User errors about models and cuts."""


class ModelError(ValueError):
    """A model folder, checkpoint, plan or batch can't be used; the message says where, what, the rule, the cure."""
