"""Untrained models whose work lies in one stage, with the plan that puts it there."""

from itertools import pairwise

import samples

from shards.fresh import init_model
from shards.model_config import ModelConfig
from shards.plan import plan_specs
from shards.preprocess import PreprocessConfig
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec
from shards.towers.albert import AlbertTower
from shards.towers.vit import VitTower
from shards.train_tokenizer import train_tokenizer


def heavy_model(folder, cuts, *, width=192, patch_size=8):
    """A model that takes 30 to 60 ms of a core for an image; its run's settings.

    Args:
        folder: where model and plan are made.
        cuts: layers of the vision and of the text tower before each stage, and of all.
        width: of the vision tower; a small one with large patches makes a model of a millisecond.
        patch_size: of the same.
    """
    depth, num_text_layers = cuts[-1]
    vision = VitTower(image_size=96, patch_size=patch_size, width=width, depth=depth, num_heads=3)
    text = AlbertTower(
        vocab_size=300,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=num_text_layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    preprocess = PreprocessConfig(image_size=96, max_caption_tokens=32)
    config = ModelConfig(name="heavy", trained=False, embedding_dim=24, vision=vision, text=text, preprocess=preprocess)
    model = init_model(config, folder / "model", seed=0, tokenizer_json=train_tokenizer(samples.SENTENCES, 300))
    specs = [ShardSpec(LayerRange(start[0], stop[0]), LayerRange(start[1], stop[1])) for start, stop in pairwise(cuts)]
    (folder / "plan.json").write_text(plan_specs(config, specs).to_json())
    return {"model": str(model), "plan": str(folder / "plan.json")}
