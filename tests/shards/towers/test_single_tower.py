"""A single tower: its plans and costs, and what is refused; its features are in test_transformers."""

import library_checkpoints as checkpoints
import pytest
from tower_checkpoints import edit_json

from embedder.plugins.train.trainer.train_settings import TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer
from shards.convert import import_checkpoint
from shards.int8_benefit import measure_int8_benefit
from shards.model_config import ModelConfig, load_model_config
from shards.model_errors import ModelError
from shards.model_summary import describe_model
from shards.plan import check_plan, plan_placement, plan_shards
from shards.planning.devices import parse_devices
from shards.planning.explain import compare_with_equal_parts
from shards.planning.planning_costs import DataMix, estimate_costs, estimate_host
from shards.planning.problem import make_problem
from shards.planning.what_if import what_if
from shards.preprocess import PreprocessConfig
from shards.profile import TimingSetting, measure_costs
from shards.shard_specs import text_only, vision_only
from shards.towers.vit import VitTower

DEPTH = 3


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """Imported folder."""
    return imported(checkpoints.vit, tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def albert(tmp_path_factory):
    """Imported folder."""
    return imported(checkpoints.albert, tmp_path_factory.mktemp("albert"))


def imported(save, folder):
    save(folder / "checkpoint")
    import_checkpoint(folder / "checkpoint", folder / "model")
    return folder / "model"


@pytest.fixture(params=["vit", "albert"])
def folder(request):
    return request.getfixturevalue(request.param)


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
    config = load_model_config(vit)
    with pytest.raises(ModelError, match="items without images, and model 'checkpoint' has only a vision tower"):
        plan_shards(config, 1, mix=DataMix(images_per_item=0))


def test_the_missing_tower_is_named(vit, albert):
    with pytest.raises(ModelError, match="has no text tower"):
        text_only(load_model_config(vit))
    with pytest.raises(ModelError, match="has no vision tower"):
        vision_only(load_model_config(albert))
    with pytest.raises(ModelError, match="only a vision tower; training needs two towers"):
        Trainer(vit, TrainSettings())
    parts = [part.name for part in describe_model(vit).parts]
    assert parts == ["vision front", "vision layers", "vision head"]


def test_a_model_has_one_tower_at_least():
    with pytest.raises(ValueError, match="has one tower at least"):
        ModelConfig(name="none", trained=True, embedding_dim=1, vision=None, text=None, preprocess=PreprocessConfig())


def test_a_folder_that_claims_another_family_is_refused(tmp_path):
    checkpoints.vit(tmp_path / "checkpoint")
    edit_json(tmp_path / "checkpoint" / "config.json", model_type="albert")
    with pytest.raises(ModelError, match="which a albert of that configuration hasn't"):
        import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": '{"model_type": "gpt2"}'}, "says model_type = 'gpt2'; .*clip.*vit.*open_clip_conf"),
        (
            {"config.json": '{"model_type": "jina_clip", "auto_map": {"AutoModel": "modeling_clip.JinaCLIPModel"}}'},
            "model_type = 'jina_clip', a model of its own repository's code .modeling_clip.JinaCLIPModel., which is "
            "never run; it would need a class of transformers, timm or open_clip, or run it from a program of yours",
        ),
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
