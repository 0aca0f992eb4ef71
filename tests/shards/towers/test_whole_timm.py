"""timm's models without layers of one width, held whole: timm's and open_clip's own features, bits, costs, refusals."""

import io
import json
import re

import pytest
import timm
import torch
from command_runs import run_here
from library_checkpoints import open_clip_convnext, open_clip_mobileclip, save_timm, timm_convnext, timm_swin
from onnxruntime import InferenceSession
from PIL import Image
from safetensors.torch import load_file, save_file
from tower_checks import check_against, check_every_cut, check_refused, embed_whole, make_batch, randomise, vectors
from tower_families import NUM_TOKENS

from embedder.encoders.query_encoder import QueryEncoder
from embedder.models.model_folder import open_model
from embedder.steps.caption_encoder import CaptionEncoder
from shards.convert import import_checkpoint, import_config
from shards.convert.whole_models import describe_whole
from shards.costs import weight_bytes
from shards.fingerprint import model_fingerprint
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.onnx_export import export_towers
from shards.plan import plan_shards
from shards.ranges import LayerRange
from shards.shard import load_shard
from shards.shard_specs import whole_model

SIZE = 32


def as_png(image):
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


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


def check_features(folder, model):
    """Check vectors against timm's own."""
    preprocess = load_model_config(folder).preprocess

    def images(state):
        mean, std = torch.tensor(preprocess.mean), torch.tensor(preprocess.std)
        pixels = ((state.values / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()  # others take other kernels
        return model.forward_head(model.forward_features(pixels), pre_logits=True)

    check_against(folder, batch_of(folder), {"vision": images})
    found = embed_whole(folder, batch_of(folder))["vision"]
    assert (found @ found.T).fill_diagonal_(0).max() < 0.9999, "images that differ must matter"


def test_an_imported_model_gives_timms_own_features(tower):
    check_features(*tower)


@pytest.mark.medium
def test_a_hybrid_is_imported_without_asking_the_web(tmp_path, monkeypatch):
    """timm, asked to load weights, fetches those of the backbone first."""
    asked, settings = [], {"img_size": SIZE, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = save_model(tmp_path / "checkpoint", "vit_small_resnet26d_224", settings)

    def refuse_to_resolve(host, *_, **__):
        asked.append(host)
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", refuse_to_resolve)
    import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
    assert asked == []
    stored, own = load_file(tmp_path / "model" / "model.safetensors"), model.state_dict()
    assert len(stored) > 100
    assert all(torch.equal(tensor, own[name.removeprefix("vision.")]) for name, tensor in stored.items())


@pytest.mark.medium
def test_weights_of_older_names_are_renamed_as_timm_renames_them(tmp_path):
    """Here to those of ConvNeXt's authors."""
    model = save_model(tmp_path / "checkpoint", "test_convnext", {})
    path, older = tmp_path / "checkpoint" / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        for now, before in {".blocks.": ".", "head.norm": "norm", "head.fc": "head", "mlp.fc": "pwconv"}.items():
            name = name.replace(now, before)  # noqa: PLW2901 - step by step
        older[name] = tensor
    save_file(older, path)
    import_checkpoint(tmp_path / "checkpoint", tmp_path / "renamed")
    check_features(tmp_path / "renamed", model)


@pytest.mark.medium
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


@pytest.mark.slow
@pytest.mark.parametrize("save", [open_clip_mobileclip, open_clip_convnext])
def test_clips_of_open_clip_are_cut_in_their_texts_alone_and_give_its_features(tmp_path, save):
    """The FastViT of MobileCLIP has branches of training, and its captions see their padding."""
    library = save(tmp_path / "checkpoint")
    config = import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
    assert (config.vision.is_whole, config.num_layers) == (True, {"vision": 1, "text": 3})
    model = open_model(str(tmp_path / "model"))
    found = QueryEncoder(model)
    captions = ["a red car", "two cats sleep " * 12, ".", "A RED Car, isn't it?!"]
    images = [Image.effect_noise(size, 90).convert("RGB") for size in ((64, 64), (90, 31), (7, 200))]
    vectors_by_side = {
        "texts": (torch.from_numpy(found.encode_text(captions)), library.texts(captions)),
        "images": (torch.from_numpy(found.encode_image([as_png(each) for each in images])), library.images(images)),
    }
    for ours, theirs in vectors_by_side.values():
        assert (ours - torch.nn.functional.normalize(theirs, dim=-1)).abs().max() < 1e-5
        assert (ours[0] - ours[1]).abs().max() > 1e-2
    encoder = CaptionEncoder(model.tokenizer_json, config.preprocess.max_caption_tokens, config.text.end_id)
    check_every_cut(tmp_path / "model", make_batch(config, [encoder.encode(each).tolist() for each in captions]))


@pytest.mark.medium
def test_a_plan_says_that_one_stage_holds_the_image_tower_whole(tmp_path):
    open_clip_convnext(tmp_path / "checkpoint")
    config = import_config(tmp_path / "checkpoint", tmp_path / "model")
    stages = plan_shards(config, 3).stages
    assert sorted(len(stage.spec.vision) for stage in stages) == [0, 0, 1]
    assert sum(len(stage.spec.text) for stage in stages) == 3
    ended = run_here("plan", "--model", tmp_path / "model", "--estimate", "--devices", "2xL4", "--stages", "2")
    assert ended.code == 0, ended.stderr
    said = "image tower (test_convnext of timm, whole, 64 px to 64 values): one stage holds it, as no cut can keep"
    assert said in " ".join(ended.stdout.split())


def test_its_work_is_counted_once_and_no_fingerprint_counts_it(tmp_path):
    timm_convnext(tmp_path / "checkpoint")
    config = import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
    before = model_fingerprint(tmp_path / "model")
    tower = config.vision
    doubled = 2 * tower.costs.flops
    costs = tower.costs.model_copy(update={"flops": doubled})
    changed = config.model_copy(update={"vision": tower.model_copy(update={"costs": costs})})
    (tmp_path / "model" / "config.json").write_text(changed.to_json())
    assert model_fingerprint(tmp_path / "model") == before
    assert plan_shards(load_model_config(tmp_path / "model"), 1).stages[0].flops_per_image == doubled
    other = config.model_copy(update={"vision": tower.model_copy(update={"architecture": "test_convnext2"})})
    (tmp_path / "model" / "config.json").write_text(other.to_json())
    assert model_fingerprint(tmp_path / "model") != before


@pytest.mark.medium
def test_the_operations_of_a_published_model_are_those_of_its_paper(tmp_path):
    """ConvNeXt-B at 224 px: 15.4 billion multiply-adds (Liu et al. 2022, table 1)."""
    tower = describe_whole("convnext_base", {"num_classes": 0}, None, 224, tmp_path)
    assert tower.costs.flops == pytest.approx(2 * 15.4e9, rel=0.01)
    expected = {key: tuple(each.shape) for key, each in on_meta("convnext_base").state_dict().items()}
    assert tower.shapes(LayerRange(0, 1)) == expected


def on_meta(name):
    with torch.device("meta"):
        return timm.create_model(name, num_classes=0)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "convnext_of_nobody"}, "it has no such model"),
        ({"architecture": "hf-hub:nobody/nothing"}, "it has no such model"),
        ({"architecture": "local-dir:/etc"}, "it has no such model"),
        ({"arguments": {"checkpoint_path": "/etc/passwd"}}, "arguments.checkpoint_path can't be given to timm here"),
        ({"arguments": {"pretrained_cfg": "in1k"}}, "arguments.pretrained_cfg can't be given to timm here"),
        ({"arguments": {"depths": "many"}}, "can't build 'test_convnext' with {'depths': 'many'}"),
        ({"arguments": {"nothing": 1}}, "can't build 'test_convnext' with {'nothing': 1}"),
        ({"pool": "nowhere"}, "pool 'nowhere'"),
        ({"tensors": {"stem.0.weight": "3x-1"}}, "tensors.stem.0.weight"),
        ({"tensors": {}}, "tensors"),
    ],
)
def test_a_hostile_or_cut_description_is_refused_in_one_line(tmp_path, changes, message):
    timm_convnext(tmp_path / "checkpoint")
    import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    tree = json.loads(path.read_text())
    tree["vision"] |= changes
    path.write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        load_shard(tmp_path / "model", whole_model(load_model_config(tmp_path / "model")))
    assert "\n" not in str(caught.value)


