"""The reason that one item can't be used: a reject of that item, never the end of a run."""


class ItemError(Exception):
    """One item could not be read or decoded; its neighbours are not concerned.

    Attributes:
        error_type: a short stable name that rejects are counted by, such as `FileNotFound` or `TooManyPixels`.
        message: one line for people.
        transient: the item need not be to blame (a time-out, a disk that can't be read): trying again later may help.
    """

    def __init__(self, error_type: str, message: str, transient: bool = False) -> None:
        super().__init__(error_type, message, transient)
        self.error_type, self.message, self.transient = error_type, message, transient

    def __str__(self) -> str:
        return f"{self.error_type}: {self.message}"
