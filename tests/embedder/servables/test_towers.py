"""Cuttable towers as a servable: vectors, sides, patches and fingerprints are those of a run."""

import numpy as np
import pyarrow as pa
import pytest
from servable_runs import png, run_servables, vectors
from tower_families import MAX_TOKENS, SIDE_PX, beside_default, save_random_model, tiny

from embedder.encoders.query_encoder import QueryEncoder
from embedder.errors import EmbedderError
from embedder.models.model_folder import open_model
from embedder.servables import make_servable
from embedder.servables.running_servable import RunningServable
from embedder.servables.servable_errors import ServableError
from shards.model_config import ModelConfig
from shards.model_errors import ModelError
from shards.preprocess import PreprocessConfig
from shards.towers.naflex import NaFlexTower
from shards.towers.qwen3_vl import Qwen3VlTower

SIZES = [(32, 32), (90, 60), (60, 90), (47, 100)]
IMAGES = [png(seed, size) for seed, size in enumerate(SIZES)]
CAPTIONS = ["a red car", "two cats", "fruit on a table", "rain"]


def towers(uri, **keys):
    return make_servable({"name": "t", "uri": str(uri)} | keys)


def test_both_sides_are_the_query_encoders_vectors(tiny_model):
    """Rows with an image, a caption, both, and neither; a batch in which no row has an image."""
    table = pa.table(
        {
            "image": [*IMAGES, None, None, None],
            "caption": [CAPTIONS[0], None, CAPTIONS[2], "", CAPTIONS[1], None, CAPTIONS[3]],
        }
    )
    found = run_servables(table, towers(tiny_model, batch_size=2))
    assert found["t.error"].to_pylist() == [None] * 7
    encoder = QueryEncoder(open_model(str(tiny_model)))
    images = found["t.image_embedding"].to_pylist()
    assert images[4:] == [None] * 3
    assert np.abs(np.array(images[:4]) - encoder.encode_image(IMAGES)).max() < 1e-6
    texts = found["t.text_embedding"].to_pylist()
    assert [text is None for text in texts] == [False, True, False, True, False, True, False]
    for row, caption in enumerate(table["caption"].to_pylist()):
        if caption:
            assert np.abs(np.array(texts[row]) - encoder.encode_text([caption])[0]).max() < 1e-6


@pytest.mark.parametrize("side", ["image", "text"])
def test_one_side_alone_is_as_with_the_other(tiny_model, side):
    table = pa.table({"image": IMAGES, "caption": CAPTIONS})
    both = run_servables(table, towers(tiny_model))
    alone = run_servables(table, towers(tiny_model, sides=[side]))
    assert [name for name in alone.column_names if name.startswith("t.")] == [f"t.{side}_embedding", "t.error"]
    assert np.abs(vectors(alone, f"t.{side}_embedding") - vectors(both, f"t.{side}_embedding")).max() < 1e-6


def test_a_further_model_embeds_no_picture_with_its_caption(tmp_path):
    decoder = beside_default(Qwen3VlTower)
    preprocess = decoder.preprocess.model_copy(update={"joins_captions": True})
    save_random_model(decoder.model_copy(update={"preprocess": preprocess}), tmp_path / "joined")
    with pytest.raises(ServableError, match="import it again without --join-captions"):
        towers(tmp_path / "joined").input_columns()
    assert set(towers(tmp_path / "joined", sides=["text"]).input_columns()) == {"token_ids"}


def naflex_alone(folder):
    """A model folder with a NaFlex tower and no other."""
    preprocess = PreprocessConfig(image_size=SIDE_PX, max_caption_tokens=MAX_TOKENS, resize="patches")
    tower = tiny(NaFlexTower)
    config = ModelConfig(name="tiny", trained=False, embedding_dim=24, vision=tower, text=None, preprocess=preprocess)
    return save_random_model(config, folder)


def test_images_of_their_own_proportions_are_embedded_as_patches(tmp_path):
    folder = naflex_alone(tmp_path / "model")
    found = run_servables(pa.table({"image": [IMAGES[0], None, *IMAGES[1:]]}), towers(folder, batch_size=3))
    rows = [row for row in found["t.image_embedding"].to_pylist() if row is not None]
    assert len(rows) == 4
    assert np.abs(np.array(rows) - QueryEncoder(open_model(str(folder))).encode_image(IMAGES)).max() < 1e-6


def test_two_of_one_preprocessing_share_a_column_and_another_size_has_its_own(tiny_model):
    from embedder.servables.predict import item_inputs

    pixels = {"pixels": {"make": "pixels", "preprocess": {"image_size": 32, "mean": [0, 0, 0]}}}
    section = {"kind": "onnx", "uri": "x.onnx", "outputs": {"y": {}}, "inputs": pixels}
    same = make_servable(section | {"name": "same"})
    larger = {"pixels": {"make": "pixels", "preprocess": {"image_size": 64}}}
    other = make_servable(section | {"name": "other", "inputs": larger})
    images = [name for name in item_inputs([towers(tiny_model), same, other]) if "pixels" in name]
    assert len(images) == 2


def test_the_fingerprint_follows_the_weights_and_not_the_place(tiny_model, tmp_path):
    import shutil

    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    first = towers(tiny_model).fingerprint()
    assert towers(copy, name="other", dtype="bfloat16").fingerprint() == first
    assert towers(copy, sides=["text"]).fingerprint() != first
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert towers(copy).fingerprint() != first


def test_folders_and_keys_that_fit_no_tower_are_refused(tiny_model, tmp_path):
    with pytest.raises(ModelError, match="there is no such folder"):
        towers(tmp_path / "none").fingerprint()
    with pytest.raises(ServableError, match="runs only in this interpreter"):
        towers(tiny_model, python="/usr/bin/python3")
    with pytest.raises(ServableError, match="sides"):
        towers(tiny_model, sides=["audio"])
    folder = naflex_alone(tmp_path / "model")
    for keys in ({"sides": ["text"]}, {"text_of": "caption"}):
        with pytest.raises(EmbedderError, match="no tower for side 'text'"):
            RunningServable(towers(folder, **keys))
