"""Qwen3-VL as one tower: its layers, prompts and refusals; vectors and cuts are in test_qwen2_vl."""

import json
import shutil
from functools import partial

import pytest
from picture_decoders import (
    INSTRUCTION,
    QUERY_INSTRUCTION,
    TEXTS,
    decode,
    make_library,
    pictures,
    save_checkpoint,
    tokenise,
)
from tiny_models import tiny_config
from tower_checks import check_refused
from transformers import AutoProcessor, BertConfig, BertModel

from embedder.storage.model_download import CONFIG_FILES, FETCHED_FILES
from shards.activations import Batch
from shards.convert import import_checkpoint
from shards.convert.one_tower import read_conversation, read_one_tower_config
from shards.costs import BYTES_PER_VALUE, cut_bytes, weight_bytes
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.onnx_export import export_towers
from shards.ranges import LayerRange
from shards.shard import load_shard
from shards.shard_specs import ShardSpec, one_tower
from shards.tensor_shapes import model_shapes

DEPTH, DECODER = 5, 4  # layers before the decoder's, and the decoder's


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("qwen") / "checkpoint")


@pytest.fixture(scope="module")
def model(checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("model") / "model"
    import_checkpoint(checkpoint, out)
    return out


@pytest.fixture(scope="module")
def library(checkpoint):
    return make_library(checkpoint)


def test_a_layer_that_both_sides_use_is_held_once(model):
    config, both = load_model_config(model), ShardSpec(LayerRange(DEPTH + 1, DEPTH + 3), LayerRange(1, 3))
    alone = [one_tower("vision", both.vision), one_tower("text", both.text)]
    sizes = {weight_bytes(config, spec, "float32") for spec in (both, *alone)}
    assert len(sizes) == 1
    shard = load_shard(model, both)
    assert {shard.weight_bytes} == sizes
    assert shard.vision.decoder is shard.text
    apart = ShardSpec(LayerRange(DEPTH, DEPTH + 1), LayerRange(3, 4))
    assert {name.split(".")[2] for name in load_shard(model, apart).state_dict() if ".layers." in name} == {"0", "3"}
    assert not any(name.startswith("vision.") and ".layers." in name for name in model_shapes(config))


def test_activations_hold_what_later_layers_need(model):
    config = load_model_config(model)
    vision, state = config.vision, decode(config, pictures([(64, 64)]))
    assert state.grids.tolist() == [[1, 16, 16]]
    assert vision.max_patches == 256
    squares, width, tokens = 64, 32, 64 + len(vision.ids_before) + len(vision.ids_between) + len(vision.ids_after)
    # Blocks 0 and 2 feed the first two decoder layers.
    expected = {1: 4 * 24 + width, 2: 4 * 24 + width, 3: 4 * 24 + 2 * width, 4: 4 * 24 + 2 * width, 5: 3 * width}
    expected = {layer: squares * values for layer, values in expected.items()}
    expected |= {6: (tokens + squares) * width, 7: tokens * width, 8: tokens * width}
    for layer, values in expected.items():
        found = load_shard(model, one_tower("vision", LayerRange(0, layer)))(Batch(state, None)).vision
        assert found.values.numel() == values
        assert cut_bytes(config, "vision", layer, "float32", 16) == values * BYTES_PER_VALUE["float32"]
        assert int(found.lengths.sum()) == len(found.values)


def test_queries_have_the_instruction_of_sentence_transformers_prompts(checkpoint, library, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "with modules")
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    tree = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(modules)
    ]
    features = {"method": "forward", "method_output_name": "last_hidden_state"}
    (folder / "modules.json").write_text(json.dumps(tree))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    settings = {
        "transformer_task": "feature-extraction",
        "modality_config": dict.fromkeys(("text", "image", "video", "message"), features),
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    prompts = {"prompts": {"query": QUERY_INSTRUCTION, "document": INSTRUCTION}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    config = import_checkpoint(folder, tmp_path / "out")
    state = tokenise(tmp_path / "out", TEXTS[:3], prompt=config.preprocess.query_prompt)
    for ids, text in zip(state.values.split(state.lengths.tolist()), TEXTS, strict=False):
        assert ids.tolist() == library(text=text, instruction=QUERY_INSTRUCTION)[1]["input_ids"][0].tolist()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    (tmp_path / "other").mkdir()
    check_refused(import_checkpoint, folder, tmp_path / "other" / "out", "only the last token's vector")


def test_towers_that_are_apart_join_no_captions(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    BertModel(BertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8)).save_pretrained(folder)
    check_refused(partial(import_checkpoint, join_captions=True), folder, tmp_path / "out", "towers are apart")
    tree = json.loads(tiny_config().to_json())
    tree["preprocess"]["joins_captions"] = True
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ModelError, match="joins_captions is true"):
        load_model_config(tmp_path)


def test_what_is_fetched_of_a_hub_is_enough(checkpoint, tmp_path):
    """Also for a plan, which needs neither weights nor template."""
    for name, patterns in (("fetched", FETCHED_FILES), ("plan", CONFIG_FILES)):
        for path in {each for pattern in patterns for each in checkpoint.glob(pattern)}:
            (tmp_path / name).mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / name)
    whole = import_checkpoint(tmp_path / "fetched", tmp_path / "out")
    read = read_one_tower_config(tmp_path / "plan", whole.name)
    assert read.vision == whole.vision
    (tmp_path / "plan" / "chat_template.jinja").unlink()
    assert read_one_tower_config(tmp_path / "plan", whole.name).vision.num_layers == whole.vision.num_layers


