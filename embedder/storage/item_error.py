"""The reason why one item can't be used: a reject of that item, never the end of a run."""


class ItemError(Exception):
    """One item could not be read or decoded; other items are not affected.

    Attributes:
        error_type: a short stable name by which rejects are counted, such as `FileNotFound` or `TooManyPixels`.
        message: one line for people.
        transient: the item may not be to blame (a time-out, an unreadable disk), so a retry may help.
    """

    def __init__(self, error_type: str, message: str, transient: bool = False) -> None:
        super().__init__(error_type, message, transient)
        self.error_type, self.message, self.transient = error_type, message, transient

    def __str__(self) -> str:
        return f"{self.error_type}: {self.message}"
