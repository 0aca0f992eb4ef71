"""Version of this package, in a place that all layers may import."""

__version__ = "0.1.0"
