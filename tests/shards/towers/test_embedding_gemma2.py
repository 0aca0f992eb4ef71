"""EmbeddingGemma 2 as one tower: sizes, layers, prompts and refusals; vectors and cuts are in test_qwen2_vl."""

import json
import shutil

import numpy as np
import pytest
import torch
from picture_decoders import TEXTS, as_state, decode, make_library, pictures, save_gemma, tokenise
from safetensors.torch import load_file, save_file
from tower_checks import check_every_cut, check_refused, run_stages, vectors
from transformers import AutoModel, EmbeddingGemma2Config, EmbeddingGemma2Model
from transformers.initialization import no_init_weights
from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

from embedder.media.resize import MAX_STRIP_ASPECT, ResizeSpec, max_bytes, scaled_size
from embedder.steps.item_decoder import DecodeLimits, DecodeSpec, ItemContent, ItemDecoder, bmp
from shards.activations import Batch, TowerState
from shards.convert import import_checkpoint
from shards.convert.one_tower import read_one_tower_config
from shards.costs import BYTES_PER_VALUE, count_parameters, cut_bytes
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.model_settings import ModelSettings, apply_settings
from shards.ranges import LayerRange
from shards.shard import load_shard
from shards.shard_specs import ShardSpec, one_tower, specs_between, whole_model
from shards.tensor_shapes import model_shapes
from shards.towers.embedding_gemma2 import EmbeddingGemma2Tower
from shards.weights import WEIGHTS_FILE

DEPTH, TEXT_LAYERS, WIDTH, SIZE = 3, 4, 32, 28  # layers before the texts', the texts', their width, a vector's size
QUERY, DOCUMENT = "task: search result | query: ", "title: none | text: "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_gemma(tmp_path_factory.mktemp("gemma") / "checkpoint")


