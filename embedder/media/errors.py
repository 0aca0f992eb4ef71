"""Why one file could not be decoded: the reason a reject carries."""


class DecodeError(Exception):
    """One file could not be decoded, or not to its end; its neighbours are not concerned.

    Attributes:
        error_type: a short stable name, for grouping: `TimeoutError`, `TooManyPixels`, `UnidentifiedImageError`.
        message: one line for a person.
        transient: the file need not be to blame (a time-out, a disk that can't be read); trying again may help.
    """

    def __init__(self, error_type: str, message: str, transient: bool = False) -> None:
        super().__init__(error_type, message, transient)
        self.error_type = error_type
        self.message = message
        self.transient = transient

    def __str__(self) -> str:
        return f"{self.error_type}: {self.message}"
