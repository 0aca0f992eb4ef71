"""Model: towers of timm and transformers, for images and captions in one vector space, cut layer-wise into shards.

Tensors in, tensors out; no Ray, no media, no FAISS. `shards.model_config` describes a model and `shards.plan` cuts it,
both without torch; `shards.towers` has the families; `shards.shard` builds and runs one part; `shards.reference` is the
whole model, unsplit; `shards.convert` imports and exports checkpoints. Nothing is imported before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shards.model_config import ModelConfig as ModelConfig
    from shards.model_config import load_model_config as load_model_config
    from shards.model_errors import ModelError as ModelError
    from shards.plan import ShardPlan as ShardPlan
    from shards.plan import plan_shards as plan_shards
    from shards.ranges import LayerRange as LayerRange
    from shards.shard_specs import ShardSpec as ShardSpec

_HOMES = {
    "LayerRange": "shards.ranges",
    "ModelConfig": "shards.model_config",
    "ModelError": "shards.model_errors",
    "ShardPlan": "shards.plan",
    "ShardSpec": "shards.ranges",
    "load_model_config": "shards.model_config",
    "plan_shards": "shards.plan",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shards' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
