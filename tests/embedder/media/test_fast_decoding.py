"""JPEGs decoded into arrays, and PyTorch's kernel called in C: the pixels of Pillow and of NumPy, to the bit."""

import io
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from PIL import Image

from embedder.media import images, resample
from embedder.media.arrays import to_array, to_pillow, upright_array
from embedder.media.images import decode_image, upright
from embedder.media.jpeg import decode_pixels
from embedder.media.resample import resample_in_numpy
from embedder.media.resize import ResizeSpec
from embedder.media.torch_kernel import load_kernel

RULES = (
    ResizeSpec(48, "crop", "bicubic", resampler="torchvision"),
    ResizeSpec(48, "pad_black", "bilinear", resampler="torchvision"),
    ResizeSpec(48, "squash", "bilinear"),
    ResizeSpec(48, "patches", "bilinear", resampler="torchvision", patch_size=8, max_patches=30),
)
MAX_PIXELS = 1_000_000


def photograph(size, mode="RGB"):
    rng = np.random.default_rng(sum(size))
    small = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8))
    noise = rng.normal(0, 20, (size[1], size[0], 1))
    pixels = np.asarray(small.resize(size, Image.Resampling.BICUBIC)) + noise
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


def jpeg(image, **settings):
    file = io.BytesIO()
    image.save(file, "JPEG", **settings)
    return file.getvalue()


def with_pillow(encoded, rule, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(images, "decode_pixels", lambda *_: None)
        return decode_image(encoded, rule, MAX_PIXELS)


def kernels():
    pytest.importorskip("torch")
    found = load_kernel(resample_in_numpy)
    if not found:
        pytest.skip("this PyTorch has no stable C interface, or this processor no AVX2")
    return found


@pytest.mark.medium
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_pixels_of_jpegs_are_pillows(mode, monkeypatch):
    pytest.importorskip("simplejpeg")
    for size, subsampling, progressive, quality in product(
        ((1, 1), (7, 9), (16, 31), (130, 97)), (0, 1, 2), (False, True), (30, 95)
    ):
        exif = Image.Exif()
        exif[0x0112] = 1 + (size[0] + subsampling) % 8
        settings = {"subsampling": subsampling} if mode == "RGB" else {}
        encoded = jpeg(photograph(size, mode), quality=quality, progressive=progressive, exif=exif, **settings)
        for rule in RULES:
            assert decode_image(encoded, rule, MAX_PIXELS) == with_pillow(encoded, rule, monkeypatch)


@pytest.mark.parametrize("subsampling", ["440", "411", "422", "Gray"])
def test_other_subsamplings_give_pillows_pixels(subsampling):
    simplejpeg = pytest.importorskip("simplejpeg")
    pixels = np.asarray(photograph((101, 67)))
    encoded = simplejpeg.encode_jpeg(pixels, 85, "RGB", colorsubsampling=subsampling)
    with Image.open(io.BytesIO(encoded)) as image:
        assert np.array_equal(decode_pixels(encoded, image.mode), to_array(image))


def test_the_array_is_taken_where_the_data_are_whole_only():
    pytest.importorskip("simplejpeg")
    encoded = jpeg(photograph((130, 97)), quality=90)
    assert decode_pixels(encoded, "RGB").shape == (97, 130, 3)
    assert decode_pixels(encoded, "CMYK") is None
    assert decode_pixels(encoded[: len(encoded) // 2], "RGB") is None
    assert decode_pixels(encoded[:2000] + bytes(50) + encoded[2050:], "RGB") is None


def test_orientations_of_arrays_are_those_of_pillow():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    for num_channels, orientation in product((1, 3), range(10)):
        image = np.ascontiguousarray(pixels[..., :num_channels])
        expected = to_array(upright(to_pillow(image), orientation))
        assert np.array_equal(upright_array(image, orientation), expected)


def test_the_kernel_gives_numpys_values():
    rng = np.random.default_rng(0)
    for interpolation, kernel in kernels().items():
        for width, height, num_channels in (
            (1, 1, 3),
            (1, 50, 1),
            (50, 1, 3),
            (7, 1000, 3),
            (500, 375, 3),
            (90, 90, 1),
        ):
            image = rng.integers(0, 256, (height, width, num_channels), np.uint8)
            for size in ((1, 1), (5, 9), (224, 224), (300, 2)):
                whole = resample_in_numpy(image, size, (0, 0, *size), interpolation)
                for box in ((0, 0, *size), (size[0] // 3, 0, size[0], size[1] // 2 + 1)):
                    part = whole[box[1] : box[3], box[0] : box[2]]
                    assert np.array_equal(kernel.resize(image, size, box, interpolation), part)


def test_the_kernel_is_loaded_once_numpy_has_taken_as_long(monkeypatch):
    kernels()
    monkeypatch.setattr(resample, "LOAD_S", 3600.0)
    monkeypatch.setattr(resample, "_faster", faster := resample._FasterKernel())
    image = np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8)
    first = resample.resample(image, (298, 224), (37, 0, 261, 224), "bicubic")
    assert faster.of_filter("bicubic") is None
    assert faster.spent_s > 0
    faster.spent_s = resample.LOAD_S
    assert faster.of_filter("bicubic") is not None
    assert np.array_equal(resample.resample(image, (298, 224), (37, 0, 261, 224), "bicubic"), first)


def test_no_room_for_the_library_leaves_the_work_to_numpy():
    """In a process whose address space is nearly used up the library would end it while it loads."""
    pytest.importorskip("torch")
    program = (
        "import resource; from embedder.media.torch_kernel import load_kernel;"
        "resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20));"
        "print(load_kernel(None))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "{}\n"
