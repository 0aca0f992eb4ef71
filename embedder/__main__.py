"""`python -m embedder` is the command `embedder`."""

from embedder.cli import main

main()
