"""Starts, limits, communicates with and ends child processes: for decoders, other interpreters, users' code."""
