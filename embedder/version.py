"""Version of this package, in a module that all layers may import."""

__version__ = "0.1.0"
