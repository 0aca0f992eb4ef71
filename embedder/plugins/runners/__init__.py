"""Models of other frameworks, each kind with the program that runs it."""

from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
