"""A shard holds its own tensors, reads no others, and reports what is wrong with a folder."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from shards.costs import weight_bytes
from shards.fresh import init_model
from shards.model_errors import ModelError
from shards.plan import LayerRange, ShardSpec, plan_shards
from shards.reference import TwinTower, load_towers
from shards.shard import load_shard
from shards.shard_specs import whole_model
from shards.tensor_shapes import OPTIONAL_SHAPES, model_shapes, shard_shapes

FIRST = ShardSpec(LayerRange(0, 2), LayerRange(0, 0))
SECOND = ShardSpec(LayerRange(2, 4), LayerRange(0, 1))


@pytest.fixture
def model(make_config, make_model, tmp_path):
    """A folder of one's own to break."""
    return shutil.copytree(make_model(make_config()), tmp_path / "broken")


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("vision", "text"),
    [
        ({}, {}),
        ({"pooler": "tanh", "init_values": 0.1, "num_reg_tokens": 3}, {"num_hidden_groups": 2, "inner_group_num": 2}),
        ({"pool": "avg", "fc_norm": True, "class_token": False, "pre_norm": True}, {"pool": "mean"}),
        ({"final_norm": False, "qkv_bias": False, "no_embed_class": True, "pos_embed": "none"}, {"pool": "cls"}),
    ],
)
def test_names_and_shapes_worked_out_without_torch_are_those_of_the_modules(make_config, vision, text):
    config = make_config(vision, text, projection_bias=True)
    with torch.device("meta"):
        towers = TwinTower(config)
    assert {name: tuple(tensor.shape) for name, tensor in towers.state_dict().items()} == model_shapes(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shard_holds_what_the_plan_says_and_nothing_else(make_config, make_model, dtype):
    config = make_config(text={"num_hidden_groups": 2})
    folder = make_model(config)
    for stage in plan_shards(config, 4, dtype=dtype).stages:
        shard = load_shard(folder, stage.spec, dtype=dtype)
        shapes = shard_shapes(config, stage.spec)
        assert {name: tuple(tensor.shape) for name, tensor in shard.state_dict().items()} == shapes
        assert shard.weight_bytes == stage.weight_bytes == weight_bytes(config, stage.spec, dtype)
        assert shard.num_parameters == sum(torch.Size(shape).numel() for shape in shapes.values())
        assert not any(tensor.is_meta for tensor in (*shard.parameters(), *shard.buffers()))
        assert not any(parameter.requires_grad for parameter in shard.parameters())
        assert not shard.training


def test_a_group_of_shared_weights_is_held_once_and_only_where_it_is_applied(make_config, make_model):
    config = make_config(text={"num_hidden_groups": 2})
    shard = load_shard(make_model(config), ShardSpec(LayerRange(0, 0), LayerRange(2, 4)))
    groups = {name.split(".")[3] for name in shard.state_dict() if "albert_layer_groups" in name}
    assert groups == {"1"}


def test_outputs_are_named_by_what_the_shard_ends_with(make_config, make_model):
    folder = make_model(make_config())
    first, second = load_shard(folder, FIRST), load_shard(folder, SECOND)
    assert (first.output_of("vision"), first.output_of("text")) == ("activation", None)
    assert (second.output_of("vision"), second.output_of("text")) == ("embedding", "activation")


def test_only_the_files_that_hold_a_shards_tensors_are_opened(make_config, make_model, make_batch, tmp_path):
    config = make_config()
    whole = make_model(config)
    parted = shutil.copytree(make_model(config, max_file_bytes=30_000), tmp_path / "parted")
    weight_map = json.loads((parted / "model.safetensors.index.json").read_text())["weight_map"]
    spec = ShardSpec(LayerRange(1, 2), LayerRange(0, 0))
    needed = {weight_map[name] for name in shard_shapes(config, spec)}
    others = set(weight_map.values()) - needed
    assert len(others) > 3
    for name in others:
        (parted / name).write_bytes(b"not to be opened")
    found, expected = load_shard(parted, spec), load_shard(whole, spec)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    for name in others:
        (parted / name).unlink()
    load_shard(parted, spec)
    with pytest.raises(ModelError, match=r"model-0.*can't be read"):
        load_shard(parted, whole_model(config))


def test_tensors_of_other_shards_are_never_read(make_config, make_model, monkeypatch):
    import safetensors

    read = []
    real_open = safetensors.safe_open

    class Watched:
        def __init__(self, *args, **options):
            self.file = real_open(*args, **options)

        def __enter__(self):
            self.inner = self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def get_slice(self, name):
            return self.inner.get_slice(name)

        def get_tensor(self, name):
            read.append(name)
            return self.inner.get_tensor(name)

    monkeypatch.setattr(safetensors, "safe_open", Watched)
    config = make_config()
    load_shard(make_model(config), SECOND)
    assert sorted(read) == sorted(shard_shapes(config, SECOND))


@pytest.mark.parametrize(
    ("change", "spec", "message"),
    [
        (
            lambda tensors: tensors.pop("vision.blocks.1.attn.qkv.weight"),
            FIRST,
            r"broken.*lacks the tensor vision.blocks.1.attn.qkv.weight .*\[96, 32\]",
        ),
        (
            lambda tensors: tensors.update({"vision.cls_token": torch.zeros(1, 1, 31)}),
            FIRST,
            r"model.safetensors.*vision.cls_token.*\[1, 1, 31\], expected \[1, 1, 32\]",
        ),
        (
            lambda tensors: tensors.update({"vision.blocks.4.norm1.bias": torch.zeros(32)}),
            SECOND,
            r"model.safetensors.*vision.blocks.4.norm1.bias",
        ),
        (
            lambda tensors: tensors.update({"vision.cls_token": torch.ones(1, 1, 32, dtype=torch.int8)}),
            FIRST,
            r"model.safetensors: the tensor vision.cls_token has dtype int8, expected one of float.*import the model",
        ),
    ],
    ids=["missing", "misshapen", "unknown", "integers"],
)
def test_a_tensor_that_does_not_fit_is_named_with_its_shapes(model, change, spec, message):
    rewrite(model, change)
    with pytest.raises(ModelError, match=message):
        load_shard(model, spec)
    if "lacks" in message:
        load_shard(model, SECOND)  # does without it


def test_temperature_and_bias_are_allowed_and_not_needed(model):
    assert OPTIONAL_SHAPES == {"logit_scale": (), "logit_bias": ()}
    rewrite(model, lambda tensors: tensors.update({name: torch.tensor(2.6) for name in OPTIONAL_SHAPES}))
    load_towers(model)


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NO_SAFETENSORS = (b"", b"\x00" * 8, b"\xff" * 64, b'\x10\x00\x00\x00\x00\x00\x00\x00{"a": nonsense}}')


def write(content):
    return lambda folder: (folder / WEIGHTS).write_bytes(content)


def cut_off(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


def name_in_index(name):
    def damage(folder):
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(json.dumps({"weight_map": {"vision.cls_token": name}}))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *((write(each), r"model\.safetensors.*fetch it again|lacks the tensor") for each in NO_SAFETENSORS),
        (
            write((200_000).to_bytes(8, "little") + b"[" * 200_000),
            r"model\.safetensors.*fetch it again|lacks the tensor",
        ),
        (cut_off, "cut off"),
        (lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), "safetensors only"),
        *((name_in_index(name), "plain name") for name in ("../secret.safetensors", "/etc/passwd", "weights.bin", "")),
    ],
)
def test_a_folder_without_whole_safetensors_of_its_own_is_refused(model, damage, message):
    damage(model)
    with pytest.raises(ModelError, match=message):
        load_shard(model, FIRST)


