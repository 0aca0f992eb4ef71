"""Waiting in a page whose policy lets nothing be evaluated as text, as Playwright's own `wait_for_function` does."""

import time

TIMEOUT_S = 30.0
POLL_MS = 50


def wait_until(page, expression: str) -> None:
    """Wait until an expression is true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"not true within {TIMEOUT_S:.0f} s: {expression}"
        page.wait_for_timeout(POLL_MS)


def wait_for_answers(page, count: int) -> None:
    """Wait until the page has drawn so many first answers since it was loaded."""
    wait_until(page, f"performance.getEntriesByName('embedder:painted').length >= {count}")
