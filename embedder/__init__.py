"""Embed pictures, videos and captions with a twin tower cut into stages on Ray Data, and search them.

    import embedder
    store = embedder.open_store("runs/demo")
    store.search("cat with heart eyes", k=10)

Importing this package loads neither torch nor Ray: what a name needs is imported when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedder.predictor import BatchPredictor
    from embedder.retrieval.following import FollowingStore, follow_store
    from embedder.retrieval.opened_store import Store, open_store

__all__ = ["BatchPredictor", "FollowingStore", "Store", "follow_store", "open_store"]

_HOMES = {
    "BatchPredictor": "embedder.predictor",
    "FollowingStore": "embedder.retrieval.following",
    "Store": "embedder.retrieval.opened_store",
    "follow_store": "embedder.retrieval.following",
    "open_store": "embedder.retrieval.opened_store",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'embedder' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
