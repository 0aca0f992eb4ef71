"""The command line, the one home of typer and rich: a module for each family of commands.

A command reads its configuration before it imports anything heavy, inside its function: `--help` stays light, and a
mistake in an option is reported at once.
"""

from embedder.cli.app import app, main

__all__ = ["app", "main"]
