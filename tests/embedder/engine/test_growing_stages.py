"""A stage that can't keep up gets more replicas while the run goes on, on a real Ray with two CPUs."""

from itertools import pairwise

import pytest
import samples
from embedding_runs import embedded

from embedder.training.tokenizer import train_tokenizer
from shards.config import ModelConfig, PreprocessConfig
from shards.fresh import init_model
from shards.plan import plan_specs
from shards.ranges import LayerRange, ShardSpec
from shards.towers.albert import AlbertTower
from shards.towers.vit import VitTower


@pytest.fixture
def heavy_pictures(tmp_path):
    """A model that takes 30 to 60 ms of a core for a picture, almost all of it in the middle of three stages."""
    vision = VitTower(image_size=96, patch_size=8, width=192, depth=12, num_heads=3)
    text = AlbertTower(
        vocab_size=300,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    preprocess = PreprocessConfig(image_size=96, max_caption_tokens=32)
    config = ModelConfig(name="heavy", trained=False, embedding_dim=24, vision=vision, text=text, preprocess=preprocess)
    folder = init_model(config, tmp_path / "heavy", seed=0, tokenizer_json=train_tokenizer(samples.SENTENCES, 300))
    cuts = [(0, 0), (0, 1), (12, 1), (12, 2)]
    specs = [ShardSpec(LayerRange(start[0], stop[0]), LayerRange(start[1], stop[1])) for start, stop in pairwise(cuts)]
    (tmp_path / "plan.json").write_text(plan_specs(config, specs).to_json())
    return {"model": str(folder), "plan": str(tmp_path / "plan.json")}


@pytest.mark.slow
def test_the_slow_stage_gains_replicas_and_the_others_do_not(make_run, heavy_pictures, tmp_path, ray_cluster):
    growing = {"replicas": {"min": 1, "max": 3}, "num_cpus": 0.2, "num_threads": 1}
    still = {"replicas": {"min": 1, "max": 3}, "num_cpus": 0.1, "num_threads": 1}
    num_items = 900
    config = make_run(
        samples.folder(tmp_path / "in", num_images=num_items),
        engine="ray",
        stage=[still, growing, still],
        batch_size=8,
        decode={"num_cpus": 0.5, "items_per_task": 16},
        no_progress_timeout_s=240,
        **heavy_pictures,
    )
    report, rows = embedded(config)
    assert (report.num_items, len(rows)) == (num_items, num_items)
    steps = {step.step: step for step in report.steps}
    assert steps["stage 1"].max_replicas > 1
    first, second = steps["stage 1"].replicas[:2]
    assert (first[1], second[1]) == (1, 2), "it began with one, and gained another while it worked"
    assert steps["stage 2"].max_replicas == 1, "what waits for a slow stage needs no company"
    assert sum(step.num_rows for step in report.steps) == num_items * len(report.steps)