@pytest.fixture(scope="module")
def model(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("model") / "model"
    import_checkpoint(checkpoint, out)
    return out


@pytest.fixture(scope="module")
def library(checkpoint):
    return make_library(checkpoint)


def embed(model, **sides):
    shard = load_shard(model, whole_model(load_model_config(model)))
    return vectors(shard(Batch(**({"vision": None, "text": None} | sides))))


@pytest.mark.parametrize(("side", "most"), [(16, 2520), (4, 630)])
def test_sizes_of_images_are_transformers_own(side, most):
    rule, generator = (
        ResizeSpec(768, "patches", patch_size=side, max_patches=most, merge_size=3),
        np.random.default_rng(0),
    )
    sizes = np.exp(generator.uniform(0, np.log(5000), (2000, 2))).astype(int).tolist()
    for width, height in [(1, 1), (1, 50_000), (50_000, 1), (MAX_STRIP_ASPECT * 3, 2), *sizes]:
        found = scaled_size((width, height), rule)
        assert found[::-1] == get_aspect_ratio_preserving_size(height, width, side, most, 3)
        assert 3 * found[0] * found[1] <= max_bytes(rule)


def test_a_layer_that_both_sides_use_is_held_once_with_its_rows_of_the_common_projection(model, checkpoint):
    both = ShardSpec(LayerRange(DEPTH + 1, DEPTH + 3), LayerRange(1, 3))
    shard = load_shard(model, both)
    assert shard.vision.decoder is shard.text
    names = {name for name in shard.state_dict() if "ple_projection" in name}
    assert names == {f"text.layers.{layer}.ple_projection.weight" for layer in (1, 2)}
    theirs = load_file(checkpoint / WEIGHTS_FILE)["language_model.ple.per_layer_model_projection.weight"]
    assert torch.equal(shard.text.layers[2].ple_projection.weight, theirs.view(TEXT_LAYERS, -1, WIDTH)[2])


def test_activations_hold_what_later_layers_need(model):
    """Between text layers, a token's first embedding goes with it; behind the last, no layer reads it."""
    config = load_model_config(model)
    state = decode(config, pictures([(64, 64)]))
    assert state.grids.tolist() == [[1, 24, 24]]
    squares = 64
    tokens = squares + 4  # <bos>, <|image>, <image|>, <eos>
    expected = {1: squares * 9 * 24, 2: squares * 9 * 24, 3: squares * WIDTH}
    expected |= {4: tokens * 2 * WIDTH, 6: tokens * 2 * WIDTH}
    config = config.at_patches(squares * 9)
    for layer, values in expected.items():
        found = load_shard(model, one_tower("vision", LayerRange(0, layer)))(Batch(state, None)).vision
        assert found.values.numel() == values
        assert cut_bytes(config, "vision", layer, "float32", 16) == values * BYTES_PER_VALUE["float32"]
    assert cut_bytes(config, "text", 1, "float32", 16) == 16 * 2 * WIDTH * BYTES_PER_VALUE["float32"]
    assert config.vision.values_at(DEPTH + TEXT_LAYERS, 16) == tokens * WIDTH


def with_modules(checkpoint, folder, pooling="mean"):
    """Copy a checkpoint, with sentence-transformers' modules and prompts around it."""
    shutil.copytree(checkpoint, folder)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    tree = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(tree))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    features = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings = {"modality_config": dict.fromkeys(("text", "image", "audio", "video", "message"), features)}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    prompts = {"prompts": {"SearchQuery": QUERY, "Document": DOCUMENT}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def test_prompts_stand_before_texts_alone_and_take_instructions(checkpoint, model, library, tmp_path):
    config = import_checkpoint(with_modules(checkpoint, tmp_path / "in"), tmp_path / "out")
    for prompt, given in ((None, DOCUMENT), (config.preprocess.query_prompt, QUERY)):
        state = tokenise(tmp_path / "out", TEXTS[:3], prompt=prompt)
        for ids, text in zip(state.values.split(state.lengths.tolist()), TEXTS, strict=False):
            assert ids.tolist() == library(text=given + text)[1]["input_ids"][0].tolist()
    assert config.vision == load_model_config(model).vision  # nothing more before a picture
    with pytest.raises(ModelError, match="takes no instruction of items"):
        apply_settings(config, ModelSettings(item_instruction="other"), tmp_path / "out")
    (tmp_path / "other").mkdir()
    other = with_modules(checkpoint, tmp_path / "other" / "in", "lasttoken")
    check_refused(import_checkpoint, other, tmp_path / "other" / "out", "only the mean of the tokens")


@pytest.mark.medium
def test_audio_is_left_out(checkpoint, model, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "in")
    tensors = load_file(folder / WEIGHTS_FILE)
    audio = {
        f"{part}.weight": torch.ones(3) for part in ("audio_tower.output_proj", "embed_audio.embedding_projection")
    }
    for outer in ("model.", ""):
        save_file({outer + name: value for name, value in (tensors | audio).items()}, folder / WEIGHTS_FILE)
        imported = import_checkpoint(folder, tmp_path / f"{outer}out")
        assert imported == load_model_config(model).model_copy(update={"name": "in"})


@pytest.mark.medium
@torch.inference_mode()
def test_a_picture_with_its_text_is_one_sequence(checkpoint, library, tmp_path):
    """The text stands behind the picture, within the tokeniser's own tokens; each caption keeps its vector."""
    config = import_checkpoint(checkpoint, tmp_path / "joined", join_captions=True)
    assert config.preprocess.joins_captions
    assert config.num_end_tokens == 1
    spec = DecodeSpec(
        ResizeSpec.of(config.preprocess, config.vision), DecodeLimits(),
        (tmp_path / "joined" / "tokenizer.json").read_text("utf-8"), 4096, 5.0, 4, 4, num_end_tokens=1,
    )  # fmt: skip
    images, texts, decoder = (
        pictures()[:5],
        ["a red car", "two cats", "  x ", "日本語", "word " * 60],
        ItemDecoder(spec),
    )
    contents = [
        ItemContent(kind="image", media=bmp(np.asarray(image)), caption=text)
        for image, text in zip(images, texts, strict=True)
    ]
    rows = list(decoder.image_rows([(each, {""}) for each in contents]))
    decoder.sandbox.close()
    alone = decode(config, images)
    both = TowerState(alone.values, alone.lengths, alone.grids, as_state([row["image_text"] for row in rows]))
    found, without = (
        vectors(load_shard(tmp_path / "joined", whole_model(config))(Batch(each, None)))["vision"]
        for each in (both, alone)
    )
    for vector, other, text, image in zip(found, without, texts, images, strict=True):
        expected = library(text=f"<|image|>{text}", image=image)[0]
        assert float((vector - expected).abs().max()) < 1e-5
        assert float((vector - other).abs().max()) > 1e-3
    for cut in (1, 2, 3, 5):
        specs = specs_between([(0, 0), (cut, 0), tuple(config.num_layers.values())])
        assert torch.equal(run_stages(tmp_path / "joined", specs, Batch(both, None))["vision"], found), cut


@pytest.mark.medium
def test_a_checkpoint_without_a_vision_part_embeds_texts(checkpoint, library, tmp_path):
    """As transformers saves it, and with the tensors of what its configuration leaves out."""
    theirs = AutoModel.from_pretrained(checkpoint)
    theirs.vision_tower = theirs.embed_vision = theirs.config.vision_config = None
    theirs.save_pretrained(tmp_path / "alone")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, tmp_path / "alone")
    shutil.copytree(tmp_path / "alone", tmp_path / "more")
    shutil.copy(checkpoint / WEIGHTS_FILE, tmp_path / "more")
    for source in ("alone", "more"):
        config = import_checkpoint(tmp_path / source, tmp_path / f"{source} out")
        assert (config.vision, config.is_one_tower) == (None, False)
        state = tokenise(tmp_path / f"{source} out", TEXTS)
        found = embed(tmp_path / f"{source} out", text=state)["text"]
        assert (
            max(float((row - library(text=text)[0]).abs().max()) for row, text in zip(found, TEXTS, strict=True)) < 1e-5
        )
    check_every_cut(tmp_path / "more out", Batch(None, state))