def test_the_template_of_an_older_processor_wins_over_the_tokenisers(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "in")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    own = read_conversation(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template.replace("assistant", "user")}))
    assert AutoProcessor.from_pretrained(folder).chat_template == template.replace("assistant", "user")
    assert read_conversation(folder).after != own.after


def test_a_limit_that_the_conversation_fills_is_refused(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "in")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 20}))
    check_refused(import_checkpoint, folder, tmp_path / "out", "captions are cut at 20 tokens")


def test_torch_encodes_its_queries(model, tmp_path):
    reasons = export_towers(model, tmp_path)
    assert len(reasons) == 2
    assert all("shares layers with the other" in reason and "\n" not in reason for reason in reasons)
    assert not list(tmp_path.glob("*.onnx"))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"text_config": {"attention_bias": True}}, "attention_bias = True"),
        ("config.json", {"vision_config": {"deepstack_visual_indexes": [2, 9]}}, "deepstack_visual_indexes"),
        ("config.json", {"vision_config": {"out_hidden_size": 16}}, "out_hidden_size = 16"),
        ("config.json", {"text_config": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}}, "rope_parameters"),
        ("config.json", {"image_token_id": 399}, "chat template|image_token_id"),
        ("config.json", {"model_type": "qwen2_audio"}, "model_type = 'qwen2_audio'"),
        ("processor_config.json", {"image_processor": {"merge_size": 3}}, "merge_size = 3: the model has 2"),
        ("processor_config.json", {"image_processor": {"size": {"shortest_edge": 250}}}, "multiples of a patch's 16"),
        ("chat_template.jinja", "", "chat template"),
        ("chat_template.jinja", "{{ messages[1].content[0].text }}{{", "chat template can't be used"),
        ("chat_template.jinja", "{{ messages[1].content[-1].text }}", "chat template writes"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(checkpoint, tmp_path, file, change, message):
    folder = shutil.copytree(checkpoint, tmp_path / "in")
    path = folder / file
    if isinstance(change, str):
        path.write_text(change)
    else:
        tree = json.loads(path.read_text())
        for key, value in change.items():
            tree[key] = merge(tree.get(key), value)
        path.write_text(json.dumps(tree))
    check_refused(import_checkpoint, folder, tmp_path / "out", message)


def merge(old, new):
    """Change some keys of a tree."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        return new
    return old | {key: merge(old.get(key), value) for key, value in new.items()}
