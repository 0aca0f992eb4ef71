"""torchvision's resize without torch: equal to the bit for all sizes, and within the memory of the sandbox process."""

from pathlib import Path

import numpy as np
import pytest
from library_versions import skip_where_torch_rounds_otherwise
from PIL import Image

from embedder.media.limits import DecodeLimits
from embedder.media.resample import filter_blocks, resample, resample_in_numpy
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder

FILTERS = ("bilinear", "bicubic", "lanczos")
SIZES = [  # width, height -> width, height
    ((640, 480), (224, 224)),
    ((150, 90), (64, 64)),
    ((31, 200), (224, 224)),
    ((224, 224), (224, 224)),
    ((300, 224), (224, 224)),
    ((224, 7), (224, 224)),
    ((1, 1), (5, 3)),
    ((1, 50), (8, 2)),
    ((999, 1), (10, 10)),
    ((3, 2), (2, 3)),
    ((2100, 3), (7, 5)),  # weights at their largest precision
    ((5, 4), (131, 1031)),
]


def skip_without(interpolation: str) -> None:
    """Skip the test where the installed torch does not know an interpolation, as 2.10 has no lanczos."""
    from torch.nn.functional import interpolate

    if interpolation not in interpolate.__doc__:
        pytest.skip(f"this torch resizes without {interpolation}")


def noise(generator, size):
    """Half of them with extreme values only, which bicubic and Lanczos filters overshoot."""
    values = generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return values if generator.integers(2) else np.where(values > 127, np.uint8(255), np.uint8(0))


def torchvision_resize(values, size, interpolation):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    from torchvision.transforms.v2 import functional

    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torchvision resizes 8-bit images as floats on this processor")
    skip_without(interpolation)
    skip_where_torch_rounds_otherwise(interpolation)
    planes = torch.from_numpy(values.transpose(2, 0, 1).copy())
    method = functional.InterpolationMode(interpolation)
    return functional.resize(planes, list(size[::-1]), interpolation=method, antialias=True).numpy().transpose(1, 2, 0)


@pytest.mark.medium
@pytest.mark.parametrize("interpolation", FILTERS)
def test_values_are_torchvisions_to_the_bit(interpolation):
    generator = np.random.default_rng(0)
    random_sizes = [tuple(map(tuple, generator.integers(2, 400, (2, 2)).tolist())) for _ in range(40)]
    for size_in, size_out in SIZES + random_sizes:
        values = noise(generator, size_in)
        expected = torchvision_resize(values, size_out, interpolation)
        box = (0, 0, *size_out)
        for image in (values, Image.fromarray(values)):
            found = resample_in_numpy(image, size_out, box, interpolation)
            assert np.array_equal(found, expected), (size_in, size_out)


@pytest.mark.parametrize("interpolation", FILTERS)
def test_a_box_and_a_grey_image_give_the_same_values(interpolation):
    values = noise(np.random.default_rng(1), (333, 207))
    box = (17, 3, 98, 64)
    grey = np.ascontiguousarray(values[..., 1:2])
    for resize in (resample, resample_in_numpy):
        whole = resize(values, (100, 70), (0, 0, 100, 70), interpolation)
        assert np.array_equal(resize(values, (100, 70), box, interpolation), whole[3:64, 17:98])
        assert np.array_equal(resize(grey, (100, 70), box, interpolation), whole[3:64, 17:98, 1:2])


def test_single_floats_are_used_only_where_they_are_exact():
    """The sum of white under all absolute weights, counted in the unit of the weights, is a whole number they hold."""
    for interpolation in FILTERS:
        for num_in in (10, 224, 640, 870, 950, 2000, 40_000):
            blocks = filter_blocks(num_in, 224, 0, 224, interpolation)
            for block in blocks:
                steps = block.weights.astype(np.float64) * 2.0**22
                assert np.array_equal(steps, np.rint(steps))
                unit = min(2.0**bit for bit in range(23) if not (steps % 2.0 ** (bit + 1) == 0).all())
                sums = 255 * np.abs(steps).sum(1) / unit
                assert (sums < 2.0 ** (24 if block.weights.dtype == np.float32 else 53)).all()
            assert all(block.weights.dtype == blocks[0].weights.dtype for block in blocks)
    assert filter_blocks(640, 224, 0, 224, "bilinear")[0].weights.dtype == np.float32


@pytest.mark.medium
def test_a_large_image_fits_into_the_child_as_it_does_with_pillow(encode_image):
    """48 million pixels take 192 MB in Pillow; what a filter makes of them must not double that."""
    encoded = encode_image(Image.new("RGB", (8000, 6000), (10, 200, 30)), "PNG", compress_level=1)
    with SandboxedDecoder(DecodeLimits(memory_bytes=400 << 20)) as decoder:
        for resampler in ("pillow", "torchvision"):
            assert (decoder.image(encoded, ResizeSpec(224, resampler=resampler)) == (10, 200, 30)).all()


def test_filters_of_extremely_long_images_are_not_kept():
    filter_blocks.cache_clear()
    for width in (100_000, 640):
        resample_in_numpy(np.full((2, width, 1), 77, np.uint8), (224, 224), (0, 0, 224, 224), "bilinear")
    assert filter_blocks.cache_info().currsize == 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_child_runs_on_one_thread_with_either_resampler(png):
    with SandboxedDecoder() as decoder:
        for resampler in ("pillow", "torchvision"):
            decoder.image(png, ResizeSpec(8, resampler=resampler))
            assert "Threads:\t1\n" in Path(f"/proc/{decoder.child_pid}/status").read_text()
