"""The command line: options, what each command calls, and how results are shown; the one home of typer and rich."""

from embedder.cli.app import app, main

__all__ = ["app", "main"]
