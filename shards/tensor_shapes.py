"""Names and shapes of all tensors of a model and of a shard; arithmetic only, no torch.

Keys of model.safetensors: `vision.` and `text.` + the name in the tower, `vision_head.` and `text_head.` the projection
heads. Shapes follow torch: a linear layer's weight is (out, in).
"""

from shards.config import ModelConfig
from shards.shard_specs import ShardSpec, whole_model
from shards.towers.base import Shape, Shapes, linear_shapes

# Optional, and not needed by any shard: log of the inverse temperature that training ended with, and SigLIP's bias.
LOGIT_SCALE = "logit_scale"
LOGIT_BIAS = "logit_bias"
OPTIONAL_SHAPES: Shapes = {LOGIT_SCALE: (), LOGIT_BIAS: ()}

# Suffix of the name of a quantised weight's scales, one for each output channel.
SCALE_SUFFIX = "_scale"

# Suffixes of the names of tables of tokens and positions, whatever a library calls them.
_TABLES = ("_token", "pos_embed", "embedding.weight", "embeddings.weight")

PARTS = ("vision front", "vision layers", "vision head", "text front", "text layers", "text head")


def part_of(config: ModelConfig, name: str) -> str:
    """Find which of `PARTS` a tensor belongs to."""
    side, _, inner = name.partition(".")
    return f"{side} {config.towers[side].part_of(inner)}" if side in config.towers else side.replace("_", " ")


def is_table(name: str) -> bool:
    """Whether a tensor is a table of tokens or positions: it begins small, and has no weight decay."""
    return name.endswith(_TABLES)


def model_shapes(config: ModelConfig) -> Shapes:
    """Compute the shapes of all tensors that the model must have, by name."""
    return shard_shapes(config, whole_model(config))


def shard_shapes(config: ModelConfig, spec: ShardSpec) -> Shapes:
    """Compute the shapes of all tensors that a shard owns, by name."""
    shapes: Shapes = {}
    for side, tower in config.towers.items():
        layers = spec.layers_of(side)
        shapes |= {f"{side}.{name}": shape for name, shape in tower.shapes(layers).items()}
        if layers.holds_head(tower.num_layers):
            shapes |= _head_shapes(config, side, tower.dim)
    return shapes


def _head_shapes(config: ModelConfig, side: str, width: int) -> Shapes:
    name = f"{side}_head"
    pooler = linear_shapes(f"{name}.pooler", width, width) if config.towers[side].has_head_pooler else {}
    return pooler | {f"{name}.{each}": shape for each, shape in projection_shapes(config, side).items()}


def projection_shapes(config: ModelConfig, side: str) -> Shapes:
    """Compute the shapes of the tensors of a projection, by name below the head's own prefix."""
    width, embedding_dim = config.towers[side].dim, config.embedding_dim
    if config.projections[side] == "none":
        return {}
    if config.projections[side] == "linear":
        return linear_shapes("projection", width, embedding_dim, bias=config.projection_bias)
    hidden = mlp_projection_width(width, embedding_dim)
    first = linear_shapes("projection.0", width, hidden, bias=False)
    return first | linear_shapes("projection.2", hidden, embedding_dim, bias=False)


def mlp_projection_width(width: int, embedding_dim: int) -> int:
    """Compute the hidden width of a projection of two layers.

    Source: open_clip 3.3, `HFTextEncoder`.
    """
    return (width + embedding_dim) // 2


def held_dtype(config: ModelConfig, name: str, shape: Shape, dtype: str) -> str:
    """Choose the dtype that a tensor of the model is held in.

    The heads stay in float32, and so does what a tower computes in it. With int8, the weights of linear layers are
    int8: all matrices but the embedding tables; the rest is float32.

    Args:
        config: the model.
        name: name of the tensor.
        shape: its shape.
        dtype: compute dtype.
    """
    side, _, inner = name.partition(".")
    tower = config.towers.get(side)
    if tower is None or tower.part_of(inner) == "head" or inner.startswith(tower.float32_prefixes):
        return "float32"
    if dtype == "int8" and (len(shape) != 2 or inner.startswith(tower.lookup_prefixes)):
        return "float32"
    return dtype
