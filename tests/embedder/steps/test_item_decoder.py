"""Images that steps of the user's return: encoded without loss, and resized as a file with them is."""

import io

import numpy as np
import pytest
from PIL import Image

from embedder.media.limits import DecodeLimits
from embedder.media.resize import ResizeSpec
from embedder.steps.item_decoder import MAIN_ALONE, DecodeSpec, ItemContent, ItemDecoder, bmp


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 257])
def test_an_image_is_encoded_without_loss(width):
    pixels_HWC = np.random.default_rng(width).integers(0, 256, (7, width, 3), np.uint8)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(bmp(pixels_HWC)))), pixels_HWC)


def test_a_returned_image_makes_the_inputs_that_its_file_makes():
    decoder = ItemDecoder(DecodeSpec(ResizeSpec(16, "crop", "bicubic"), DecodeLimits(), None, 8, 1.0, 1, 4))
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (33, 51, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels_HWC).save(file, "PNG")
    (of_file,) = decoder.rows(ItemContent("image", file.getvalue()))
    found = decoder.of_pixels(pixels_HWC, MAIN_ALONE)
    assert found.keys() == {"pixels"} == decoder.image_columns
    np.testing.assert_array_equal(found["pixels"], of_file["pixels"])
