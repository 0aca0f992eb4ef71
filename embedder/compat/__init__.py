"""Patches and tuning of libraries, each with the versions that it was tested with."""
