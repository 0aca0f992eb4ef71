"""The command line, the only user of typer and rich: one module per family of commands.

Inside its function, a command reads its configuration before it imports anything heavy: `--help` stays light, and a
mistake in an option is reported at once.
"""

from typing import Any

from embedder.cli.run_command import main

__all__ = ["main"]


def __getattr__(name: str) -> Any:
    """Make `app`, the application of all commands, when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module 'embedder.cli' has no attribute {name!r}")
    from embedder.cli.run_command import whole_app

    return whole_app()
