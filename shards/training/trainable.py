"""Choice of the tensors that learn, by their names alone."""

from shards.config import ModelConfig
from shards.tensor_shapes import LOGIT_SCALE
from shards.training.settings import TrainSettings

# Parameters of the loss, trained beside the towers.
LOGIT_BIAS = "logit_bias"
PROTOTYPES = "prototypes"

_NO_DECAY_TABLES = ("_token", "pos_embed", "embeddings.weight")


def is_trainable(name: str, config: ModelConfig, settings: TrainSettings) -> bool:
    """Whether a tensor learns.

    Args:
        name: as in the model folder; or one of `LOGIT_SCALE`, `LOGIT_BIAS`, `PROTOTYPES`.
        config: the model.
        settings: the trainable part.
    """
    if name in (PROTOTYPES, LOGIT_SCALE, LOGIT_BIAS):
        return settings.train_prototypes or name != PROTOTYPES
    return name.startswith(trainable_prefixes(config, settings))


def trainable_prefixes(config: ModelConfig, settings: TrainSettings) -> tuple[str, ...]:
    """Give the prefixes of the names of the towers' tensors that learn."""
    match settings.what:
        case "all":
            return ("vision", "text")
        case "vision_frozen":
            return ("text",)
        case "text_frozen":
            return ("vision",)
        case "projections":
            return ("vision_head.projection", "text_head.projection")
        case "layers":
            return layer_prefixes(config, settings)


def layer_prefixes(config: ModelConfig, settings: TrainSettings) -> tuple[str, ...]:
    """Give the prefixes of the tensors of the layer ranges; of an ALBERT layer, those of the group that it applies."""
    vision, text = settings.vision_layers, settings.text_layers
    groups = sorted({config.text.group_of(layer) for layer in range(text.start, text.stop)})
    blocks = [f"vision.blocks.{layer}." for layer in range(vision.start, vision.stop)]
    return (*blocks, *(f"text.encoder.albert_layer_groups.{group}." for group in groups))


def has_decay(name: str, num_dimensions: int) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases, tables and temperatures."""
    return num_dimensions > 1 and name != PROTOTYPES and not name.endswith(_NO_DECAY_TABLES)
