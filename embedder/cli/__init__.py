"""The command line, the only user of typer and rich: one module per family of commands.

Inside its function, a command reads its configuration before it imports anything heavy: `--help` stays light, and a
mistake in an option is reported at once.
"""

from embedder.cli.app import app, main

__all__ = ["app", "main"]
