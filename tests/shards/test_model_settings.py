"""Settings of a model outside its folder: addresses, the place of an instruction, which dimensions are allowed."""

import json
import re

import pytest
import torch
from tiny_models import tiny_config
from tower_checks import check_every_cut, embed_whole, make_batch
from tower_families import save_random_model

from embedder.storage.model_download import resolve_model
from shards.fingerprint import model_fingerprint, preprocess_fingerprint
from shards.model_config import CONFIG_FILE, load_model_config
from shards.model_errors import ModelError
from shards.model_settings import (
    ModelSettings,
    address_as_recorded,
    default_instruction,
    instructed_prompt,
    join_address,
    split_address,
)
from shards.preprocess import PreprocessConfig

CAPTIONS = [[2, 5, 6, 7, 3], [2, 9, 3], [2, *range(10, 20), 3]]


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_random_model(tiny_config(), tmp_path / "model")
    return tmp_path / "model"


def declare(folder, **keys):
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    "settings",
    [
        ModelSettings(),
        ModelSettings(dimensions=8),
        ModelSettings(dimensions=8, force_dimensions=True, item_instruction="a & b = 1 + 1 % # ? 日本 \n é"),
        ModelSettings(query_instruction="#dimensions=3&x"),
    ],
)
@pytest.mark.parametrize("uri", ["models/own", "hf:org/name@v1", "s3://bucket/a b#1/model", "/a/x=1&y"])
def test_an_address_gives_back_its_parts(uri, settings):
    assert split_address(join_address(uri, settings)) == (uri, settings)


def test_an_address_with_what_is_no_setting_is_refused_or_left_whole():
    assert split_address("models/a#x=3") == ("models/a#x=3", ModelSettings())
    for text in ("dimensions=x", "dimensions=0", "dimensions=8&other=1", "item_instruction=", "force_dimensions=true"):
        with pytest.raises(ModelError, match=re.escape(f"model models/a#{text}: ")):
            split_address(f"models/a#{text}")


def test_a_moved_model_keeps_the_settings_that_a_store_recorded():
    recorded = "old#dimensions=8"
    assert address_as_recorded(None, recorded) == recorded
    assert address_as_recorded("new", recorded) == "new#dimensions=8"
    assert address_as_recorded("new#dimensions=4", recorded) == "new#dimensions=4"
    assert split_address(address_as_recorded("new#query_instruction=a b", recorded)) == (
        "new",
        ModelSettings(dimensions=8, query_instruction="a b"),
    )
    asked = "new#item_instruction=x&query_instruction=y"
    assert address_as_recorded(asked, recorded) == asked
    assert address_as_recorded("new", "old#query_instruction=x") == "new#query_instruction=x"


def test_an_instruction_of_items_leaves_room_for_a_text(model):
    own = json.loads((model / CONFIG_FILE).read_text())["preprocess"]
    declare(model, preprocess=own | {"instruction_form": "{instruction} :"})
    limit = load_model_config(model).preprocess.max_caption_tokens
    with pytest.raises(ModelError, match=f"item_instruction: with what stands around it, it fills the {limit} tokens"):
        resolve_model(f"{model}#item_instruction={'w5 ' * 200}")
    assert load_model_config(resolve_model(f"{model}#item_instruction=w5")).preprocess.caption_prompt == "w5 :"


def test_an_instruction_takes_its_place_in_prompts_that_have_one():
    prompts = {
        "Instruct: Given a query, find.\nQuery:": "Instruct: X {y}\nQuery:",
        "Instruct: Find.\nQuery: ": "Instruct: X {y}\nQuery: ",
        "task: search result | query: ": "task: X {y} | query: ",
    }
    for prompt, expected in prompts.items():
        assert instructed_prompt(PreprocessConfig(query_prompt=prompt), " X {y} ", "model") == expected
    assert default_instruction(PreprocessConfig(query_prompt="task: search result | query: ")) == "search result"
    form = PreprocessConfig(query_prompt="<s>A</s>", caption_prompt="<s>B</s>", instruction_form="<s>{instruction}</s>")
    assert instructed_prompt(form, "C", "model") == instructed_prompt(form, "C", "model", of_items=True) == "<s>C</s>"
    assert default_instruction(form) == "A"
    for prompt in ("", "query: ", "search_query: "):
        plain = PreprocessConfig(query_prompt=prompt)
        assert default_instruction(plain) is None
        with pytest.raises(ModelError, match="model x takes no instruction of queries: its prompts have no place"):
            instructed_prompt(plain, "X", "model x")
    with pytest.raises(ModelError, match="takes no instruction of items"):
        instructed_prompt(PreprocessConfig(query_prompt="Instruct: A\nQuery:"), "X", "model x", of_items=True)


def test_fingerprints_of_before_stay_and_settings_change_them(model):
    """The figure is that of the version before there were settings."""
    config = load_model_config(model)
    assert "instruction_form" not in config.to_json()
    assert "dimensions" not in config.to_json()
    assert "joins_captions" not in config.to_json()
    prompts = {"query_prompt": "q: ", "caption_prompt": "d: "}
    for form in ("", "{instruction}: "):
        own = PreprocessConfig(**prompts, instruction_form=form)
        assert preprocess_fingerprint(own, b"x", 5.0, 4) == "904120ee35e009e9"
    before = model_fingerprint(model)
    declare(model, matryoshka=[8, 16])
    assert model_fingerprint(model) == before
    assert model_fingerprint(resolve_model(f"{model}#dimensions=8")) != before
    assert resolve_model(f"{model}#query_instruction=x") == model


@pytest.mark.medium
def test_vectors_are_cut_and_of_length_one_at_every_cut(model):
    declare(model, matryoshka=[8])
    batch = make_batch(load_model_config(model), CAPTIONS)
    whole, derived = embed_whole(model, batch), resolve_model(f"{model}#dimensions=8")
    cut = embed_whole(derived, batch)
    for side, rows in whole.items():
        expected = torch.nn.functional.normalize(rows[:, :8], dim=-1)
        assert cut[side].shape == expected.shape
        assert (cut[side] - expected).abs().max() < 1e-6
    check_every_cut(derived, batch)


def test_dimensions_are_refused_where_the_model_is_not_trained_for_them(model):
    width = load_model_config(model).embedding_dim
    with pytest.raises(ModelError, match="force_dimensions = true and measure what is lost with `embedder evaluate`"):
        resolve_model(f"{model}#dimensions=8")
    cut = load_model_config(resolve_model(f"{model}#dimensions=8&force_dimensions=True"))
    assert cut.vector_dim == 8
    with pytest.raises(ModelError, match="keeps 8 dimensions of its vectors; train it without"):
        cut.check_trainable()
    declare(model, matryoshka=[8, 16])
    with pytest.raises(ModelError, match="dimensions = 9: it is trained to be cut to 8, 16; write one of them"):
        resolve_model(f"{model}#dimensions=9")
    declare(model, matryoshka="any")
    assert load_model_config(resolve_model(f"{model}#dimensions=9")).vector_dim == 9
    with pytest.raises(ModelError, match=f"its vectors have {width} values; ask for fewer"):
        resolve_model(f"{model}#dimensions={width}")


def test_a_changed_model_is_derived_anew(model):
    declare(model, matryoshka="any")
    first = resolve_model(f"{model}#dimensions=8")
    assert resolve_model(f"{model}#dimensions=8") == first
    declare(model, name="other")
    assert load_model_config(resolve_model(f"{model}#dimensions=8")).name == "other"
    assert first.joinpath("model.safetensors").resolve() == (model / "model.safetensors").resolve()
