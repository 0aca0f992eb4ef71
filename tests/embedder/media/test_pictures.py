"""Every picture format and mode, with the values of the pixels that come out."""

import io
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from embedder.media.errors import DecodeError
from embedder.media.limits import DecodeLimits
from embedder.media.pictures import to_rgb
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder

RED, GREEN, BLUE, YELLOW, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 255, 255)
LOSSLESS = ["PNG", "GIF", "BMP", "TIFF"]
LOSSY = ["JPEG", "WEBP", "AVIF", "MPO"]


def quarters(width=64, height=48):
    """Red, green / blue, yellow."""
    image = Image.new("RGB", (width, height))
    boxes = [(0, 0), (width // 2, 0), (0, height // 2), (width // 2, height // 2)]
    for (left, top), colour in zip(boxes, (RED, GREEN, BLUE, YELLOW), strict=True):
        image.paste(colour, (left, top, left + width // 2, top + height // 2))
    return image


def corners(pixels):
    """Colours well inside the four quarters: top left, top right, bottom left, bottom right."""
    near, far = len(pixels) // 4, len(pixels) * 3 // 4
    return [tuple(pixels[y, x].tolist()) for y in (near, far) for x in (near, far)]


def close(found, expected, tolerance):
    return np.abs(np.asarray(found, int) - np.asarray(expected, int)).max() <= tolerance


@pytest.mark.parametrize("kind", LOSSLESS + LOSSY)
def test_each_format_gives_its_colours_in_their_places(door, encode_picture, kind):
    pixels = door.picture(encode_picture(quarters(), kind), ResizeSpec(32))
    assert (pixels.shape, pixels.dtype, pixels.flags.writeable) == ((32, 32, 3), np.uint8, True)
    assert close(corners(pixels), [RED, GREEN, BLUE, YELLOW], 0 if kind in LOSSLESS else 12)


def test_a_file_of_the_disk_gives_the_same_as_its_bytes(door, encode_picture, tmp_path):
    encoded = encode_picture(quarters(), "PNG")
    path = tmp_path / "picture with umlaut \u00fc and a wrong name.jpg"
    path.write_bytes(encoded)
    for source in (path, str(path), memoryview(encoded), bytearray(encoded)):
        assert np.array_equal(door.picture(source, ResizeSpec(32)), door.picture(encoded, ResizeSpec(32)))


SHOWN = {  # EXIF orientation -> which stored corner is shown top left, top right, bottom left, bottom right
    1: (0, 1, 2, 3),
    2: (1, 0, 3, 2),
    3: (3, 2, 1, 0),
    4: (2, 3, 0, 1),
    5: (0, 2, 1, 3),
    6: (2, 0, 3, 1),
    7: (3, 1, 2, 0),
    8: (1, 3, 0, 2),
}


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_exif_orientation_is_honoured(door, encode_picture, kind, orientation, reduced):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode_picture(quarters(256, 128), kind, exif=exif)
    pixels = door.picture(encoded, ResizeSpec(16, reduced_decode=reduced))
    stored = [RED, GREEN, BLUE, YELLOW]
    assert close(corners(pixels), [stored[i] for i in SHOWN[orientation]], 25)


def test_orientation_turns_the_proportions_too(door, encode_picture):
    exif = Image.Exif()
    exif[0x0112] = 6
    encoded = encode_picture(Image.new("RGB", (64, 32), RED), "PNG", exif=exif)
    pixels = door.picture(encoded, ResizeSpec(32, "pad"))  # shown upright: 16 wide, 32 high
    assert tuple(pixels[0, 16]) == tuple(pixels[31, 16]) == RED
    assert tuple(pixels[16, 7]) == tuple(pixels[16, 24]) == WHITE


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0rubbish", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"]
)
def test_broken_exif_does_not_cost_the_picture(door, encode_picture, exif):
    pixels = door.picture(encode_picture(quarters(), "JPEG", exif=exif), ResizeSpec(32))
    assert close(corners(pixels), [RED, GREEN, BLUE, YELLOW], 12)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_alpha_is_laid_on_white(door, encode_picture, mode, kind):
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 2, 4))
    image.putpixel((0, 0), (0, 0, 0, 51))
    pixels = door.picture(encode_picture(image.convert(mode), kind), ResizeSpec(4))
    assert [pixels[y, x].tolist() for y, x in ((1, 0), (1, 3), (0, 0))] == [[0] * 3, [255] * 3, [204] * 3]


