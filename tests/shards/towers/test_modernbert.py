"""ModernBERT of transformers, by itself and joined to a timm ViT: against its own features, every cut, every part."""

import shutil
from dataclasses import replace

import pytest
import torch
from library_checkpoints import SMALL_TEXT, save_timm
from safetensors.torch import load_file
from tiny_tokenizers import NUM_TOKENS, ODD_CAPTIONS, padded, save_checkpoint, wordpiece
from tokenizers import Tokenizer
from tower_checkpoints import edit_json
from tower_checks import (
    LEAST_MOVE,
    check_against,
    check_every_cut,
    check_every_part_matters,
    check_refused,
    embed_whole,
    make_batch,
    randomise,
)

from shards.convert import import_checkpoint, import_timm_and_text, import_transformers
from shards.costs import tower_costs, weight_bytes
from shards.layouts import Padding
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.plan import check_plan, plan_shards
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec

WIDTH, MLP, DEPTH, WINDOW = 32, 40, 5, 8
TEXT = SMALL_TEXT | {
    "intermediate_size": MLP,
    "num_hidden_layers": DEPTH,
    "max_position_embeddings": 64,
    "local_attention": WINDOW,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "cls_token_id": 2,
    "eos_token_id": 3,
    "sep_token_id": 3,
}
# Some longer than the window. The one of 24 is padded to 30, where places see nothing but padding in their window.
LENGTHS = [3, 30, 30, 28, 17, 30, 5, 30]
CAPTIONS = [[*range(5 + number, 5 + number + length)] for number, length in enumerate(LENGTHS)]
ALONE = [[*range(5, 5 + length)] for length in (2, WINDOW // 2, WINDOW // 2 + 1, 40)]


def make_their_model(class_name="ModernBertModel", **changes):
    import transformers

    return randomise(getattr(transformers, class_name)(transformers.ModernBertConfig(**(TEXT | changes))))


@pytest.fixture(scope="module", params=["cls", "mean"])
def checkpoint(request, tmp_path_factory):
    """Folder of a ModernBERT, and transformers' model."""
    folder = tmp_path_factory.mktemp("hf") / request.param
    model = make_their_model(classifier_pooling=request.param)
    model.save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def imported(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    import_checkpoint(checkpoint[0], folder)
    return folder


@pytest.fixture
def batch(imported):
    return make_batch(load_model_config(imported), CAPTIONS)


def their_features(model):
    def captions(state):
        inputs = padded(state, 0)
        hidden, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][:, :, None]
        return hidden[:, 0] if model.config.classifier_pooling == "cls" else (hidden * mask).sum(1) / mask.sum(1)

    return {"text": captions}


def test_an_imported_model_gives_transformers_own_features(checkpoint, imported, batch):
    config = load_model_config(imported)
    assert config.text.pool == checkpoint[1].config.classifier_pooling
    for each in (batch, *(make_batch(config, [caption]) for caption in ALONE)):
        check_against(imported, each, their_features(checkpoint[1]))


@pytest.mark.medium
def test_every_cut_gives_the_bits_of_the_unsplit_tower(imported, batch):
    config = load_model_config(imported)
    for each in (batch, *(make_batch(config, [caption]) for caption in ALONE)):
        check_every_cut(imported, each)


@pytest.mark.medium
def test_no_part_can_be_left_out(imported, batch, tmp_path):
    check_every_part_matters(imported, batch, tmp_path)


def can_have_one_kind_of_layers():
    """Whether transformers makes a ModernBERT whose layers all see everything; older ones refuse their own settings."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        transformers.ModernBertConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    except StrictDataclassError:
        return False
    return True


needs_one_kind = pytest.mark.skipif(not can_have_one_kind_of_layers(), reason="transformers makes no such ModernBERT")


@pytest.mark.parametrize(
    "change",
    [
        {"local_attention": 2 * max(LENGTHS)},
        {"local_attention": WINDOW + 2},
        pytest.param({"global_attn_every_n_layers": 1}, marks=needs_one_kind),
        {"global_attn_every_n_layers": 4},
        {"global_rope_theta": 10_000.0},
        {"local_rope_theta": 160_000.0},
    ],
)
def test_windows_and_positions_of_both_kinds_of_layers_matter(imported, batch, tmp_path, change):
    folder = shutil.copytree(imported, tmp_path / "changed")
    edit_json(folder / "config.json", **{f"text__{key}": value for key, value in change.items()})
    moved = embed_whole(folder, batch)["text"] - embed_whole(imported, batch)["text"]
    assert float(moved.abs().max()) > LEAST_MOVE


def test_the_mask_of_padding_matters(imported, batch, monkeypatch):
    before, lay_out = embed_whole(imported, batch)["text"], Padding.of
    monkeypatch.setattr(Padding, "of", lambda lengths: replace(lay_out(lengths), mask=None))
    moved = (embed_whole(imported, batch)["text"] - before).abs().amax(1)
    assert float(moved[LENGTHS.index(28)]) > LEAST_MOVE
    assert float(moved[LENGTHS.index(30)]) == 0


def test_captions_alone_or_with_others_give_the_same_vectors(imported, batch):
    alone = [embed_whole(imported, make_batch(load_model_config(imported), [caption]))["text"] for caption in CAPTIONS]
    assert float((torch.cat(alone) - embed_whole(imported, batch)["text"]).abs().max()) < 1e-5


def test_the_planner_counts_gated_layers_and_a_first_one_without_a_norm(imported):
    config = load_model_config(imported)
    layer, pair = WIDTH * (4 * WIDTH + 3 * MLP) + 2 * WIDTH, ShardSpec(LayerRange(0, 0), LayerRange(1, 3))
    assert weight_bytes(config, pair, "float32") == 2 * 4 * layer
    first = ShardSpec(LayerRange(0, 0), LayerRange(0, 1))
    assert weight_bytes(config, first, "float32") == 4 * (layer - WIDTH + NUM_TOKENS * WIDTH + WIDTH)
    # 16 tokens: projections of 4 D*D and 3 D*M, and two products with the 16 others, at two operations each.
    assert tower_costs(config, "text", 16).layer == 2 * 16 * (4 * WIDTH**2 + 3 * WIDTH * MLP + 2 * 16 * WIDTH)
    for number in range(1, DEPTH + 1):
        check_plan(plan_shards(config, number), config)


@pytest.mark.medium
def test_a_text_tower_with_a_head_joins_a_timm_checkpoint(tmp_path):
    import timm

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    vit = randomise(timm.create_model("vit_small_patch16_224", num_classes=7, **sizes))
    save_timm(vit, tmp_path / "vit", **sizes)
    model = make_their_model("ModernBertForMaskedLM", classifier_pooling="mean")
    model.save_pretrained(tmp_path / "text")
    wordpiece().save_pretrained(tmp_path / "text")
    config = import_timm_and_text(tmp_path / "vit", tmp_path / "text", tmp_path / "out", 20)
    ours = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    batch = make_batch(config, [ours.encode(caption).ids for caption in ODD_CAPTIONS])
    projection = load_file(tmp_path / "out" / "model.safetensors")["text_head.projection.weight"]
    captions = their_features(model.model)["text"]
    check_against(tmp_path / "out", batch, {"text": lambda state: captions(state) @ projection.T})
    check_every_cut(tmp_path / "out", batch)


DISTILBERT = {"vocab_size": NUM_TOKENS, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}


@pytest.mark.parametrize(("name", "settings"), [("ModernBert", TEXT), ("DistilBert", DISTILBERT)])
def test_a_dual_encoder_which_transformers_cannot_pool_is_refused(tmp_path, name, settings):
    import transformers

    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
    vision = transformers.ViTConfig(**sizes, image_size=24, patch_size=8)
    text = getattr(transformers, f"{name}Config")(**settings)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(vision, text, projection_dim=20)
    model = transformers.VisionTextDualEncoderModel(config)
    with pytest.raises(AttributeError, match="pooler_output"):
        model.get_text_features(input_ids=torch.tensor([[2, 7, 3]]))
    save_checkpoint(tmp_path / "hf", model, wordpiece(), 24)
    with pytest.raises(ModelError, match=f"the text tower is '{name.lower()}': it has no pooler"):
        import_transformers(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_bias": True}, "modernbert: mlp_bias = True; only False can be imported"),
        ({"hidden_activation": "mish"}, "hidden_activation.*mish"),
        ({"num_attention_heads": 32}, "no multiple of two values of each attention head"),
        pytest.param(
            {"layer_types": ["sliding_attention"] * DEPTH},
            "layer_types = .*; expected full_attention at the first",
            marks=needs_one_kind,
        ),
        ({"layer_types": None, "num_hidden_layers": 6}, "lack the tensor layers.5"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
            "full_attention has rope_parameters .*; only a base can be imported",
        ),
    ],
)
def test_what_cannot_be_mapped_is_refused_and_nothing_is_left(checkpoint, tmp_path, changes, message):
    folder = shutil.copytree(checkpoint[0], tmp_path / "hf")
    edit_json(folder / "config.json", **changes)
    check_refused(import_checkpoint, folder, tmp_path / "out", message)
