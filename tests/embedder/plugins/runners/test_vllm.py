"""Kind vllm where vLLM is not installed: its configuration, its requests, and what is reported."""

import json
from importlib.util import find_spec

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from embedder.plugins.runners.programs.vllm_engine import requests
from embedder.servables import make_servable
from embedder.servables.order import order_servables
from embedder.servables.servable_errors import ServableError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 48}))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def vllm(folder, **settings):
    return make_servable({"name": "writer", "kind": "vllm", "uri": str(folder), **settings})


def test_inputs_and_outputs_follow_from_the_task(folder):
    texts = vllm(folder)
    assert {name: each.make for name, each in texts.input_columns().items()} == {"text": "text"}
    assert {name: each.arrow_type() for name, each in texts.output_columns().items()} == {"text": pa.string()}
    both = vllm(folder, takes="both", image_of="crops.image", prompt="<image> {text}")
    assert {name: (each.make, each.of) for name, each in both.input_columns().items()} == {
        "text": ("text", None),
        "image": ("image", "crops.image"),
    }
    (embedding,) = vllm(folder, task="embed").output_columns().values()
    assert embedding.shape == (48,)
    assert vllm(folder, task="embed", dim=8).output_columns()["embedding"].shape == (8,)


def test_what_it_writes_feeds_another_servable(folder):
    reader = vllm(folder, name="reader", task="embed", text_of="writer.text")
    assert [each.name for each in order_servables([reader, vllm(folder)])] == ["writer", "reader"]


def test_the_fingerprint_follows_what_decides_the_texts(folder):
    first = vllm(folder).fingerprint()
    assert vllm(folder, eager=True, gpu_memory=0.5, cache_gib=1, batch_size=8, python="other").fingerprint() == first
    changed = [{"seed": 1}, {"temperature": 0.5}, {"prompt": "Say: {text}"}, {"max_new_tokens": 4}, {"stop": ["."]}]
    found = {vllm(folder, **settings).fingerprint() for settings in changed}
    (folder / "model.safetensors").write_bytes(b"others!")
    assert len(found | {vllm(folder).fingerprint(), first}) == len(changed) + 2


def test_without_a_gpu_its_cache_is_a_part_of_its_memory(folder):
    assert vllm(folder, num_gpus=1).size_bytes() < 1 << 20
    assert vllm(folder, cache_gib=3).size_bytes() - vllm(folder, num_gpus=1).size_bytes() == 3 << 30
    assert vllm(folder, memory_bytes=5).size_bytes() == 5


def test_a_request_is_made_of_each_row_in_order(folder):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 3), dtype=np.uint8)
    structs = [{"pixels": each.tobytes(), "height": 3, "width": 4} for each in pixels]
    types = pa.struct({"pixels": pa.large_binary(), "height": pa.int32(), "width": pa.int32()})
    batch = pa.record_batch({"text": ["a {text}", "b"], "image": pa.array(structs, types)})
    made = requests(batch, "Say: {text}")
    assert [each["prompt"] for each in made] == ["Say: a {text}", "Say: b"]
    for each, expected in zip(made, pixels, strict=True):
        assert isinstance(each["multi_modal_data"]["image"], Image.Image)
        assert np.array_equal(np.asarray(each["multi_modal_data"]["image"]), expected)
    assert requests(batch.select(["image"]), "What is it?")[1]["prompt"] == "What is it?"
    assert requests(batch.select(["text"]), "{text}") == [{"prompt": "a {text}"}, {"prompt": "b"}]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompt": "no place"}, "the text has no place"),
        ({"takes": "image"}, 'takes is "image", and prompt or text_of names a text'),
        ({"image_of": "crops.image"}, 'write takes = "both"'),
        ({"allow_pickle": True}, "only safetensors"),
        ({"temperature": -1}, "temperature"),
        ({"task": "chat"}, "task"),
    ],
)
def test_settings_that_break_a_rule_are_told_in_a_line(settings, said, folder):
    with pytest.raises(ServableError, match=said) as caught:
        vllm(folder, **settings)
    assert "\n" not in str(caught.value)


def test_a_folder_without_safetensors_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ServableError, match="no safetensors there"):
        vllm(folder).files()


def test_without_vllm_here_it_says_to_name_an_interpreter(folder):
    if find_spec("vllm"):
        pytest.skip("vLLM is installed here")
    with pytest.raises(ServableError, match="it imports 'vllm', which is not installed here; install it, or name an"):
        vllm(folder).load()
