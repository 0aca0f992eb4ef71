"""BatchPredictor: what it takes is said before anything starts, and a row that can't be embedded keeps its place."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
import samples
from PIL import Image

import embedder
from embedder.encoders.query_encoder import QueryEncoder
from embedder.errors import ArgumentTypeError, ConfigError
from embedder.models.model_folder import open_model
from embedder.predictor import ADDED, check_columns

TAKEN = {
    "files": {"image": pa.binary()},
    "large files": {"image": pa.large_binary(), "caption": pa.large_string()},
    "views": {"image": pa.binary_view(), "caption": pa.string_view()},
    "addresses": {"image": pa.string()},
    "addresses once each": {"image": pa.dictionary(pa.int32(), pa.string())},
    "as Hugging Face has them": {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()})},
    "tensors": {"image": pa.fixed_shape_tensor(pa.uint8(), (32, 24, 3))},
    "grey tensors": {"image": pa.fixed_shape_tensor(pa.uint8(), (32, 24))},
    "extensions of texts": {"image": pa.json_(), "caption": pa.json_()},
    "only captions": {"caption": pa.string(), "price": pa.float64()},
    "nothing but nulls": {"image": pa.null(), "caption": pa.null()},
    "objects": {"image": object, "caption": None},
}


@pytest.mark.parametrize("name", TAKEN)
def test_columns_of_these_types_are_taken(name):
    check_columns(TAKEN[name], "image", "caption")


REFUSED = {
    "a list": ({"image": pa.list_(pa.uint8())}, ["'image' is list<item: uint8>; expected binary (files), string"]),
    "a number": ({"image": pa.int64(), "caption": pa.string()}, ["'image' is int64"]),
    "floats": ({"image": pa.fixed_shape_tensor(pa.float32(), (8, 8, 3))}, ["value_type=float", "a tensor of uint8"]),
    "channels first": ({"image": pa.fixed_shape_tensor(pa.uint8(), (3, 8, 8))}, ["shape=[3,8,8]", "(H, W, 3)"]),
    "a structure": ({"image": pa.struct({"data": pa.binary()})}, ["'image' is struct<data: binary>"]),
    "bytes as a caption": ({"caption": pa.binary()}, ["'caption' is binary; expected string"]),
    "both": (
        {"image": pa.bool_(), "caption": pa.list_(pa.string())},
        ["'image' is bool", "'caption' is list<item: string>; expected string", "or name another"],
    ),
    "neither": (
        {"picture": pa.binary(), "text": pa.string()},
        ["columns picture: binary, text: string, and neither 'image' (binary", "nor 'caption' (string)"],
    ),
    "an added name": ({"image": pa.binary(), ADDED[0]: pa.string()}, ["['image_embedding'] already; drop or rename"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_told_as_expected_and_found_in_a_line(name):
    columns, parts = REFUSED[name]
    with pytest.raises(ConfigError, match="^the dataset[^\n]*$") as caught:
        check_columns(columns, "image", "caption")
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.fixture(scope="module")
def predictor(tiny_model):
    return embedder.BatchPredictor.from_model(tiny_model, num_stages=1)


def test_a_wrong_type_is_told_before_the_result_is_read(predictor, ray_cluster):
    rows = ray_cluster.data.from_items([{"image": 1.5, "caption": "a red car"}])
    with pytest.raises(ConfigError, match="column 'image' is double; expected binary"):
        predictor.predict(rows)
    with pytest.raises(ConfigError, match="neither 'photo'"):
        predictor.predict(rows, image="photo", caption="text")
    computed = rows.map(lambda row: {"image": b"x", "caption": len(row["caption"])})  # Ray Data doesn't know its schema
    with pytest.raises(ConfigError, match="column 'caption' is int64; expected string"):
        predictor.predict(computed)
    tensors = ray_cluster.data.from_numpy(np.zeros((2, 8, 8, 3))).rename_columns({"data": "image"})
    with pytest.raises(ConfigError, match="dtype=double.*expected.*tensor of uint8"):
        predictor.predict(tensors)
    for dataset in ([{"image": b"x"}], pa.table({"image": [b"x"]}), None):
        with pytest.raises(ArgumentTypeError, match=f"found {type(dataset).__name__}; give a dataset of Ray Data"):
            predictor.predict(dataset)
    with pytest.raises(ArgumentTypeError, match="predict: caption: found int; give the name of a column"):
        predictor.predict(rows, caption=3)


@pytest.mark.slow
def test_rows_of_any_form_keep_their_places(predictor, tiny_model, ray_cluster):
    pixels = [np.asarray(samples.make_image(seed)) for seed in range(3)]
    grey = pixels[2][:, :, 0]
    rows = [
        {"n": 0, "image": Image.fromarray(pixels[0])},
        {"n": 1, "image": {"bytes": samples.image_bytes(1), "path": None}},
        {"n": 2, "image": grey},
        {"n": 3, "image": pixels[0] / 255},
        {"n": 4, "image": 5},
        {"n": 5, "image": None},
    ]
    found = {row["n"]: row for row in predictor.predict(ray_cluster.data.from_items(rows)).take_all()}
    expected = QueryEncoder(open_model(str(tiny_model))).encode_image([pixels[0], samples.image_bytes(1), grey])
    assert np.allclose([found[number]["image_embedding"] for number in range(3)], expected, atol=1e-6)
    assert [found[number]["image_embedding"] for number in (3, 4, 5)] == [None] * 3
    assert "found float64 of shape" in found[3]["embedding_error"]
    assert "found int; give a path" in found[4]["embedding_error"]
    assert "neither an image nor a caption" in found[5]["embedding_error"]


@pytest.mark.medium
def test_a_caption_that_is_no_text_costs_its_row_alone(predictor, ray_cluster):
    rows = [
        {"n": 0, "image": samples.image_bytes(0), "caption": {datetime.date(2024, 1, 1)}},
        {"n": 1, "image": samples.image_bytes(1), "caption": "a red car"},
    ]
    dataset = ray_cluster.data.from_items(rows, override_num_blocks=1)
    found = sorted(predictor.predict(dataset).take_all(), key=lambda row: row["n"])
    assert [row["text_embedding"] is None for row in found] == [True, False]
    assert [row["image_embedding"] is None for row in found] == [False, False]
    assert "found set as a caption" in found[0]["embedding_error"]
    assert found[1]["embedding_error"] is None
