"""Names and shapes of all tensors of a model and of a shard; arithmetic only, no torch.

Keys of model.safetensors: `vision.` and `text.` + the name in the tower, `vision_head.` and `text_head.` for the
projection heads. Shapes follow torch: a linear layer's weight is (out, in).
"""

from shards.model_config import ModelConfig
from shards.shard_specs import ShardSpec, whole_model
from shards.towers.base import Shape, Shapes, linear_shapes

# Optional, and not needed by any shard: log of the inverse temperature at the end of training, and SigLIP's bias.
LOGIT_SCALE = "logit_scale"
LOGIT_BIAS = "logit_bias"
OPTIONAL_SHAPES: Shapes = {LOGIT_SCALE: (), LOGIT_BIAS: ()}

# Name suffix of a quantised weight's scales, one per output channel.
SCALE_SUFFIX = "_scale"

# Name suffix of BatchNorm's count of batches in training, which no model folder holds: embeddings don't depend on it.
BATCH_COUNTER = ".num_batches_tracked"

# Name suffixes of tables of tokens and positions in all libraries.
_TABLES = ("_token", "pos_embed", "embedding.weight", "embeddings.weight")

PARTS = ("vision front", "vision layers", "vision head", "text front", "text layers", "text head")


def part_of(config: ModelConfig, name: str) -> str:
    """Return which of `PARTS` a tensor belongs to."""
    side, _, inner = name.partition(".")
    return f"{side} {config.towers[side].part_of(inner)}" if side in config.towers else side.replace("_", " ")


def is_table(name: str) -> bool:
    """Whether a tensor is a table of tokens or positions: initialised small, without weight decay."""
    return name.endswith(_TABLES)


def model_shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of all tensors that the model must have, by name."""
    return shard_shapes(config, whole_model(config))


def shard_shapes(config: ModelConfig, spec: ShardSpec) -> Shapes:
    """Return the shapes of all tensors that a shard owns, by name."""
    shapes: Shapes = {}
    for side, tower in config.towers.items():
        layers = spec.layers_of(side)
        shapes |= {f"{side}.{name}": shape for name, shape in tower.shapes(layers).items()}
        if side == "vision" and config.text is not None and len(shared := config.shared_layers(layers)):
            # Before the text tower's own: a stage holds a layer once, whichever side runs it.
            shapes |= {f"text.{name}": shape for name, shape in config.text.shapes(shared).items()}
        if layers.holds_head(tower.num_layers):
            shapes |= _head_shapes(config, side, tower.pooled_dim)
    return shapes


def _head_shapes(config: ModelConfig, side: str, width: int) -> Shapes:
    name = f"{side}_head"
    pooler = linear_shapes(f"{name}.pooler", width, width) if config.towers[side].has_head_pooler else {}
    return pooler | {f"{name}.{each}": shape for each, shape in projection_shapes(config, side).items()}


def projection_shapes(config: ModelConfig, side: str) -> Shapes:
    """Return the shapes of a projection's tensors, by name below the head's prefix."""
    width, embedding_dim = config.towers[side].pooled_dim, config.embedding_dim
    if config.projections[side] == "none":
        return {}
    if config.projections[side] == "wide_mlp":
        first = linear_shapes("projection.0", width, 2 * embedding_dim)
        return first | linear_shapes("projection.2", 2 * embedding_dim, embedding_dim, bias=config.projection_bias)
    if config.projections[side] != "mlp":
        return linear_shapes("projection", width, embedding_dim, bias=config.projection_bias)
    hidden = mlp_projection_width(width, embedding_dim)
    first = linear_shapes("projection.0", width, hidden, bias=False)
    return first | linear_shapes("projection.2", hidden, embedding_dim, bias=False)


def mlp_projection_width(width: int, embedding_dim: int) -> int:
    """Compute the hidden width of a two-layer projection. Source: open_clip 3.3, `HFTextEncoder`."""
    return (width + embedding_dim) // 2


def held_dtype(config: ModelConfig, name: str, shape: Shape, dtype: str) -> str:
    """Choose the dtype that a tensor of the model is held in, given the compute dtype; projections stay in float32."""
    side, _, inner = name.partition(".")
    tower = config.towers.get(side)
    return "float32" if tower is None else tower.held_dtype(inner, shape, dtype)
