"""One line, with the time."""

import time


def log(text: str) -> None:
    """Print it at once, for whoever watches a run of hours."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