@pytest.mark.parametrize("mode", ["PA", "La", "RGBa"])
def test_rare_modes_with_alpha_are_laid_on_white(mode):
    num_colours = 3 if mode == "RGBa" else 1
    image = Image.frombytes(mode, (2, 1), b"\0" * num_colours + b"\x33" + b"\0" * num_colours + b"\0")
    if mode == "PA":
        image.putpalette([0, 0, 0, 9, 9, 9])
    assert np.asarray(to_rgb(image))[0].tolist() == [[204] * 3, [255] * 3]


def test_what_lies_under_transparent_pixels_does_not_shine_through(door, encode_picture):
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert (door.picture(encode_picture(image, "PNG"), ResizeSpec(4)) == 255).all()
    assert (door.picture(encode_picture(image, "WEBP", lossless=True, exact=True), ResizeSpec(4)) == 255).all()


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_palette_transparency_is_laid_on_white(door, encode_picture, kind):
    image = Image.new("P", (4, 4), 0)
    image.putpalette([10, 20, 30, 200, 100, 0] + [0] * 750)
    image.paste(1, (2, 0, 4, 4))
    pixels = door.picture(encode_picture(image, kind, transparency=0), ResizeSpec(4))
    assert [pixels[0, 0].tolist(), pixels[0, 3].tolist()] == [[255, 255, 255], [200, 100, 0]]


def test_palette_with_graded_alpha(door, encode_picture):
    image = Image.new("P", (2, 1), 0)
    image.putpalette([0, 0, 0] * 256)
    image.putpixel((1, 0), 1)
    pixels = door.picture(encode_picture(image, "PNG", transparency=bytes([0, 51])), ResizeSpec(2))
    assert pixels[0].tolist() == [[255] * 3, [204] * 3]


@pytest.mark.parametrize(("mode", "key", "other"), [("RGB", (9, 8, 7), (1, 2, 3)), ("L", 77, 78)])
def test_a_colour_key_is_transparent(door, encode_picture, mode, key, other):
    image = Image.new(mode, (2, 1), key)
    image.putpixel((1, 0), other)
    pixels = door.picture(encode_picture(image, "PNG", transparency=key), ResizeSpec(2))
    assert pixels[0].tolist() == [[255] * 3, list(other) if mode == "RGB" else [other] * 3]


@pytest.mark.parametrize("mode", ["1", "L", "P"])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "GIF"])
def test_grey_and_two_level_pictures_become_rgb(door, encode_picture, mode, kind):
    image = Image.new("L", (4, 4), 0)
    image.paste(255, (2, 0, 4, 4))
    pixels = door.picture(encode_picture(image.convert(mode), kind), ResizeSpec(4))
    assert [pixels[0, 0].tolist(), pixels[3, 3].tolist()] == [[0, 0, 0], [255, 255, 255]]


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_is_not_inverted(door, encode_picture, kind):
    """Pillow writes CMYK JPEGs as Adobe does, inverted, and says so in the file."""
    pixels = door.picture(encode_picture(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), kind), ResizeSpec(4))
    assert close(pixels[2, 2], RED, 6)
    pixels = door.picture(encode_picture(Image.new("CMYK", (16, 16), (0, 0, 0, 0)), kind), ResizeSpec(4))
    assert close(pixels[2, 2], WHITE, 6)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_not_clipped(door, encode_picture, kind):
    values = np.array([[0, 256, 32896, 65535]], np.uint16).repeat(4, 0)
    pixels = door.picture(encode_picture(Image.fromarray(values), kind), ResizeSpec(4))
    assert pixels[1, :, 0].tolist() == [0, 1, 128, 255]
    assert (pixels == pixels[..., :1]).all()


