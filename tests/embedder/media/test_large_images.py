"""Large images within the limits: reduced, halved or refused."""

import io
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder

RED, GREEN, BLUE, YELLOW = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)
PANORAMA = (20_000, 7_500)


def close(found, expected, tolerance):
    return np.abs(np.asarray(found, int) - np.asarray(expected, int)).max() <= tolerance


def panorama(kind, mode="RGB"):
    """150 million pixels: red, green, blue and yellow from left to right."""
    image = Image.new("RGB", PANORAMA)
    for number, colour in enumerate((RED, GREEN, BLUE, YELLOW)):
        image.paste(colour, (5_000 * number, 0, 5_000 * (number + 1), 7_500))
    file = io.BytesIO()
    fast = {"PNG": {"compress_level": 1}, "TIFF": {"compression": "packbits"}}.get(kind, {})
    image.convert(mode).save(file, kind, **fast)
    return file.getvalue()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("JPEG", "RGB"),
        ("PNG", "RGB"),
        *(pytest.param(kind, mode, marks=SLOW) for kind, mode in [("JPEG", "CMYK"), ("PNG", "RGBA"), ("TIFF", "RGB")]),
    ],
)
@pytest.mark.slow
def test_a_panorama_of_150_million_pixels_is_embedded_within_the_limits(kind, mode):
    encoded = panorama(kind, mode)
    with SandboxedDecoder() as decoder:
        for fit in (
            ResizeSpec(224),
            ResizeSpec(224, "pad", resampler="torchvision"),
            ResizeSpec(224, reduced_decode=True),
        ):
            pixels = decoder.image(encoded, fit)
            shown = [tuple(pixels[112, x].tolist()) for x in (28, 84, 140, 196)]
            assert close(shown, [RED, GREEN, BLUE, YELLOW], 3 if kind != "JPEG" else 12)
        peak_bytes = int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{decoder.child_pid}/status").read_text())[1]) << 10
    assert peak_bytes < (400 << 20 if kind == "JPEG" else 2 << 30)


@pytest.mark.medium
@pytest.mark.parametrize("size", [(65_500, 2_000), (2_000, 65_500), (65_500, 16)])
@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
def test_extreme_proportions_of_large_jpegs_are_embedded(decoder, encode_image, size, resize):
    encoded = encode_image(Image.new("L", size, 200), "JPEG")
    pixels = decoder.image(encoded, ResizeSpec(64, resize))
    assert np.abs(pixels.astype(int) - 200).min() <= 3


def test_a_large_jpeg_whose_pixels_cannot_be_in_its_bytes_is_refused(encode_image):
    encoded = bytearray(encode_image(Image.new("RGB", (2000, 2000), RED), "JPEG"))
    with SandboxedDecoder(DecodeLimits(max_pixels=1000 * 1000)) as decoder:
        decoder.image(bytes(encoded), ResizeSpec(16))
        at = encoded.index(b"\xff\xc0") + 5
        encoded[at : at + 4] = struct.pack(">HH", 8000, 8000)
        with pytest.raises(DecodeError, match="TooManyPixels: 8000 x 8000 pixels can't be in"):
            decoder.image(bytes(encoded), ResizeSpec(16))


def test_halving_moves_no_colour(encode_image):
    image = Image.fromarray(np.random.default_rng(3).integers(0, 256, (301, 403, 3), dtype=np.uint8))
    encoded = encode_image(image, "PNG")
    with SandboxedDecoder(DecodeLimits(max_pixels=301 * 403 - 1)) as small, SandboxedDecoder() as large:
        halved, whole = (decoder.image(encoded, ResizeSpec(16)).astype(int) for decoder in (small, large))
    assert 0 < np.abs(halved - whole).max() <= 3
