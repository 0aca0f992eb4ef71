"""Queries of a further model: encoded by its towers, by the servable that made its vectors, or refused in a line."""

import numpy as np
import pytest
import samples

from embedder.config import load_config
from embedder.encoders import servable_encoder
from embedder.encoders.encode_queries import stripped_texts
from embedder.encoders.query_encoder import QueryEncoder
from embedder.encoders.servable_encoder import CodeSources, ServableEncoder, open_servable_encoder
from embedder.errors import ConfigError, StoreError
from embedder.models.further_models import open_models

MEAN_COLOUR = """
import pyarrow as pa


class MeanColour:
    def load(self, device):
        self.scale = 2.0

    def __call__(self, batch):
        pixels = batch.column("image").to_numpy_ndarray()
        means = pixels.reshape(len(pixels), -1, 3).mean(axis=1) * self.scale
        return pa.table({"embedding": pa.array(means.tolist(), pa.list_(pa.float32()))})
"""


def described(tiny_model, **section):
    """Description of the one further model of a configuration, as its folder of a store keeps it."""
    models = [{"uri": str(tiny_model)}, section]
    config = load_config(overrides={"model": models})
    (model,) = open_models(config.model_sections, config.rows)
    return model.info


@pytest.fixture
def colour_file(tmp_path):
    (tmp_path / "colours.py").write_text(MEAN_COLOUR)
    return tmp_path / "colours.py"


@pytest.fixture
def colours(tiny_model, colour_file):
    """A function of the user's own, which embeds an image as its mean colour."""
    columns = {
        "inputs": {"image": {"make": "pixels", "preprocess": {"image_size": 8}}},
        "outputs": {"embedding": {"shape": [3]}},
    }
    return described(tiny_model, name="colours", uri=f"{colour_file}:MeanColour", kind="python", **columns)


@pytest.mark.parametrize(("text", "shown"), [("caf\udce9", r"caf\xe9"), ("a \ud800", r"a \ud800")])
def test_a_query_that_is_not_utf8_is_told_in_a_line_that_can_be_printed(text, shown):
    with pytest.raises(ConfigError) as refused:
        stripped_texts(["a cat", text])
    assert str(refused.value).encode().decode().startswith(f"the query {shown}: it is not valid UTF-8; ")


def test_towers_of_a_further_model_encode_as_their_model_folder_does(tiny_model):
    info = described(tiny_model, name="again", uri=str(tiny_model), kind="towers")
    encoder = open_servable_encoder(info)
    assert isinstance(encoder, QueryEncoder)
    texts = ["a red car", "two cats"]
    assert np.allclose(encoder.encode_text(texts) @ encoder.encode_text(texts).T, np.eye(2), atol=1.0)
    assert encoder.encode_text(texts).shape == (2, encoder.model.config.embedding_dim)


@pytest.fixture
def code(colours):
    """The reader's own configuration, which has the section of the store's model."""
    return CodeSources.of([colours.servable])


def test_a_servable_encodes_the_images_of_queries_as_unit_vectors(colours, code):
    encoder = ServableEncoder(colours, "colours", code)
    images = [np.full((10, 10, 3), colour, np.uint8) for colour in ([200, 0, 0], [0, 100, 100])]
    expected = np.array([[1, 0, 0], [0, 0.5**0.5, 0.5**0.5]])
    assert np.allclose(encoder.encode_image(images), expected, atol=0.02)
    assert encoder.encode_image([samples.image_bytes(3)]).shape == (1, 3)
    assert (encoder.probability(0.5), encoder.warning("xyz")) == (None, None)


def test_a_text_is_refused_by_a_servable_of_images_in_one_line(colours, code):
    with pytest.raises(ConfigError, match="it has no tower that encodes texts alone; search with an image"):
        ServableEncoder(colours, "colours", code).encode_text(["a red car"])


def test_an_image_that_cannot_be_read_is_refused_in_one_line(colours, code, tmp_path):
    encoder = ServableEncoder(colours, "colours", code)
    with pytest.raises(ConfigError, match=r"a query can't be encoded: .*"):
        encoder.encode_image([b"no image at all"])
    with pytest.raises(ConfigError, match="it can't be read"):
        encoder.encode_image([tmp_path / "missing.png"])


def test_a_servable_that_has_changed_since_does_not_encode_queries(colours, code, colour_file):
    colour_file.write_text(MEAN_COLOUR.replace("2.0", "3.0"))
    with pytest.raises(StoreError, match=r"its fingerprint is .*, the store's vectors are of"):
        ServableEncoder(colours, "colours", code)


RULE = (
    "which would run code that the store names; a store is data, of which readers take only the kinds towers "
    "and onnx; give the configuration that has this [[model]] (--config FILE), or run the store's code, if you trust "
    "whoever wrote it (--allow-store-code)"
)


@pytest.mark.parametrize(
    "section",
    [
        {"kind": "python", "uri": "m.py:M"},
        {"kind": "python", "uri": "this.that:M"},
        {"kind": "hf", "uri": "folder"},
        {"kind": "hf", "uri": "folder", "allow_pickle": True},
        {"kind": "vllm", "uri": "folder"},
        {"kind": "torchscript", "uri": "m.pt"},
        {"kind": "torch_export", "uri": "m.pt2"},
        {"kind": "new", "uri": "m"},
        {"kind": ["towers"], "uri": "m"},
    ],
)
def test_of_a_store_only_kinds_without_code_are_opened(colours, section, monkeypatch):
    monkeypatch.setattr(servable_encoder, "make_servable", pytest.fail)
    info = colours.model_copy(update={"servable": section})
    with pytest.raises(StoreError) as refused:
        open_servable_encoder(info, "tags", CodeSources.of([colours.servable]))
    assert str(refused.value) == f"model tags of the store: it is of the kind {section['kind']}, {RULE}"


def test_another_interpreter_is_code_of_whatever_kind_the_model_is(colours, tmp_path):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    info = colours.model_copy(update={"servable": {"kind": "onnx", "uri": "m.onnx", "python": str(program)}})
    with pytest.raises(StoreError, match=r"of the kind onnx in its own interpreter, which would run code"):
        open_servable_encoder(info, "tags").encode_text(["a"])
    assert not (tmp_path / "ran").exists()


def test_the_store_does_not_choose_among_the_readers_own_models(colours):
    own = {**colours.servable, "name": "mine"}
    with pytest.raises(StoreError, match="model colours of the store: it is of the kind python"):
        open_servable_encoder(colours, "colours", CodeSources.of([own]))


def test_of_a_section_of_the_readers_own_the_files_are_the_readers(colours, tmp_path):
    moved = {**colours.servable, "uri": f"{tmp_path / 'moved.py'}:MeanColour"}
    (tmp_path / "moved.py").write_text(MEAN_COLOUR)
    (tmp_path / "colours.py").write_text("raise SystemExit('code of the store ran')")
    encoder = open_servable_encoder(colours, "colours", CodeSources.of([moved]))
    assert encoder.encode_image([np.full((9, 9, 3), 7, np.uint8)]).shape == (1, 3)
    with pytest.raises(StoreError, match="its fingerprint is"):
        open_servable_encoder(colours, "colours", CodeSources(allow_store_code=True))


def test_with_leave_the_code_that_the_store_names_encodes_queries(colours):
    encoder = open_servable_encoder(colours, "colours", CodeSources(allow_store_code=True))
    assert encoder.encode_image([np.full((9, 9, 3), 7, np.uint8)]).shape == (1, 3)
