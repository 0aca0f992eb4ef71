"""Error of servables."""

from embedder.errors import EmbedderError


class ServableError(EmbedderError):
    """Servable that can't be used as declared: its file, its framework, its outputs, or its place among others."""
