"""A tower alone: its checkpoint against its own library's features, every cut, plans, and what is refused."""

import json

import pytest
import torch
from library_checkpoints import save_timm
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tower_checks import check_against, check_every_cut, make_batch, randomise

from embedder.plugins.train.trainer.settings import TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer
from shards.config import ModelConfig, load_model_config
from shards.convert import import_checkpoint
from shards.errors import ModelError
from shards.fingerprint import model_fingerprint
from shards.int8_benefit import measure_int8_benefit
from shards.plan import check_plan, plan_placement, plan_shards
from shards.planning.costs import DataMix, estimate_costs, estimate_host
from shards.planning.devices import parse_devices
from shards.planning.explain import compare_with_equal_parts
from shards.planning.problem import make_problem
from shards.planning.what_if import what_if
from shards.preprocess import PreprocessConfig
from shards.profile import TimingSetting, measure_costs
from shards.shard_specs import text_only, vision_only
from shards.summary import describe_model
from shards.towers.vit import VitTower

SIZE, DEPTH = 32, 3
VISION = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 8,
}
TEXT = {
    "vocab_size": 120,
    "embedding_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
CAPTIONS = ["a red car", "two cats sleep on a green sofa", "fruit"]


def save_vit(folder, class_name="ViTModel"):
    import transformers

    model = randomise(getattr(transformers, class_name)(transformers.ViTConfig(**VISION)))
    model.save_pretrained(folder)
    size = {"height": SIZE, "width": SIZE}
    transformers.ViTImageProcessor(size=size).save_pretrained(folder)
    return model


def save_albert(folder, tokenizer_json):
    import transformers

    model = randomise(transformers.AlbertModel(transformers.AlbertConfig(**TEXT)))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer_json)
    return model


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """Imported folder, and transformers' model."""
    folder = tmp_path_factory.mktemp("vit")
    model = save_vit(folder / "checkpoint")
    import_checkpoint(folder / "checkpoint", folder / "model")
    return folder / "model", model


@pytest.fixture(scope="module")
def albert(tmp_path_factory, tokenizer_json):
    """Imported folder, and transformers' model."""
    folder = tmp_path_factory.mktemp("albert")
    model = save_albert(folder / "checkpoint", tokenizer_json)
    import_checkpoint(folder / "checkpoint", folder / "model")
    return folder / "model", model


def batch_of(folder):
    config = load_model_config(folder)
    tokenizer = folder / "tokenizer.json"
    captions = []
    if config.text is not None:
        captions = [Tokenizer.from_file(str(tokenizer)).encode(caption).ids for caption in CAPTIONS]
    return make_batch(config, captions)


@pytest.fixture(params=["vit", "albert"])
def folder(request):
    return request.getfixturevalue(request.param)[0]


def test_an_imported_vit_gives_transformers_own_pooled_features(vit):
    folder, model = vit
    preprocess = load_model_config(folder).preprocess
    mean, std = torch.tensor(preprocess.mean), torch.tensor(preprocess.std)

    def images(state):
        return model(((state.values / 255 - mean) / std).permute(0, 3, 1, 2)).pooler_output

    check_against(folder, batch_of(folder), {"vision": images})


def test_an_imported_albert_gives_transformers_own_pooled_features(albert):
    folder, model = albert

    def captions(state):
        ids = torch.nn.utils.rnn.pad_sequence(state.values.split(state.lengths.tolist()), batch_first=True)
        mask = torch.arange(ids.shape[1]) < state.lengths[:, None]
        return model(input_ids=ids.long(), attention_mask=mask.long()).pooler_output

    check_against(folder, batch_of(folder), {"text": captions})


def test_every_cut_gives_the_bits_of_the_unsplit_tower(folder):
    check_every_cut(folder, batch_of(folder))


def test_a_vit_with_a_classifier_around_it_is_imported_without_it(tmp_path, vit):
    save_vit(tmp_path / "checkpoint", "ViTForImageClassification")
    config = import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
    assert config.vision == load_model_config(vit[0]).vision.model_copy(update={"pooler": "none"})
    check_every_cut(tmp_path / "model", batch_of(tmp_path / "model"))


