"""Published models at full size, without weights: our shapes against the library's model on the meta device, plans."""

import json
from collections.abc import Callable
from math import prod
from typing import NamedTuple

import open_clip
import pytest
import timm
import torch
from command_runs import run_here
from library_checkpoints import save_timm
from published_models import PUBLISHED
from tiny_tokenizers import NUM_TOKENS, wordpiece
from tower_checkpoints import save_clip
from transformers import AutoConfig, AutoModel, BertConfig, BertModel
from work import count_calls

from embedder.config import load_config
from embedder.plugins.plan.answer import plan
from shards.convert import import_checkpoint, import_config
from shards.convert.open_clip_config import read_open_clip_config
from shards.convert.open_clip_model import open_clip_sources
from shards.convert.open_clip_towers import read_text, read_vision
from shards.convert.transformers_model import TEMPERATURE, below, prefix_in, their_names
from shards.costs import weight_bytes
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.shard_specs import whole_model
from shards.tensor_shapes import BATCH_COUNTER, OPTIONAL_SHAPES, model_shapes
from shards.towers.registry import CLASSES, IMPORTS, ONE_TOWERS

LARGE = (
    "CLIP ViT-L/14",
    "SigLIP so400m/14-384",
    "SigLIP 2 g/16-384",
    "open_clip ViT-bigG/14",
    "open_clip EVA-02-E/14+",
    "DINOv3 ViT-7B/16",
    "Qwen3-VL-Embedding 8B",
)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Function that gives the folder with a model's `checkpoint` and `model`, both only of configurations."""
    folders = {}

    def find(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("published")
            PUBLISHED[name].describe(folders[name])
        return folders[name]

    return find


class Place(NamedTuple):
    """Where one of our tensors comes from: names of the library's, which rows, whether as (in, out), how computed."""

    names: tuple[str, ...]
    rows: tuple[int, int, int] | None = None
    is_transposed: bool = False
    combine: Callable[[list[torch.Tensor]], torch.Tensor] | None = None


def on_meta(build):
    """Shapes of the tensors of a library's own model, by name."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in build().state_dict().items()}


def of_transformers(folder, ours):
    """The library's shapes, the place of each of our tensors, and the library's names that we ignore."""
    tree = json.loads((folder / "config.json").read_text())
    theirs = on_meta(lambda: AutoModel.from_config(AutoConfig.from_pretrained(folder)))
    kind = tree["model_type"]
    if kind in ONE_TOWERS:
        places, depth = {}, tree["text_config"]["num_hidden_layers"]
        for name in ours:
            found = ONE_TOWERS[kind].place_of(name, depth)
            places[name] = Place((ONE_TOWERS[kind].prefixes[found.prefix] + found.name,), found.rows)
        return theirs, places, ONE_TOWERS[kind].ignored
    if kind not in CLASSES:
        found = IMPORTS[kind]
        inner = {name: name.replace("_head.", ".head.").partition(".")[2] for name in ours}
        places = {name: Place(found.theirs(inner[name], frozenset(theirs)), found.rows_of(name)) for name in ours}
        return theirs, places, found.ignored
    types = {side: each or tree[f"{side}_config"]["model_type"] for side, each in CLASSES[kind].types.items()}
    names, prefixes = ({side: find(theirs, side) for side in types} for find in (below, prefix_in))
    found = {name: IMPORTS[types[name.partition(".")[0].removesuffix("_head")]] for name in ours}
    combined = {name: each.combined.get(name.partition(".")[2]) for name, each in found.items()}
    places = {
        name: Place(their_names(name, types, names, prefixes), each.rows_of(name), combine=combined[name])
        for name, each in found.items()
    }
    return theirs, places, tuple(prefixes[side] + each for side in types for each in IMPORTS[types[side]].ignored)


def of_open_clip(folder, ours):
    settings = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]
    kind = open_clip.CustomTextCLIP if settings.pop("custom_text", False) else open_clip.CLIP
    theirs = on_meta(lambda: kind(**settings))
    described, _ = read_open_clip_config(folder)
    sides = {"vision": read_vision(described, folder), "text": read_text(described, frozenset(theirs), folder)}
    found = open_clip_sources(load_model_config(folder.parent / "model"), sides)
    # A bias that open_clip leaves out comes from nowhere.
    places = {
        name: Place(()) if each is None else Place((each.name,), each.rows, each.is_transposed)
        for name, each in found.items()
    }
    return theirs, places, ()


def of_timm(folder, ours):
    architecture = json.loads((folder / "config.json").read_text())["architecture"]
    theirs = on_meta(lambda: timm.create_model(architecture, num_classes=0))
    return theirs, {name: Place((name.removeprefix("vision."),)) for name in ours}, ()


@pytest.mark.medium
@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_are_the_librarys(name, folder_of):
    model, folder = PUBLISHED[name], folder_of(name)
    read = of_open_clip if model.open_clip else of_timm if model.timm else of_transformers
    ours = model_shapes(load_model_config(folder / "model"))
    theirs, places, ignored = read(folder / "checkpoint", ours)
    assert places.keys() == ours.keys()
    for our_name, place in places.items():
        shapes = [theirs[each] for each in place.names]
        if place.combine is not None:
            assert place.combine([torch.empty(shape, device="meta") for shape in shapes]).shape == ours[our_name]
        elif shapes:
            first, stop, parts = place.rows or (0, 1, 1)
            joined = (sum(shape[0] for shape in shapes) * (stop - first) // parts, *shapes[0][1:])
            expected = without_ones(joined[::-1] if place.is_transposed else joined)
            found = ours[our_name]
            if (
                our_name == "vision.embeds.pos_embed"
            ):  # a NaFlexVit's table is a square of vectors, the library's a list
                found = (prod(found[:-1]), found[-1])
            assert without_ones(found) == expected, our_name
    used = {each for place in places.values() for each in place.names}
    assert [
        each
        for each in theirs
        if each not in used | OPTIONAL_SHAPES.keys() | {TEMPERATURE}
        and not each.startswith(ignored)
        and not each.endswith(BATCH_COUNTER)
    ] == []


def without_ones(shape):
    return tuple(number for number in shape if number > 1)


@pytest.mark.medium
@pytest.mark.parametrize("name", LARGE)
def test_a_plan_for_a_stated_fleet_takes_under_a_second(name, folder_of):
    folder = folder_of(name) / "model"
    run = load_config(overrides={"model": str(folder), "dtype": "bfloat16"})
    answer, num_calls = count_calls(lambda: plan(run, devices="1xH100, 2xL4", estimate=True))
    assert num_calls < 2_500_000, "a second on an idle core"
    memory = {pool.device.name: pool.device.memory_bytes for pool in answer.problem.pools}
    assert all(stage.memory_bytes <= memory[stage.device] for stage in answer.plan.stages)
    config = load_model_config(folder)
    weights = weight_bytes(config, whole_model(config), "bfloat16")
    assert sum(stage.weight_bytes for stage in answer.plan.stages) == weights


@pytest.mark.medium
@pytest.mark.parametrize("name", LARGE)
def test_what_fits_no_device_is_refused(name, folder_of):
    folder = folder_of(name) / "model"
    config = load_model_config(folder)
    third_mb = weight_bytes(config, whole_model(config), "bfloat16") // 3_000_000
    run = load_config(overrides={"model": str(folder), "dtype": "bfloat16"})
    with pytest.raises(ModelError, match="give more or larger devices") as caught:
        plan(run, devices=f"2xA10:{third_mb}MB", estimate=True)
    assert "\n" not in str(caught.value)


def test_the_command_line_goes_from_a_configuration_alone_to_a_plan(tmp_path):
    PUBLISHED["DINOv3 ViT-7B/16"].write(tmp_path / "checkpoint")
    refused = run_here("plan", "--model", tmp_path / "checkpoint", "--estimate")
    assert refused.code == 2
    assert "--config-only" in refused.stderr
    ended = run_here("model", "import", tmp_path / "checkpoint", "--config-only", "--out", tmp_path / "model")
    assert ended.code == 0, ended.stderr
    assert "without weights" in ended.stdout
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]
    options = ["--estimate", "--devices", "3xA10", "--dtype", "bfloat16", "--json"]
    planned = run_here("plan", "--model", tmp_path / "model", *options)
    assert planned.code == 0, planned.stderr
    assert [stage["spec"]["vision"]["stop"] for stage in planned.found["stages"]][-1] == 40


def save_bert(folder):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
    BertModel(BertConfig(vocab_size=NUM_TOKENS, **sizes), add_pooling_layer=False).save_pretrained(folder)
    wordpiece().save_pretrained(folder)


def save_vit(folder):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    model = timm.create_model("vit_small_patch16_224", num_classes=7, **sizes)
    save_timm(model, folder, **sizes)


@pytest.mark.medium
@pytest.mark.parametrize("save", [save_clip, save_bert, save_vit])
def test_beside_weights_the_configuration_is_that_of_the_whole_import(tmp_path, save):
    save(tmp_path / "checkpoint")
    whole = import_checkpoint(tmp_path / "checkpoint", tmp_path / "whole")
    alone = import_config(tmp_path / "checkpoint", tmp_path / "alone")
    assert alone.model_copy(update={"trained": whole.trained}) == whole  # only the weights show that they are random
    assert load_model_config(tmp_path / "alone") == alone


def test_two_checkpoints_are_not_joined_without_their_weights(tmp_path):
    PUBLISHED["ViT-B/16"].write(tmp_path / "checkpoint")
    options = ["--text", tmp_path / "checkpoint", "--config-only", "--out", tmp_path / "model"]
    ended = run_here("model", "import", tmp_path / "checkpoint", *options)
    assert ended.code == 2
    assert "--config-only reads one checkpoint's configuration" in ended.stderr