def test_specs_beyond_the_model_and_unknown_dtypes_are_refused(make_config, make_model):
    folder = make_model(make_config())
    with pytest.raises(ModelError, match="has 4 of them"):
        load_shard(folder, ShardSpec(LayerRange(0, 5), LayerRange(0, 0)))
    with pytest.raises(ModelError, match=r"float64.*expected one of float32"):
        load_shard(folder, FIRST, dtype="float64")


def test_one_seed_gives_the_same_bytes_and_another_others(make_config, tokenizer_json, tmp_path):
    config = make_config()
    first = init_model(config, tmp_path / "a", seed=1, tokenizer_json=tokenizer_json)
    again = init_model(config, tmp_path / "b", seed=1, tokenizer_json=tokenizer_json)
    other = init_model(config, tmp_path / "c", seed=2, tokenizer_json=tokenizer_json)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]
    assert sorted(path.name for path in first.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_fresh_model_tells_images_and_captions_apart(make_config, make_batch, tmp_path):
    config = make_config()
    folder = init_model(config, tmp_path / "fresh", seed=0)
    found = load_shard(folder, whole_model(config))(make_batch(config, frames=[1] * 8, tokens=range(3, 11)))
    for values in (found.vision.values, found.text.values):
        similarity = values @ values.T - torch.eye(8)
        assert torch.isfinite(values).all()
        assert similarity.max() < 0.999


def test_nothing_is_written_over_what_is_there(make_config, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("mine")
    with pytest.raises(ModelError, match="something already"):
        init_model(make_config(), tmp_path / "full", seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert (tmp_path / "full" / "precious.txt").read_text() == "mine"


def test_a_tokeniser_larger_than_the_vocabulary_is_refused_before_anything_is_written(
    make_config, tokenizer_json, tmp_path
):
    with pytest.raises(ModelError, match="the text tower knows 20"):
        init_model(make_config(text={"vocab_size": 20}), tmp_path / "m", seed=0, tokenizer_json=tokenizer_json)
    assert list(tmp_path.iterdir()) == []
