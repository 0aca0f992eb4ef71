"""timm's NaFlexVit and NaFlex SigLIP 2: their checkpoints against their own features, every cut, every part."""

from pathlib import Path

import pytest
import timm
import torch
from library_checkpoints import save_timm
from library_versions import is_older
from siglip_checkpoints import LENGTH, WIDTH, save_naflex_siglip2
from torch.nn.utils.rnn import pad_sequence
from tower_checkpoints import edit_json
from tower_checks import (
    GRIDS,
    check_against,
    check_every_cut,
    check_every_part_matters,
    check_refused,
    embed_whole,
    make_batch,
    randomise,
)

from embedder.plugins.train.trainer.train_settings import TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer
from shards.activations import Batch, TowerState
from shards.convert import import_checkpoint
from shards.convert.timm_vision import read_timm_tower
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.shard import load_shard
from shards.shard_specs import whole_model

SMALL = {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "pos_embed_grid_size": (5, 5)}
BUDGET = 36

# Each has parts that the others lack.
MODELS = {
    "naflexvit_base_patch16_gap": SMALL,  # registers, LayerScale, average behind which the norm comes
    "naflexvit_base_patch16_par_gap": SMALL,  # a table that is resized to a square
    "naflexvit_base_patch16_parfac_gap": SMALL,  # two tables
    "naflexvit_base_patch16_map": SMALL,  # attention pooling next to a register
    "naflexvit_base_patch16_siglip": SMALL,  # bilinear resizing of the table
    "naflexvit_so150m2_patch16_reg1_gap": SMALL | {"mlp_ratio": 3},  # no bias of q, k and v
    "naflexvit_base_patch16_radio_v3": SMALL | {"reg_tokens": 2},  # class token, no norm at the end
}
needs_newest = pytest.mark.skipif(not timm.is_model("naflexvit_base_patch16_radio_v3"), reason="before timm 1.0.31")


