"""Queries of a further model: encoded by its towers, by the servable that made its vectors, or refused in a line."""

import numpy as np
import pytest
import samples

from embedder.config import load_config
from embedder.engine.further_models import open_models
from embedder.engine.query_encoder import QueryEncoder
from embedder.engine.servable_encoder import ServableEncoder, open_servable_encoder
from embedder.errors import ConfigError, StoreError

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
    (model,) = open_models(load_config(overrides={"model": models}))
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


def test_towers_of_a_further_model_encode_as_their_model_folder_does(tiny_model):
    info = described(tiny_model, name="again", uri=str(tiny_model), kind="towers")
    encoder = open_servable_encoder(info)
    assert isinstance(encoder, QueryEncoder)
    texts = ["a red car", "two cats"]
    assert np.allclose(encoder.encode_text(texts) @ encoder.encode_text(texts).T, np.eye(2), atol=1.0)
    assert encoder.encode_text(texts).shape == (2, encoder.model.config.embedding_dim)


def test_a_servable_encodes_the_images_of_queries_as_unit_vectors(colours):
    encoder = ServableEncoder(colours)
    images = [np.full((10, 10, 3), colour, np.uint8) for colour in ([200, 0, 0], [0, 100, 100])]
    expected = np.array([[1, 0, 0], [0, 0.5**0.5, 0.5**0.5]])
    assert np.allclose(encoder.encode_image(images), expected, atol=0.02)
    assert encoder.encode_image([samples.image_bytes(3)]).shape == (1, 3)
    assert (encoder.probability(0.5), encoder.warning("xyz")) == (None, None)


def test_a_text_is_refused_by_a_servable_of_images_in_one_line(colours):
    with pytest.raises(ConfigError, match="it has no tower that encodes texts alone; search with an image"):
        ServableEncoder(colours).encode_text(["a red car"])


def test_an_image_that_cannot_be_read_is_refused_in_one_line(colours, tmp_path):
    encoder = ServableEncoder(colours)
    with pytest.raises(ConfigError, match=r"a query can't be encoded: .*"):
        encoder.encode_image([b"no image at all"])
    with pytest.raises(ConfigError, match="it can't be read"):
        encoder.encode_image([tmp_path / "missing.png"])


def test_a_servable_that_has_changed_since_does_not_encode_queries(colours, colour_file):
    colour_file.write_text(MEAN_COLOUR.replace("2.0", "3.0"))
    with pytest.raises(StoreError, match=r"its fingerprint is .*, the store's vectors are of"):
        ServableEncoder(colours)
