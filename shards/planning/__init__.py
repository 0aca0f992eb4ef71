"""Planner: costs of a cut, and the best cut and placement. No torch. `shards.plan` is the public module."""