@pytest.fixture(scope="module", params=[pytest.param(name, marks=needs_newest) for name in MODELS])
def tower(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tower")
    size = {"input_size": (3, 48, 48)}
    model = timm.create_model(request.param, num_classes=5, pretrained_cfg_overlay=size, **MODELS[request.param])
    save_timm(randomise(model), folder / "checkpoint", **MODELS[request.param])
    import_checkpoint(folder / "checkpoint", folder / "model")
    return folder / "model", model


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("siglip")
    model = save_naflex_siglip2(folder / "checkpoint")
    import_checkpoint(folder / "checkpoint", folder / "model")
    return folder / "model", model


@pytest.fixture
def siglip_batch(siglip):
    captions = [[5 + row] * (LENGTH - 1) + [1] for row in range(len(GRIDS))]
    return make_batch(load_model_config(siglip[0]), captions)


def frames_of(folder, state):
    """Normalised patches of each frame, padded as libraries do it; their numbers; rows and columns; rows' frames."""
    preprocess = load_model_config(folder).preprocess
    mean, std = torch.tensor(preprocess.mean), torch.tensor(preprocess.std)
    grids = state.grids[state.grids[:, 0] > 0].long()
    shapes = grids[:, 1:].repeat_interleave(grids[:, 0], 0)
    values = ((state.values.view(len(state.values), -1, 3) / 255 - mean) / std).flatten(1)
    frames = values.split(shapes.prod(1).tolist())
    return pad_sequence(list(frames), batch_first=True), shapes.prod(1), shapes, grids[:, 0].tolist()


def mean_of_rows(features, frames_per_row):
    return torch.stack([row.mean(0) for row in features.split(frames_per_row)])


def test_an_imported_tower_gives_timms_own_features(tower):
    folder, model = tower

    def images(state):
        patches, lengths, shapes, frames_per_row = frames_of(folder, state)
        number = torch.arange(patches.shape[1])
        valid = number < lengths[:, None]
        coordinates = torch.stack([number // shapes[:, 1:], number % shapes[:, 1:]], -1) * valid[..., None]
        features = model.forward_features(patches, patch_coord=coordinates, patch_valid=valid)
        return mean_of_rows(model.forward_head(**features, pre_logits=True), frames_per_row)

    config = load_model_config(folder)
    assert (config.vision.max_patches, config.preprocess.resampler) == (BUDGET, "pillow")
    check_against(folder, make_batch(config, []), {"vision": images})


def test_every_cut_gives_the_bits_of_the_unsplit_tower(tower):
    check_every_cut(tower[0], make_batch(load_model_config(tower[0]), []))


@pytest.mark.slow
def test_no_part_can_be_left_out(tower, tmp_path):
    check_every_part_matters(tower[0], make_batch(load_model_config(tower[0]), []), tmp_path)


def test_an_imported_siglip_2_gives_transformers_own_features(siglip, siglip_batch):
    folder, model = siglip

    def images(state):
        patches, lengths, shapes, frames_per_row = frames_of(folder, state)
        mask = (torch.arange(patches.shape[1]) < lengths[:, None]).int()
        output = model.get_image_features(pixel_values=patches, pixel_attention_mask=mask, spatial_shapes=shapes)
        return mean_of_rows(output.pooler_output, frames_per_row)

    def captions(state):
        return model.get_text_features(input_ids=state.values.long().view(-1, LENGTH)).pooler_output

    check_against(folder, siglip_batch, {"vision": images, "text": captions})


@pytest.mark.skipif(not is_older("transformers", "5.24"), reason="from 5.24 on transformers does without that layout")
def test_an_image_one_patch_wide_has_transformers_own_vector(siglip):
    folder, model = siglip
    patches = torch.randint(0, 256, (30, 192), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    state = TowerState(patches, torch.tensor([30]), torch.tensor([[1, 30, 1]], dtype=torch.int32))
    values, _, shapes, _ = frames_of(folder, state)
    mask = torch.ones(1, 30, dtype=torch.int32)
    with torch.no_grad():
        output = model.get_image_features(pixel_values=values, pixel_attention_mask=mask, spatial_shapes=shapes)
    expected = torch.nn.functional.normalize(output.pooler_output, dim=-1)
    assert (embed_whole(folder, Batch(state, None))["vision"] - expected).abs().max() < 1e-5


@pytest.mark.medium
def test_every_cut_of_a_siglip_2_gives_the_bits_of_the_unsplit_towers(siglip, siglip_batch):
    check_every_cut(siglip[0], siglip_batch)


@pytest.mark.medium
def test_no_part_of_a_siglip_2_can_be_left_out(siglip, siglip_batch, tmp_path):
    check_every_part_matters(siglip[0], siglip_batch, tmp_path)


def test_a_siglip_2_has_the_processors_budget_and_its_own_projections(siglip):
    config = load_model_config(siglip[0])
    assert (config.vision.family, config.vision.max_patches, config.vision.image_size) == ("naflex", BUDGET, 40)
    assert (config.preprocess.resize, config.preprocess.interpolation) == ("patches", "bilinear")
    assert (config.preprocess.resampler, config.preprocess.reduced_decode) == ("torchvision", False)
    assert (config.embedding_dim, config.vision_projection, config.text.family) == (WIDTH, "none", "siglip_text")


def test_an_image_has_the_same_vector_beside_any_others(tower):
    batch = make_batch(load_model_config(tower[0]), []).vision
    together = embed_whole(tower[0], Batch(batch, None))["vision"]
    rows = batch.lengths.nonzero().flatten()
    alone = [embed_whole(tower[0], Batch(batch.take(row), None))["vision"] for row in rows.split(1)]
    assert (torch.cat(alone) - together).abs().max() < 1e-6


def test_little_padding_is_computed(siglip):
    """Sides of 1 to 6 patches: half of a rectangle of all of them would be padding."""
    config = load_model_config(siglip[0])
    sides = torch.randint(1, 7, (64, 2), generator=torch.Generator().manual_seed(1))
    grids = torch.cat([torch.ones(64, 1, dtype=torch.int64), sides], 1)
    patches = torch.zeros((int(grids.prod(1).sum()), 3 * 8 * 8), dtype=torch.uint8)
    shard, computed = load_shard(siglip[0], whole_model(config)), []
    shard.vision.blocks[0].register_forward_hook(lambda _, inputs, __: computed.append(inputs[0].shape[:2].numel()))
    shard(Batch(TowerState(patches, grids.prod(1), grids.int()), None))
    assert len(patches) <= sum(computed) <= 1.1 * len(patches) < 0.6 * 64 * BUDGET


def test_patches_without_their_grids_or_of_others_are_refused(siglip, siglip_batch):
    shard, state = load_shard(siglip[0], whole_model(load_model_config(siglip[0]))), siglip_batch.vision
    squares = torch.zeros((1, 40, 40, 3), dtype=torch.uint8)
    wrong = [
        (TowerState(state.values, state.lengths), "come with their grids"),
        (TowerState(state.values, state.lengths, state.grids.flip(0)), "their grids"),
        (TowerState(squares, torch.ones(1, dtype=torch.int64)), r"the model takes torch.uint8 \[N, 192\]"),
    ]
    for vision, message in wrong:
        with pytest.raises(ModelError, match=message):
            shard(Batch(vision, None))


def test_training_is_refused(siglip):
    with pytest.raises(ModelError, match="training takes images of one size"):
        Trainer(siglip[0], TrainSettings(num_steps=1, warmup_steps=0))


def fixed_processor(folder):
    from transformers import SiglipImageProcessor

    SiglipImageProcessor(size={"height": 40, "width": 40}).save_pretrained(folder)


def edit(file, **changes):
    return lambda folder: edit_json(folder / file, **changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit("config.json", vision_config__num_patches=24), "num_patches = 24; a position table is a square"),
        (edit("config.json", vision_config__num_patches=36), r"position_embedding.weight has shape .*25"),
        (edit("preprocessor_config.json", patch_size=16), "patch_size = 16: expected patches of 8 px"),
        (edit("preprocessor_config.json", max_num_patches=0), "max_num_patches = 0: expected a number of patches"),
        (fixed_processor, "patch_size = None: expected patches of 8 px"),
        (
            edit("config.json", vision_config__model_type="siglip_vision_model", vision_config__image_size=40),
            "size = None",
        ),
    ],
)
def test_a_bad_checkpoint_is_refused_in_one_line(tmp_path, damage, message):
    folder = tmp_path / "checkpoint"
    save_naflex_siglip2(folder)
    damage(folder)
    check_refused(import_checkpoint, folder, tmp_path / "model", message)


def test_a_timm_that_does_not_say_how_positions_are_resized_is_named(monkeypatch):
    model = timm.create_model("naflexvit_base_patch16_gap", **SMALL | {"embed_dim": 64})
    monkeypatch.delattr(model.embeds, "channels_last", raising=False)
    with pytest.raises(ModelError, match=r"channels_last.*; timm 1\.0\.31 does: pip install 'timm>=1\.0\.31'"):
        read_timm_tower(model, Path("checkpoint"))


@needs_newest
@pytest.mark.parametrize("changes", [{"pos_embed_use_grid_sample": True}, {"rope_type": "axial"}])
def test_other_positions_are_refused(changes):
    model = timm.create_model("naflexvit_base_patch16_gap", **SMALL | {"embed_dim": 64} | changes)
    with pytest.raises(ModelError, match="rotary or sampled positions"):
        read_timm_tower(model, Path("checkpoint"))


@needs_newest
def test_shapes_at_full_size_are_those_of_timms_models(tmp_path):
    for name in timm.list_models("naflexvit_*"):
        with torch.device("meta"):
            model = timm.create_model(name, num_classes=0, depth=1)  # a number that changes no kind of part
        found = read_timm_tower(model, tmp_path)
        assert found.shapes(LayerRange(0, found.num_layers)) == {
            key: tuple(tensor.shape) for key, tensor in model.state_dict().items()
        }
