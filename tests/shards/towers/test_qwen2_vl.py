"""All families of one tower for pictures and texts against transformers; what is Qwen2-VL's own."""

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from picture_decoders import (
    INSTRUCTION,
    SIZES,
    TEXTS,
    as_state,
    decode,
    make_library,
    pictures,
    sample_batch,
    save_checkpoint,
    tokenise,
)
from safetensors.torch import load_file, save_file
from tower_checkpoints import edit_json
from tower_checks import check_every_cut, check_every_part_matters, check_refused, run_stages, vectors
from transformers import AutoModel, AutoProcessor

from embedder.steps.caption_encoder import CaptionEncoder
from shards.activations import Batch, TowerState
from shards.convert import import_checkpoint
from shards.model_config import load_model_config
from shards.shard import load_shard
from shards.shard_specs import specs_between, whole_model
from shards.weights import WEIGHTS_FILE

OLDER = ["qwen2_vl", "qwen2_5_vl"]
CHATS = [*OLDER, "qwen3_vl"]
# Frames, rows and columns of patches of pictures, of which one has two frames and one isn't there; captions' tokens.
GRIDS = [(1, 4, 4), (0, 0, 0), (1, 6, 10), (2, 2, 8), (1, 2, 30), (1, 10, 6), (1, 2, 2)]
CAPTIONS = [[1, 10, 11, 9], [1, *range(20, 29), 9], [9], [4, 5, 6]]
BATCHES = dict.fromkeys(CHATS, (GRIDS, CAPTIONS)) | {
    "embedding_gemma2": (
        [(1, 6, 6), (0, 0, 0), (1, 9, 15), (2, 3, 12), (1, 3, 45), (1, 15, 9), (1, 3, 3)],
        [[2, 20, 21, 1], [2, *range(20, 60), 1], [1], [4, 5, 6]],  # within and beyond the window
    )
}
NUM_BEFORE = dict.fromkeys(CHATS, 5) | {"embedding_gemma2": 3}  # layers before the decoder's
DECODER = 4
GME_FORM = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n<|endoftext|>"
)
PAGE = Path(__file__).parents[3] / "docs" / "models.md"
GME_TEMPLATE = PAGE.read_text("utf-8").partition("```jinja\n")[2].partition("\n```")[0]
NUM_ITEMS, NUM_TEXTS = 64, 1000
SCRIPTS = ["latin", "кириллица", "日本語の文字", "नमस्ते", "مرحبا", "한국어", "👩‍👩‍👧🙂", "e\u0301\n\n  "]


