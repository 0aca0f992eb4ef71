"""Planner: costs of a cut, and the best cut and placement. Pure; no torch. `shards.plan` is the public module."""