def test_16_bit_grey_of_either_byte_order(door):
    for order, magic in (("<", b"II*\0"), (">", b"MM\0*")):
        entries = [
            (256, 4, 2),
            (257, 4, 2),
            (258, 3, 16),
            (259, 3, 1),
            (262, 3, 1),
            (273, 4, 8),
            (278, 4, 2),
            (279, 4, 8),
        ]
        data = struct.pack(order + "4H", 0, 20000, 40000, 65535)
        body = struct.pack(order + "H", len(entries))
        for tag, kind, value in entries:
            packed = struct.pack(order + ("H2x" if kind == 3 else "I"), value)
            body += struct.pack(order + "HHI", tag, kind, 1) + packed
        tiff = magic + struct.pack(order + "I", 16) + data + body + b"\0\0\0\0"
        assert door.picture(tiff, ResizeSpec(2))[..., 0].ravel().tolist() == [0, 78, 156, 255]


def test_16_bit_colour_with_a_colour_key_is_not_lost(door):
    """Pillow cuts such pictures to 8 bits but leaves the key at 16."""
    rows = b"\0" + struct.pack(">6H", 65535, 0, 0, 0, 65535, 0)

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    key = struct.pack(">3H", 1000, 2000, 3000)
    encoded = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"tRNS", key)
    encoded += chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert door.picture(encoded, ResizeSpec(2))[0].tolist() == [list(RED), list(GREEN)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 200.0], [0, 100, 200]),
        ([0.0, 257.0, 65535.0], [0, 1, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([1e6, 2e6, 3e6], [0, 128, 255]),
        ([-5.0, -5.0, -5.0], [0, 0, 0]),
    ],
)
def test_float_greys_take_the_least_range_that_holds_them(door, encode_picture, values, expected):
    image = Image.fromarray(np.array([values] * 3, np.float32))
    pixels = door.picture(encode_picture(image, "TIFF"), ResizeSpec(3))
    assert close(pixels[1, :, 0], expected, 1)


def test_32_bit_integers_are_scaled(door, encode_picture):
    for values, expected in (
        ([0, 32896, 65535], [0, 128, 255]),
        ([-70000, 0, 70000], [0, 128, 255]),
        ([0, 9, 200],) * 2,
    ):
        image = Image.fromarray(np.array([values] * 3, np.int32))
        assert close(door.picture(encode_picture(image, "TIFF"), ResizeSpec(3))[1, :, 0], expected, 1)


def test_undefined_float_values_are_refused(door, encode_picture):
    image = Image.fromarray(np.array([[np.inf, 0.0]], np.float32))
    with pytest.raises(DecodeError, match="infinite"):
        door.picture(encode_picture(image, "TIFF"), ResizeSpec(2))


def test_only_the_first_frame_of_an_animation_counts(door, encode_picture):
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, GREEN, BLUE)]
    for kind in ("GIF", "PNG", "WEBP", "TIFF", "AVIF"):
        encoded = encode_picture(frames[0], kind, save_all=True, append_images=frames[1:])
        assert close(door.picture(encoded, ResizeSpec(4))[0, 0], RED, 12), kind


def test_crop_shows_the_middle_and_pad_the_whole(door, encode_picture):
    image = Image.new("RGB", (96, 32), GREEN)
    image.paste(RED, (0, 0, 32, 32))
    image.paste(BLUE, (64, 0, 96, 32))
    encoded = encode_picture(image, "PNG")
    assert (door.picture(encoded, ResizeSpec(32, "crop")) == GREEN).all()
    padded = door.picture(encoded, ResizeSpec(96, "pad"))
    assert [tuple(padded[y, x]) for y, x in ((31, 48), (32, 2), (48, 48), (63, 94), (64, 2))] == [
        WHITE,
        RED,
        GREEN,
        BLUE,
        WHITE,
    ]


