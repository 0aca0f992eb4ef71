"""Shards against the unsplit towers, and both against the libraries' own forward functions."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from shards.activations import Batch, TowerState
from shards.model_errors import ModelError
from shards.plan import LayerRange, ShardSpec, plan_shards
from shards.reference import load_towers
from shards.shard import load_shard
from shards.shard_specs import text_only, vision_only, whole_model

VARIANTS = {
    "plain": ({}, {}),
    "hugging face": ({"pooler": "tanh", "norm_eps": 1e-12}, {}),
    "averaged": ({"pool": "avg", "fc_norm": True, "class_token": False}, {"pool": "mean"}),
    "dinov2-like": ({"num_reg_tokens": 2, "no_embed_class": True, "init_values": 0.1}, {"pool": "cls"}),
    "clip-like": ({"pre_norm": True, "activation": "quick_gelu", "norm_eps": 1e-5}, {"hidden_act": "gelu"}),
    "bare": ({"final_norm": False, "qkv_bias": False, "pos_embed": "none", "pool": "max"}, {"type_vocab_size": 1}),
    "grouped": ({"mlp_ratio": 2.7}, {"num_hidden_groups": 3, "inner_group_num": 2}),
}


def make_spec(start, stop):
    return ShardSpec(LayerRange(start[0], stop[0]), LayerRange(start[1], stop[1]))


def every_cut(depth_v, depth_t, num_stages):
    points = list(itertools.product(range(depth_v + 1), range(depth_t + 1)))
    for inner in itertools.product(points, repeat=num_stages - 1):
        steps = list(itertools.pairwise([(0, 0), *inner, (depth_v, depth_t)]))
        if all(a[0] <= b[0] and a[1] <= b[1] and a != b for a, b in steps):
            yield [make_spec(a, b) for a, b in steps]


def run(shards, batch):
    for shard in shards:
        batch = shard(batch)
    return batch


@torch.no_grad()
def embed(towers, batch):
    return towers(batch)


def assert_same_bits(found, expected):
    for one, other in ((found.vision, expected.vision), (found.text, expected.text)):
        assert torch.equal(one.lengths, other.lengths)
        assert one.values.dtype == other.values.dtype == torch.float32
        assert torch.equal(one.values, other.values)


def cosines(found, expected):
    return torch.cat(
        [
            torch.cosine_similarity(found.vision.values, expected.vision.values),
            torch.cosine_similarity(found.text.values, expected.text.values),
        ]
    )


@pytest.mark.medium
def test_every_cut_into_any_number_of_stages_equals_the_unsplit_towers(make_config, make_model, make_batch):
    config = make_config({"depth": 2}, {"num_hidden_layers": 2, "num_hidden_groups": 2})
    folder = make_model(config)
    batch = make_batch(config)
    expected = embed(load_towers(folder), batch)
    shards = {}
    for num_stages in (1, 2, 3, 4):
        for specs in every_cut(2, 2, num_stages):
            for spec in specs:
                if spec not in shards:
                    shards[spec] = load_shard(folder, spec)
            assert_same_bits(run([shards[spec] for spec in specs], batch), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_planned_shards_of_every_kind_of_tower_equal_the_unsplit_ones(make_config, make_model, make_batch, variant):
    vision, text = VARIANTS[variant]
    config = make_config(vision, text, projection_bias=variant == "grouped")
    folder = make_model(config)
    batch = make_batch(config)
    expected = embed(load_towers(folder), batch)
    for num_stages in (1, 3, 8):
        stages = plan_shards(config, num_stages).stages
        found = run([load_shard(folder, stage.spec) for stage in stages], batch)
        assert_same_bits(found, expected)
    assert_close(found.vision.values.norm(dim=1), torch.ones(3))
    assert_close(found.text.values.norm(dim=1), torch.ones(3))


@pytest.mark.parametrize("variant", VARIANTS)
def test_embeddings_equal_what_timm_and_transformers_compute_from_the_same_file(
    make_config, make_model, make_batch, variant
):
    """Nothing of this project but the configuration stands between the file and the expected values."""
    from safetensors.torch import load_file
    from timm.models.vision_transformer import VisionTransformer
    from transformers import AlbertConfig, AlbertModel

    config = make_config(*VARIANTS[variant])
    folder = make_model(config)
    weights = load_file(folder / "model.safetensors")

    def of(prefix):
        return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}

    v = config.vision
    vit = VisionTransformer(
        img_size=v.image_size, patch_size=v.patch_size, num_classes=0, global_pool=v.pool, embed_dim=v.width,
        depth=v.depth, num_heads=v.num_heads, mlp_ratio=v.mlp_ratio, qkv_bias=v.qkv_bias, init_values=v.init_values,
        class_token=v.class_token, pos_embed=v.pos_embed, no_embed_class=v.no_embed_class, reg_tokens=v.num_reg_tokens,
        pre_norm=v.pre_norm, final_norm=v.final_norm, fc_norm=v.fc_norm, act_layer=v.activation,
        norm_layer=lambda width, **options: torch.nn.LayerNorm(width, eps=v.norm_eps, **options),
    ).eval()  # fmt: skip
    vit.load_state_dict(of("vision."))
    t = config.text
    fields = t.model_dump(exclude={"pool"})
    albert = AlbertModel(AlbertConfig(**fields, attn_implementation="eager"), t.pool == "pooler").eval()
    albert.load_state_dict(of("text."))

    batch = make_batch(config, frames=(1, 2), tokens=(6, 7))
    mean, std = torch.tensor(config.preprocess.mean), torch.tensor(config.preprocess.std)
    pixels = ((batch.vision.values / 255 - mean) / std).permute(0, 3, 1, 2)
    ids = torch.zeros((2, 7), dtype=torch.long)
    ids[0, :6], ids[1] = batch.text.values[:6], batch.text.values[6:]
    mask = (torch.arange(7) < torch.tensor([[6], [7]])).long()
    with torch.no_grad():
        x = vit.forward_head(vit.forward_features(pixels), pre_logits=True)
        if v.pooler == "tanh":
            x = torch.tanh(x @ weights["vision_head.pooler.weight"].T + weights["vision_head.pooler.bias"])
        images = x @ weights["vision_head.projection.weight"].T
        output = albert(input_ids=ids, attention_mask=mask)
        tokens = output.last_hidden_state
        pooled = {
            "pooler": output.pooler_output,
            "cls": tokens[:, 0],
            "mean": torch.stack([tokens[0, :6].mean(0), tokens[1].mean(0)]),
        }[t.pool]
        captions = pooled @ weights["text_head.projection.weight"].T
    expected_images = torch.stack([images[0], (images[1] + images[2]) / 2])

    found = load_shard(folder, whole_model(config))(batch)
    normalise = torch.nn.functional.normalize
    assert_close(found.vision.values, normalise(expected_images), atol=2e-6, rtol=0)
    assert_close(found.text.values, normalise(captions), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_points_the_same_way(make_config, make_model, make_batch, dtype):
    config = make_config()
    folder = make_model(config)
    batch = make_batch(config, frames=[1] * 20, tokens=range(1, 21))
    expected = embed(load_towers(folder), batch)
    shards = [load_shard(folder, stage.spec, dtype=dtype) for stage in plan_shards(config, 3).stages]
    found = run(shards, batch)
    assert found.vision.values.dtype == found.text.values.dtype == torch.float32
    assert cosines(found, expected).min() >= 0.999
    middle = run(shards[:1], batch)
    assert middle.vision.values.dtype == shards[0].dtype == getattr(torch, dtype)


def test_other_batchings_and_paddings_change_nothing_but_noise(make_config, make_model, make_batch):
    for text in ({}, {"pool": "mean"}):
        config = make_config(text=text)
        shard = load_shard(make_model(config), whole_model(config))
        frames, tokens = [1, 3, 1, 2, 1, 1], [2, 24, 7, 23, 1, 13]
        whole = make_batch(config, frames=frames, tokens=tokens, seed=3)
        together = shard(whole)
        pixels = whole.vision.values.split(frames)
        ids = whole.text.values.split(tokens)
        for rows in ([0], [4], [2, 3], [5, 4, 0], [1, 5]):
            alone = shard(
                Batch(
                    TowerState(torch.cat([pixels[row] for row in rows]), torch.tensor([frames[row] for row in rows])),
                    TowerState(torch.cat([ids[row] for row in rows]), torch.tensor([tokens[row] for row in rows])),
                )
            )
            assert_close(alone.vision.values, together.vision.values[rows], atol=1e-5, rtol=0)
            assert_close(alone.text.values, together.text.values[rows], atol=1e-5, rtol=0)


def test_padding_reaches_no_caption_even_when_its_id_is_loud(make_config, make_model, make_batch, monkeypatch):
    config = make_config()
    shard = load_shard(make_model(config), text_only(config))
    batch = make_batch(config, tokens=(19, 20, 1, 0))
    quiet = shard(batch).text.values
    table = shard.text.embeddings.word_embeddings.weight
    table.data[config.text.pad_token_id] = 1e4
    assert torch.equal(shard(batch).text.values, quiet)


def test_a_video_is_the_mean_of_its_frames_projections(make_config, make_model, make_batch):
    config = make_config()
    folder = make_model(config)
    towers = load_towers(folder)
    batch = make_batch(config, frames=(3, 1), tokens=(0, 0))
    with torch.no_grad():
        projected = towers.project("vision", batch.vision)
    expected = torch.stack([projected[:3].mean(0), projected[3]])
    found = load_shard(folder, vision_only(config))(batch).vision
    assert_close(found.values, expected / expected.norm(dim=1, keepdim=True), atol=1e-6, rtol=0)
    assert found.lengths.tolist() == [1, 1]


@pytest.mark.parametrize(("frames", "tokens"), [((0, 0), (3, 1)), ((1, 2), (0, 0)), ((0, 0), (0, 0)), ((), ())])
def test_batches_without_one_side_or_both_pass_through_every_stage(make_config, make_model, make_batch, frames, tokens):
    config = make_config()
    folder = make_model(config)
    batch = make_batch(config, frames=frames, tokens=tokens)
    shards = [load_shard(folder, stage.spec) for stage in plan_shards(config, 3).stages]
    found = run(shards, batch)
    assert_same_bits(found, embed(load_towers(folder), batch))
    assert found.vision.values.shape == (sum(n > 0 for n in frames), 24)
    assert found.text.values.shape == (sum(n > 0 for n in tokens), 24)
    middle = load_shard(folder, make_spec((0, 0), (1, 1)))(batch)
    assert middle.vision.values.shape == (sum(frames), 17, 32)
    assert middle.text.values.shape == (sum(tokens), 32)
    assert middle.text.lengths.tolist() == list(tokens)


def test_a_missing_side_stays_missing_and_an_empty_range_passes_the_other_untouched(
    make_config, make_model, make_batch
):
    config = make_config()
    folder = make_model(config)
    batch = make_batch(config)
    found = load_shard(folder, text_only(config))(batch)
    assert found.vision is batch.vision
    assert found.text.lengths.tolist() == [1, 1, 0, 1]
    found = load_shard(folder, vision_only(config))(Batch(batch.vision, None))
    assert found.text is None
    assert found.vision.lengths.tolist() == [1, 0, 1, 1]


def test_inputs_are_left_as_they_were(make_config, make_model, make_batch):
    config = make_config()
    shards = [load_shard(make_model(config), stage.spec) for stage in plan_shards(config, 3).stages]
    batch = make_batch(config)
    for shard in shards:
        before = (batch.vision.values.clone(), batch.text.values.clone())
        after = shard(batch)
        assert torch.equal(batch.vision.values, before[0])
        assert torch.equal(batch.text.values, before[1])
        batch = after


def test_what_does_not_fit_the_front_is_refused_in_one_line(make_config, make_model, make_batch):
    config = make_config()
    shard = load_shard(make_model(config), whole_model(config))
    good = make_batch(config, frames=(1,), tokens=(1,))
    one = torch.tensor([1])
    for pixels in (
        torch.zeros((1, 16, 16, 3), dtype=torch.uint8),
        torch.zeros((1, 32, 32, 3)),
        torch.zeros((1, 3, 32, 32)),
    ):
        with pytest.raises(ModelError, match=r"pixels: found .* \[F, 32, 32, 3\]"):
            shard(Batch(TowerState(pixels, one), good.text))
    for ids in ([120], [-1]):
        with pytest.raises(ModelError, match="vocabulary is"):
            shard(Batch(None, TowerState(torch.tensor(ids, dtype=torch.int32), one)))
    with pytest.raises(ModelError, match="25 tokens, the model takes 24"):
        shard(Batch(None, TowerState(torch.ones(25, dtype=torch.int32), torch.tensor([25]))))
