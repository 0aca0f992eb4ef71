"""Costs of a model on this machine, measured once and kept."""