def test_very_long_pictures_fit_without_great_memory(door, encode_picture):
    encoded = encode_picture(Image.new("RGB", (60_000, 1), GREEN), "PNG")
    for resampler in ("pillow", "torchvision"):
        for resize in ("squash", "crop"):
            assert (door.picture(encoded, ResizeSpec(224, resize, resampler=resampler)) == GREEN).all()
        assert tuple(door.picture(encoded, ResizeSpec(224, "pad", resampler=resampler))[111, 5]) == GREEN


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("resize", ["squash", "crop"])
def test_pixels_equal_the_plain_pillow_resize(door, encode_picture, interpolation, resize):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (77, 131, 3), dtype=np.uint8))
    pixels = door.picture(encode_picture(image, "PNG"), ResizeSpec(32, resize, interpolation))
    method = Image.Resampling[interpolation.upper()]
    if resize == "squash":
        expected = image.resize((32, 32), method)
    else:
        expected = image.resize((54, 32), method).crop((11, 0, 43, 32))
    assert np.array_equal(pixels, np.asarray(expected))


def test_reduced_decode_is_near_and_never_below_twice_the_target(door, encode_picture):
    y, x = np.mgrid[0:600, 0:800]
    waves = np.stack([np.sin(x / 40), np.sin(y / 50), np.sin((x + y) / 60)], -1) * 100 + 128
    encoded = encode_picture(Image.fromarray(waves.astype(np.uint8)), "JPEG", quality=95)
    full, reduced = (door.picture(encoded, ResizeSpec(64, reduced_decode=r)).astype(int) for r in (False, True))
    assert 0 < np.abs(full - reduced).max() <= 6
    # 1/2 of 800 x 600 would be below twice 224: nothing is reduced
    full, reduced = (door.picture(encoded, ResizeSpec(224, reduced_decode=r)) for r in (False, True))
    assert np.abs(full.astype(int) - reduced).max() <= 1


def test_pixels_are_those_of_transformers_vit_processors(door, encode_picture):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    from transformers import ViTImageProcessor
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    options = {"do_rescale": False, "do_normalize": False, "size": {"height": 48, "width": 48}}
    processors = {"pillow": ViTImageProcessorPil(**options), "torchvision": ViTImageProcessor(**options)}
    generator = np.random.default_rng(1)
    for height, width in ((480, 640), (31, 200), (48, 48), (7, 5), (300, 301)):
        image = Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for resampler, processor in processors.items():
            pixels = door.picture(encode_picture(image, "PNG"), ResizeSpec(48, resampler=resampler))
            assert np.array_equal(pixels, np.asarray(processor(image)["pixel_values"][0]).transpose(1, 2, 0))


@pytest.mark.parametrize("kind", LOSSLESS + LOSSY)
def test_truncated_files_are_refused(door, encode_picture, kind):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    whole = encode_picture(image, kind)
    for fit in (ResizeSpec(16), ResizeSpec(16, reduced_decode=True)):
        for keep in (0.9, 0.5, 0.1):
            with pytest.raises(DecodeError) as caught:
                door.picture(whole[: int(len(whole) * keep)], fit)
            assert not caught.value.transient
            assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "rubbish", [b"", b"\x00", b"not a picture", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe-3.0 EPSF"]
)
def test_what_is_no_picture_is_refused(door, rubbish):
    with pytest.raises(DecodeError) as caught:
        door.picture(rubbish, ResizeSpec(8))
    assert caught.value.error_type == ("EmptyFile" if not rubbish else "UnidentifiedImageError")
    assert "BytesIO" not in str(caught.value)


@pytest.mark.parametrize("kind", ["PPM", "ICO", "TGA", "PDF", "JPEG2000"])
def test_formats_off_the_list_are_refused(door, encode_picture, kind):
    with pytest.raises(DecodeError, match="UnidentifiedImageError"):
        door.picture(encode_picture(quarters(), kind), ResizeSpec(8))