def test_weights_of_another_model_are_refused(tmp_path):
    timm_convnext(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if name.startswith("stages.0"))
    save_file({each: values for each, values in weights.items() if each != name}, path, {"format": "pt"})
    check_refused(import_checkpoint, tmp_path / "checkpoint", tmp_path / "model", re.escape(name))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("test_convnext", {"global_pool": ""}, "expected one vector"),
        ("swin_tiny_patch4_window7_224", WINDOWS | {"img_size": (32, 48)}, "only squares"),
    ],
)
def test_what_gives_no_vector_of_a_square_is_refused(tmp_path, name, settings, message):
    save_timm(timm.create_model(name, num_classes=7, **settings), tmp_path / "checkpoint", **settings)
    check_refused(import_checkpoint, tmp_path / "checkpoint", tmp_path / "model", message)


@pytest.mark.medium
def test_tables_that_timm_computes_otherwise_are_seen(tmp_path, monkeypatch):
    """A stage computes again what no weight file holds; the import compares it with what timm builds."""
    timm_swin(tmp_path / "checkpoint")
    monkeypatch.delattr("timm.models.swin_transformer.WindowAttention.init_non_persistent_buffers")
    check_refused(import_checkpoint, tmp_path / "checkpoint", tmp_path / "model", "nor can timm renew it")


@pytest.mark.slow
def test_queries_by_picture_and_text_are_encoded_without_torch(tmp_path):
    open_clip_mobileclip(tmp_path / "checkpoint")
    import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
    (tmp_path / "towers").mkdir()
    assert export_towers(tmp_path / "model", tmp_path / "towers") == []
    length = load_model_config(tmp_path / "model").preprocess.max_caption_tokens
    captions = [[49406, *range(320, 320 + number), 49407] for number in (1, 13, length - 2)]
    ids = torch.tensor([each + [0] * (length - len(each)) for each in captions], dtype=torch.int32)
    batch = make_batch(load_model_config(tmp_path / "model"), ids.tolist(), num_images=3)
    given = {"vision": {"pixels": batch.vision.values}, "text": {"ids": ids, "lengths": batch.text.lengths}}
    for side, expected in embed_whole(tmp_path / "model", batch).items():
        session = InferenceSession(tmp_path / "towers" / f"{side}.onnx")
        (found,) = session.run(None, {name: each.numpy() for name, each in given[side].items()})
        assert (torch.from_numpy(found) - expected).abs().max() < 1e-5, side