def test_a_timm_checkpoint_becomes_a_vision_model(tmp_path):
    import timm

    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_small_patch16_224", num_classes=7, **sizes)
    save_timm(randomise(model), tmp_path / "checkpoint", **sizes)
    import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
    config, batch = load_model_config(tmp_path / "model"), batch_of(tmp_path / "model")
    mean, std = torch.tensor(config.preprocess.mean), torch.tensor(config.preprocess.std)

    def images(state):
        pixels = ((state.values / 255 - mean) / std).permute(0, 3, 1, 2)
        return model.forward_head(model.forward_features(pixels), pre_logits=True)

    assert (config.text, config.embedding_dim, config.trained) == (None, 32, True)
    check_against(tmp_path / "model", batch, {"vision": images})


def test_a_tower_alone_is_planned_and_measured(folder):
    config = load_model_config(folder)
    for number in range(1, DEPTH + 1):
        plan = plan_shards(config, number)
        check_plan(plan, config)
        assert len(plan.stages) == number
    with pytest.raises(ModelError, match="ask for 1 to 3"):
        plan_shards(config, DEPTH + 1)
    fleet = parse_devices("2xT4, 8xCPU")
    costs = {device.name: estimate_costs(config, device, "float32") for _, device in fleet}
    problem = make_problem(config, fleet, costs, estimate_host(config), mix=DataMix(), dtype="float32")
    assert {problem.mix.images_per_item, problem.mix.captions_per_item} == {0.0, 1.0}
    assert plan_placement(problem, 2).items_per_s > 0
    assert compare_with_equal_parts(problem, 2).planned > 0
    assert what_if(problem, 2, 1000).hours > 0
    measured = measure_costs(folder, TimingSetting(num_rows=2))
    assert {side for side in ("vision", "text") if getattr(measured, side).layer_s > 0} == config.towers.keys()
    assert measure_int8_benefit(folder).seconds["int8"] > 0


def test_a_deep_tower_alone_is_planned():
    config = ModelConfig(
        name="deep",
        trained=True,
        embedding_dim=64,
        vision=VitTower(depth=40, width=64, num_heads=2),
        text=None,
        preprocess=PreprocessConfig(),
        vision_projection="none",
    )
    assert [len(stage.spec.vision) for stage in plan_shards(config, 4).stages] == [10, 10, 10, 10]


def test_items_without_the_towers_inputs_are_refused(vit):
    config = load_model_config(vit[0])
    with pytest.raises(ModelError, match="items without images, and model 'checkpoint' has a vision tower alone"):
        plan_shards(config, 1, mix=DataMix(images_per_item=0))


def test_the_missing_tower_is_named(vit, albert):
    with pytest.raises(ModelError, match="has no text tower"):
        text_only(load_model_config(vit[0]))
    with pytest.raises(ModelError, match="has no vision tower"):
        vision_only(load_model_config(albert[0]))
    with pytest.raises(ModelError, match="vision tower alone; training needs two towers"):
        Trainer(vit[0], TrainSettings())
    parts = [part.name for part in describe_model(vit[0]).parts]
    assert parts == ["vision front", "vision layers", "vision head"]


def test_a_model_has_one_tower_at_least():
    with pytest.raises(ValueError, match="has one tower at least"):
        ModelConfig(name="none", trained=True, embedding_dim=1, vision=None, text=None, preprocess=PreprocessConfig())


def test_a_missing_tower_counts_in_no_fingerprint(vit, albert):
    assert model_fingerprint(vit[0]) != model_fingerprint(albert[0])


def config_of(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_that_claims_another_family_is_refused(tmp_path):
    save_vit(tmp_path / "checkpoint")
    config_of(tmp_path / "checkpoint", model_type="albert")
    with pytest.raises(ModelError, match="which a albert of that configuration hasn't"):
        import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": '{"model_type": "gpt2"}'}, "says model_type = 'gpt2'; .*clip.*vit.*open_clip_conf"),
        ({"config.json": '{"hidden_size": 3}'}, "config.json has neither model_type nor architecture"),
        ({"notes.txt": ""}, "found no config.json and no open_clip_config.json, but notes.txt"),
        ({"config.json": '{"format_version": 1}'}, "this is a model folder already"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        import_checkpoint(tmp_path, tmp_path / "model")


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_missing_and_extra_tensors_are_refused(tmp_path, vit, change):
    save_vit(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    weights = load_file(path)
    if change == "missing":
        del weights[next(name for name in weights if name.endswith("layernorm.weight"))]
    else:
        weights["more.weight"] = torch.ones(2)
    save_file(weights, path)
    with pytest.raises(ModelError, match=r"lack the tensor layernorm.weight|found the tensor more.weight"):
        import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
    assert not (tmp_path / "model").exists()
