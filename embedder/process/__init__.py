"""Child processes that this one starts, limits, speaks with and ends: for decoders, other interpreters, users' code."""
