"""Towers: one file per family, the only place that knows it. `registry` lists them."""
