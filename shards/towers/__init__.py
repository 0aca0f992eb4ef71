"""Towers: one file for each family, which is all that knows it. `registry` lists them."""
