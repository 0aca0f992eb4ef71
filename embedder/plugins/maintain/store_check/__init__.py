"""Check of a store that reads and never writes: what is damaged, what is left over, and what cures it."""