def test_noise_in_a_good_file_never_harms_the_next(door, encode_picture, png):
    generator = np.random.default_rng(5)
    files = [encode_picture(quarters(), kind) for kind in LOSSLESS + LOSSY]
    outcomes = set()
    for number in range(120):
        broken = bytearray(files[number % len(files)])
        for _ in range(6):
            broken[generator.integers(4, len(broken))] = generator.integers(0, 256)
        try:
            assert door.picture(bytes(broken), ResizeSpec(16)).shape == (16, 16, 3)
            outcomes.add("decoded")
        except DecodeError:
            outcomes.add("refused")
    assert outcomes == {"decoded", "refused"}
    assert (door.picture(png, ResizeSpec(4)) == (250, 120, 10)).all()


def test_an_empty_exif_and_a_comment_do_no_harm(door):
    file = io.BytesIO()
    quarters().save(file, "JPEG", exif=b"", comment=b"x" * 60_000)
    assert close(corners(door.picture(file.getvalue(), ResizeSpec(32))), [RED, GREEN, BLUE, YELLOW], 12)


PANORAMA = (20_000, 7_500)


def panorama(kind, mode="RGB"):
    """150 million pixels: red, green, blue and yellow from left to right."""
    image = Image.new("RGB", PANORAMA)
    for number, colour in enumerate((RED, GREEN, BLUE, YELLOW)):
        image.paste(colour, (5_000 * number, 0, 5_000 * (number + 1), 7_500))
    file = io.BytesIO()
    fast = {"PNG": {"compress_level": 1}, "TIFF": {"compression": "packbits"}}.get(kind, {})
    image.convert(mode).save(file, kind, **fast)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "mode"), [("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "RGBA"), ("TIFF", "RGB")]
)
def test_a_panorama_of_150_million_pixels_is_embedded_within_the_limits(kind, mode):
    encoded = panorama(kind, mode)
    with SandboxedDecoder() as door:
        for fit in (
            ResizeSpec(224),
            ResizeSpec(224, "pad", resampler="torchvision"),
            ResizeSpec(224, reduced_decode=True),
        ):
            pixels = door.picture(encoded, fit)
            shown = [tuple(pixels[112, x].tolist()) for x in (28, 84, 140, 196)]
            assert close(shown, [RED, GREEN, BLUE, YELLOW], 3 if kind != "JPEG" else 12)
        peak_bytes = int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{door.child_pid}/status").read_text())[1]) << 10
    assert peak_bytes < (400 << 20 if kind == "JPEG" else 2 << 30)


@pytest.mark.parametrize("size", [(65_500, 2_000), (2_000, 65_500), (65_500, 16)])
@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
def test_extreme_proportions_of_large_jpegs_are_embedded(door, encode_picture, size, resize):
    encoded = encode_picture(Image.new("L", size, 200), "JPEG")
    pixels = door.picture(encoded, ResizeSpec(64, resize))
    assert np.abs(pixels.astype(int) - 200).min() <= 3


def test_a_large_jpeg_whose_pixels_cannot_be_in_its_bytes_is_refused(encode_picture):
    encoded = bytearray(encode_picture(Image.new("RGB", (2000, 2000), RED), "JPEG"))
    with SandboxedDecoder(DecodeLimits(max_pixels=1000 * 1000)) as door:
        door.picture(bytes(encoded), ResizeSpec(16))
        at = encoded.index(b"\xff\xc0") + 5
        encoded[at : at + 4] = struct.pack(">HH", 8000, 8000)
        with pytest.raises(DecodeError, match="TooManyPixels: 8000 x 8000 pixels can't be in"):
            door.picture(bytes(encoded), ResizeSpec(16))


def test_halving_moves_no_colour(encode_picture):
    image = Image.fromarray(np.random.default_rng(3).integers(0, 256, (301, 403, 3), dtype=np.uint8))
    encoded = encode_picture(image, "PNG")
    with SandboxedDecoder(DecodeLimits(max_pixels=301 * 403 - 1)) as small, SandboxedDecoder() as large:
        halved, whole = (door.picture(encoded, ResizeSpec(16)).astype(int) for door in (small, large))
    assert 0 < np.abs(halved - whole).max() <= 3
