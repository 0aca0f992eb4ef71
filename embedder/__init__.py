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
    from embedder.retrieval.store_api import Store, open_store
    from embedder.retrieval.store_follower import FollowingStore, follow_store

__all__ = ["BatchPredictor", "FollowingStore", "Store", "follow_store", "open_store"]

_HOMES = {
    "BatchPredictor": "embedder.predictor",
    "FollowingStore": "embedder.retrieval.store_follower",
    "Store": "embedder.retrieval.store_api",
    "follow_store": "embedder.retrieval.store_follower",
    "open_store": "embedder.retrieval.store_api",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'embedder' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
