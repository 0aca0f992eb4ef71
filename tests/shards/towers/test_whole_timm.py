"""timm's models without layers of one width, held whole: timm's and open_clip's own features, bits, costs, refusals."""

import json
import re

import open_clip
import pytest
import timm
import torch
from command_runs import run_here
from library_checkpoints import open_clip_convnext, open_clip_mobileclip, save_timm, timm_convnext, timm_swin
from safetensors.torch import load_file, save_file
from tower_checks import check_against, check_every_cut, check_refused, embed_whole, make_batch, randomise, vectors
from tower_families import NUM_TOKENS

from shards.convert import import_checkpoint, import_config
from shards.costs import weight_bytes
from shards.fingerprint import model_fingerprint
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.onnx_export import export_towers
from shards.plan import plan_shards
from shards.planning.devices import DEVICES
from shards.planning.planning_costs import estimate_costs
from shards.shard import load_shard
from shards.shard_specs import whole_model

SIZE = 32
WINDOWS = {"img_size": SIZE, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
FASTVIT = {"layers": (1, 1, 1, 1), "embed_dims": (16, 32, 64, 128)}

# Each has parts that the others lack.
MODELS = {
    "test_convnext": {},  # LayerNorms of channels, linear layers inside
    "convnext_atto": {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)},
    "test_resnet": {},  # BatchNorms
    "test_efficientnet": {},  # squeeze and excitation
    "test_byobnet": {},
    "fastvit_mci0": FASTVIT,  # branches that training has, and attention
    "swin_tiny_patch4_window7_224": WINDOWS,  # tables that no weight file holds
    "hiera_tiny_224": {"img_size": (SIZE, SIZE), "embed_dim": 16, "stages": (1, 1), "q_pool": 1, "num_heads": 1},
    "deit_tiny_distilled_patch16_224": {"img_size": SIZE, "embed_dim": 32, "depth": 2, "num_heads": 2},
}


def save_model(folder, name, settings):
    torch.manual_seed(0)
    model = randomise(timm.create_model(name, num_classes=7, **settings))
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("running_mean"):
                buffer.uniform_(-0.3, 0.3)
            elif key.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    model.pretrained_cfg |= {"input_size": (3, SIZE, SIZE)}
    save_timm(model, folder, **settings)
    return model


@pytest.fixture(scope="module", params=MODELS)
def tower(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    model = save_model(folder / "checkpoint", request.param, MODELS[request.param])
    import_checkpoint(folder / "checkpoint", folder / "model")
    return folder / "model", model


def batch_of(folder):
    config = load_model_config(folder)
    captions = [[1, *range(10, 10 + number), NUM_TOKENS - 1] for number in (1, 13, 9, 14)]
    return make_batch(config, captions, num_images=5)


def test_an_imported_model_gives_timms_own_features(tower):
    folder, model = tower
    preprocess = load_model_config(folder).preprocess

    def images(state):
        mean, std = torch.tensor(preprocess.mean), torch.tensor(preprocess.std)
        pixels = ((state.values / 255 - mean) / std).permute(0, 3, 1, 2)
        return model.forward_head(model.forward_features(pixels), pre_logits=True)

    check_against(folder, batch_of(folder), {"vision": images})
    found = embed_whole(folder, batch_of(folder))["vision"]
    assert (found @ found.T).fill_diagonal_(0).max() < 0.9999, "images that differ must matter"


def test_it_gives_the_bits_of_timms_own_forward_functions_in_one_stage(tower):
    check_every_cut(tower[0], batch_of(tower[0]))


@pytest.mark.parametrize(("dtype", "least"), [("int8", 0.995), ("bfloat16", 0.99)])
def test_other_dtypes_have_the_planned_bytes_and_come_close(tower, dtype, least):
    folder, _ = tower
    config, batch = load_model_config(folder), batch_of(folder)
    shard = load_shard(folder, whole_model(config), dtype=dtype)
    assert shard.weight_bytes == weight_bytes(config, whole_model(config), dtype)
    exact = vectors(load_shard(folder, whole_model(config))(batch))["vision"]
    assert torch.cosine_similarity(vectors(shard(batch))["vision"], exact).min() >= least