class Family:
    """A family's checkpoint, model folder and library."""

    def __init__(self, name, root):
        self.name, self.checkpoint, self.model = name, save_checkpoint(root / "checkpoint", name), root / "model"
        import_checkpoint(self.checkpoint, self.model)
        self.library = make_library(self.checkpoint)
        self.config = load_model_config(self.model)
        self.is_chat = self.config.vision.prompts_pictures
        self.batch = sample_batch(self.model, *BATCHES[name])

    def embed(self, **sides):
        return vectors(
            load_shard(self.model, whole_model(self.config))(Batch(**({"vision": None, "text": None} | sides)))
        )


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return cache(lambda name: Family(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(
    params=["qwen3_vl", *(pytest.param(name, marks=pytest.mark.medium) for name in BATCHES if name != "qwen3_vl")]
)
def family(request, families):
    return families(request.param)


@pytest.fixture(params=OLDER)
def older(request, families):
    return families(request.param)


def grids_of(inputs):
    """Frames, rows and columns of patches that transformers' processor has made."""
    if "image_grid_thw" in inputs:
        return inputs["image_grid_thw"].tolist()
    return [[1, *(inputs["image_position_ids"][0].amax(0).flip(0) + 1).tolist()]]


def largest(found, expected):
    return float((found - torch.stack(list(expected))).abs().max())


def test_pictures_and_texts_have_transformers_own_vectors_grids_and_tokens(family):
    images, config = pictures(), family.config
    state, texts = decode(config, images), tokenise(family.model, TEXTS)
    expected = [family.library(image=image) for image in images]
    assert [grids_of(inputs) for _, inputs in expected] == [[grid] for grid in state.grids.tolist()]
    assert largest(family.embed(vision=state)["vision"], [row for row, _ in expected]) < 1e-5
    expected = [family.library(text=text) for text in TEXTS]
    ids = [inputs["input_ids"][0].tolist() for _, inputs in expected]
    assert [each.tolist() for each in texts.values.split(texts.lengths.tolist())] == ids
    assert largest(family.embed(text=texts)["text"], [row for row, _ in expected]) < 1e-5


@pytest.mark.medium
@pytest.mark.parametrize("name", CHATS)
@torch.inference_mode()
def test_a_picture_with_its_text_is_one_conversation(families, name):
    family, depth = families(name), NUM_BEFORE[name]
    images, texts = pictures(SIZES[:5]), TEXTS[:5]
    bare = json.loads((family.model / "tokenizer.json").read_text("utf-8")) | {"post_processor": None}
    encoder, alone = CaptionEncoder(json.dumps(bare), 4096), decode(family.config, images)
    text = as_state([encoder.encode(each) for each in texts])
    both = TowerState(alone.values, alone.lengths, alone.grids, text)
    found = family.embed(vision=both)["vision"]
    expected = [family.library(text=each, image=image)[0] for each, image in zip(texts, images, strict=True)]
    assert largest(found, expected) < 1e-5
    moved = (found - family.embed(vision=alone)["vision"]).abs().amax(1)
    assert float(moved.min()) > 1e-3, "the text matters"
    for cut in (2, depth - 1, depth, depth + 1, depth + 3):
        specs = specs_between([(0, 0), (cut, 0), (depth + DECODER, DECODER)])
        assert torch.equal(run_stages(family.model, specs, Batch(both, None))["vision"], found), cut


@pytest.mark.medium
def test_every_cut_of_both_sides_gives_the_bits_of_transformers_own_forward(family):
    assert family.config.num_layers == {"vision": NUM_BEFORE[family.name] + DECODER, "text": DECODER}
    check_every_cut(family.model, family.batch)


@pytest.mark.slow
def test_every_part_matters(family, tmp_path):
    check_every_part_matters(family.model, family.batch, tmp_path)


def test_both_forms_of_tensor_names_give_the_same_weights(older, tmp_path):
    """Older releases have `model.layers.` and `visual.`, newer ones `model.language_model.` and `model.visual.`."""
    folder = shutil.copytree(older.checkpoint, tmp_path / "in")
    tensors = load_file(folder / WEIGHTS_FILE)
    is_new = any(name.startswith("model.language_model.") for name in tensors)
    renamed = {rename(name, is_new): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / WEIGHTS_FILE)
    import_checkpoint(folder, tmp_path / "out")
    own, other = (load_file(path / WEIGHTS_FILE) for path in (older.model, tmp_path / "out"))
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.medium
def test_a_template_can_write_the_conversation_of_a_models_own_code(older, tmp_path):
    """GME's: an instruction of its own, and one more token at the end, whose vector counts."""
    folder = shutil.copytree(older.checkpoint, tmp_path / "in")
    (folder / "chat_template.jinja").write_text(GME_TEMPLATE)
    config = import_checkpoint(folder, tmp_path / "out")
    processor, model = (each.from_pretrained(folder) for each in (AutoProcessor, AutoModel))
    state = tokenise(tmp_path / "out", TEXTS)
    for ids, text in zip(state.values.split(state.lengths.tolist()), TEXTS, strict=True):
        assert ids.tolist() == processor.tokenizer(GME_FORM.format(text))["input_ids"]
    images = pictures(SIZES[:4])
    shard = load_shard(tmp_path / "out", whole_model(config))
    found = vectors(shard(Batch(decode(config, images), None)))["vision"]
    form = GME_FORM.format("<|vision_start|><|image_pad|><|vision_end|>")
    for row, image in zip(found, images, strict=True):
        with torch.no_grad():
            last = model.eval()(**processor(text=[form], images=[image], return_tensors="pt")).last_hidden_state[0, -1]
        assert float((row - torch.nn.functional.normalize(last, dim=-1)).abs().max()) < 1e-5


def rename(name, is_new):
    if is_new:
        return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    if name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"auto_map": {"AutoModel": "modeling_gme.Gme"}}, "modeling_gme.Gme.*never run.*chat_template.jinja"),
        ({"text_config__use_sliding_window": True}, "use_sliding_window = True"),
        ({"text_config__rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters"),
        ({"text_config__num_attention_heads": 5}, "no multiple of num_attention_heads"),
        ({"vision_config__in_channels": 1}, "in_channels = 1"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(older, tmp_path, change, message):
    folder = shutil.copytree(older.checkpoint, tmp_path / "in")
    edit_json(folder / "config.json", **change)
    check_refused(import_checkpoint, folder, tmp_path / "out", message)


def many_texts(limit, number):
    """Texts of several scripts, of one to `limit` words."""
    generator = np.random.default_rng(1)
    lengths = np.geomspace(1, limit, number).astype(int)
    return [" ".join(generator.choice(SCRIPTS, length)).strip() or "a" for length in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHES)
def test_many_pictures_and_texts_have_transformers_own_vectors(families, name):
    """64 pictures from 1 x 1 to 1,600 x 300 px, 64 texts up to the limit, the tokens of 1,000 texts."""
    family, generator = families(name), np.random.default_rng(2)
    sides = [(1, 1), (1600, 300), *np.exp(generator.uniform(0, np.log(400), (NUM_ITEMS - 2, 2))).astype(int).tolist()]
    images = pictures(sides)
    pixels = largest(
        family.embed(vision=decode(family.config, images))["vision"], [family.library(image=each)[0] for each in images]
    )
    limit = family.config.preprocess.max_caption_tokens
    texts = many_texts(limit // (15 if family.is_chat else 17), NUM_ITEMS)
    state = tokenise(family.model, texts)
    assert limit * 3 // 4 < int(state.lengths.max()) < limit
    words = largest(family.embed(text=state)["text"], [family.library(text=each)[0] for each in texts])
    print(f"{name}: largest difference of pictures {pixels:.1e}, of texts {words:.1e}")
    assert max(pixels, words) < 1e-5
    processor = AutoProcessor.from_pretrained(family.checkpoint)
    texts = many_texts(200, NUM_TEXTS)
    state = tokenise(family.model, texts)
    for ids, text in zip(state.values.split(state.lengths.tolist()), texts, strict=True):
        form = text
        if family.is_chat:
            form = processor.apply_chat_template(conversation(text), add_generation_prompt=True, tokenize=False)
        assert ids.tolist() == processor.tokenizer(form)["input_ids"]


def conversation(text):
    system = {"role": "system", "content": [{"type": "text", "text": INSTRUCTION}]}
    return [system, {"role": "user", "content": [{"type": "text", "text": text}]}]
