"""Embed images, videos and captions with a twin tower cut into stages on Ray Data, and search them.

    import embedder

    config = embedder.load_config("nightly.toml", {"store": "runs/photos"})
    embedder.embed(config)
    store = embedder.open_store("runs/photos")
    hits = store.search("cat with heart eyes", k=10)
    hits[0].image()

Everything else is private. Importing this package loads neither torch nor Ray: each name imports its module when first
used. Messages are logged by the standard `logging`, below the loggers `embedder`, `shards` and `index`.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from embedder.version import __version__ as __version__

if TYPE_CHECKING:
    from embedder.config import load_config as load_config
    from embedder.encoders.yes_no_reranker import YesNoReranker as YesNoReranker
    from embedder.ingest.build_index import build_index as build_index
    from embedder.ingest.dataset import embed_dataset as embed_dataset
    from embedder.ingest.embed import embed as embed
    from embedder.ingest.embed import refresh as refresh
    from embedder.plugins.deploy.submission.submit import submit as submit
    from embedder.plugins.evaluate.compare import compare as compare
    from embedder.plugins.evaluate.evaluate import evaluate as evaluate
    from embedder.plugins.plan.answer import plan as plan
    from embedder.plugins.train.train_config import load_train_config as load_train_config
    from embedder.plugins.train.train_run import train as train
    from embedder.predictor import BatchPredictor as BatchPredictor
    from embedder.retrieval.queries import SearchOptions as SearchOptions
    from embedder.retrieval.remote_store import RemoteStore as RemoteStore
    from embedder.retrieval.remote_store import connect as connect
    from embedder.retrieval.store_api import Store as Store
    from embedder.retrieval.store_api import open_store as open_store
    from embedder.retrieval.store_follower import FollowingStore as FollowingStore
    from embedder.retrieval.store_follower import follow_store as follow_store
    from embedder.steps.stage_contract import Stage as Stage

_HOMES = {
    "BatchPredictor": "embedder.predictor",
    "FollowingStore": "embedder.retrieval.store_follower",
    "RemoteStore": "embedder.retrieval.remote_store",
    "SearchOptions": "embedder.retrieval.queries",
    "Stage": "embedder.steps.stage_contract",
    "Store": "embedder.retrieval.store_api",
    "YesNoReranker": "embedder.encoders.yes_no_reranker",
    "build_index": "embedder.ingest.build_index",
    "compare": "embedder.plugins.evaluate.compare",
    "connect": "embedder.retrieval.remote_store",
    "embed": "embedder.ingest.embed",
    "embed_dataset": "embedder.ingest.dataset",
    "evaluate": "embedder.plugins.evaluate.evaluate",
    "follow_store": "embedder.retrieval.store_follower",
    "load_config": "embedder.config",
    "load_train_config": "embedder.plugins.train.train_config",
    "open_store": "embedder.retrieval.store_api",
    "plan": "embedder.plugins.plan.answer",
    "refresh": "embedder.ingest.embed",
    "submit": "embedder.plugins.deploy.submission.submit",
    "train": "embedder.plugins.train.train_run",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name not in _HOMES:
        message = f"module 'embedder' has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])  # so that Python suggests what was meant
    try:
        home = import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        from embedder.installation import explain_missing

        raise explain_missing(error, f"embedder.{name}") from None
    return getattr(home, name)


def __dir__() -> list[str]:
    """Public names, those included whose modules are not imported yet."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
