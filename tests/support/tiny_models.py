"""Twin towers small enough to embed an image in a millisecond."""

from shards.model_config import ModelConfig
from shards.preprocess import PreprocessConfig
from shards.towers.albert import AlbertTower
from shards.towers.vit import VitTower


def tiny_config(**vision) -> ModelConfig:
    """A twin tower of 4 + 4 layers that embeds a picture in a millisecond."""
    return ModelConfig(
        name="tiny",
        trained=False,
        embedding_dim=24,
        vision=VitTower(image_size=32, patch_size=8, width=32, depth=4, num_heads=2, **vision),
        text=AlbertTower(
            vocab_size=300,
            embedding_size=16,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        ),
        preprocess=PreprocessConfig(image_size=32, max_caption_tokens=32),
    )
