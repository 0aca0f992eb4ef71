"""Model: towers of timm and transformers, for images and captions in one vector space, cut layer-wise into shards.

Tensors in, tensors out; no Ray, no media, no FAISS. `shards.config` describes a model and `shards.plan` cuts it, both
without torch; `shards.towers` has the families; `shards.shard` builds and runs one part; `shards.reference` is the
whole model, unsplit; `shards.convert` imports and exports checkpoints. Nothing heavy is imported here.
"""

from shards.config import ModelConfig, load_model_config
from shards.errors import ModelError
from shards.plan import ShardPlan, plan_shards
from shards.ranges import LayerRange, ShardSpec

__all__ = ["LayerRange", "ModelConfig", "ModelError", "ShardPlan", "ShardSpec", "load_model_config", "plan_shards"]