def test_a_plan_needs_the_configuration_alone(checkpoint, model, tmp_path):
    shutil.copy(checkpoint / "config.json", tmp_path)
    read, whole = read_one_tower_config(tmp_path, "model"), load_model_config(model)
    assert (read.num_layers, read.text) == (whole.num_layers, whole.text)


ROPE = {"rope_type": "default", "rope_theta": 1.0}
HEADS = {"1": {"head_dim": 20, "num_key_value_heads": 1}, "3": {"head_dim": 16, "num_key_value_heads": 1}}
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
SCALED = {"full_attention": ROPE | {"rope_type": "linear", "factor": 2.0}, "sliding_attention": ROPE}


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("text_config", {"attention_bias": True}, "attention_bias = True"),
        ("text_config", {"num_attention_heads": 1}, "no multiple of num_key_value_heads"),
        ("text_config", {"layer_types": KINDS}, "layer_types"),
        ("text_config", {"per_layer_config": HEADS}, "layer 3 has head_dim = 16"),
        ("text_config", {"rope_parameters": SCALED}, "rope_parameters"),
        ("text_config", {"rope_parameters": {"full_attention": ROPE}}, "sliding_attention has rope_parameters None"),
        ("text_config", {"rope_parameters": dict.fromkeys(SCALED)}, "full_attention has rope_parameters None"),
        ("text_config", {"layer_types": KINDS[:2]}, "config.json: .*layer_types"),
        ("text_config", {"num_hidden_layers": 0}, "config.json: .*per_layer_config"),
        ("text_config", {"per_layer_config": "all"}, "config.json: "),
        ("vision_config", {"model_type": "own"}, "config.json: .*own"),
        ("vision_config", {"patch_size": [4, 4]}, "config.json: .*patch_size"),
        ("vision_config", {"model_type": "siglip_vision_model"}, "only 'gemma4_vision'"),
        ("vision_config", {"position_embedding_size": 100}, "strip of 210 patches"),
        (None, {"image_token_id": 399}, "image_token_id is 399"),
        ("image_processor", {"pooling_kernel_size": 2}, "pooling_kernel_size = 2: the model has 3"),
        ("image_processor", {"max_soft_tokens": "many"}, "max_soft_tokens = 'many'"),
        ("image_processor", {"max_soft_tokens": True}, "max_soft_tokens = True"),
        ("image_processor", {"do_resize": False}, "do_resize"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(checkpoint, tmp_path, part, change, message):
    folder = shutil.copytree(checkpoint, tmp_path / "in")
    path = folder / ("processor_config.json" if part == "image_processor" else "config.json")
    tree = json.loads(path.read_text())
    (tree if part is None else tree[part]).update(change)
    path.write_text(json.dumps(tree))
    check_refused(import_checkpoint, folder, tmp_path / "out", message)


@pytest.mark.medium
def test_a_broken_or_missing_tensor_is_refused_by_name(checkpoint, tmp_path):
    tensors = load_file(checkpoint / WEIGHTS_FILE)
    name = "language_model.ple.per_layer_model_projection.weight"
    wrong = {"missing": {key: each for key, each in tensors.items() if key != name}}
    wrong["shape"] = tensors | {name: tensors[name][:-1].clone()}
    wrong["finite"] = tensors | {name: tensors[name] * float("nan")}
    for case, changed in wrong.items():
        folder = shutil.copytree(checkpoint, tmp_path / case / "in")
        save_file(changed, folder / WEIGHTS_FILE)
        check_refused(import_checkpoint, folder, tmp_path / case / "out", "per_layer_model_projection")


def test_the_published_sizes_are_the_defaults(tmp_path):
    """The model's card counts 270 M of texts and 170 M of pictures."""
    tree = {"model_type": "embedding_gemma2", "text_config": {}, "vision_config": {"model_type": "gemma4_vision"}}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    config = read_one_tower_config(tmp_path, "published")
    assert config.vision == EmbeddingGemma2Tower()
    whole = [layer for layer, kind in enumerate(config.text.layer_types) if kind == "full_attention"]
    assert whole == [5, 11, 17, 23]
    shapes = model_shapes(config)
    texts = count_parameters({name: each for name, each in shapes.items() if name.startswith("text.")})
    assert (round(texts / 1e6), round((count_parameters(shapes) - texts) / 1e6)) == (271, 168)
    with torch.device("meta"), no_init_weights():
        theirs = EmbeddingGemma2Model(EmbeddingGemma2Config.from_dict(tree))
    # Each layer has the norm of what it reads, which the library has once.
    assert count_parameters(shapes) - 23 * 512 - 24 == sum(each.numel() for each in theirs.parameters())
