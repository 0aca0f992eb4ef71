"""A run's journal: what its write tasks have finished, before anything of it is published."""
