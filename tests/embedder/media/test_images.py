"""Every image format and mode, with the values of the pixels that come out."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from quarters import BLUE, GREEN, RED, SHOWN, WHITE, YELLOW, close, corners, quarters
from sandbox_checks import chunk

from embedder.media.images import to_rgb
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec

LOSSLESS = ["PNG", "GIF", "BMP", "TIFF"]
LOSSY = ["JPEG", "WEBP", "AVIF", "MPO"]


@pytest.mark.parametrize("kind", LOSSLESS + LOSSY)
def test_each_format_gives_its_colours_in_their_places(decoder, encode_image, kind):
    pixels = decoder.image(encode_image(quarters(), kind), ResizeSpec(32))
    assert (pixels.shape, pixels.dtype, pixels.flags.writeable) == ((32, 32, 3), np.uint8, True)
    assert close(corners(pixels), [RED, GREEN, BLUE, YELLOW], 0 if kind in LOSSLESS else 12)


def test_a_file_of_the_disk_gives_the_same_as_its_bytes(decoder, encode_image, tmp_path):
    encoded = encode_image(quarters(), "PNG")
    path = tmp_path / "image with umlaut \u00fc and a wrong name.jpg"
    path.write_bytes(encoded)
    for source in (path, str(path), memoryview(encoded), bytearray(encoded)):
        assert np.array_equal(decoder.image(source, ResizeSpec(32)), decoder.image(encoded, ResizeSpec(32)))


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_exif_orientation_is_honoured(decoder, encode_image, kind, orientation, reduced):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode_image(quarters(256, 128), kind, exif=exif)
    pixels = decoder.image(encoded, ResizeSpec(16, reduced_decode=reduced))
    stored = [RED, GREEN, BLUE, YELLOW]
    assert close(corners(pixels), [stored[i] for i in SHOWN[orientation]], 25)


@pytest.mark.parametrize("num_tags", [1, 5000, 0xFFFF])
def test_a_directory_that_claims_more_tags_than_it_has_keeps_its_orientation(decoder, encode_image, num_tags):
    directory = struct.pack("<HHHII", num_tags, 0x0112, 3, 1, 6)
    encoded = encode_image(quarters(256, 128), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0" + directory)
    pixels = decoder.image(encoded, ResizeSpec(16))
    assert close(corners(pixels), [[RED, GREEN, BLUE, YELLOW][i] for i in SHOWN[6]], 25)


def test_orientation_turns_the_proportions_too(decoder, encode_image):
    exif = Image.Exif()
    exif[0x0112] = 6
    encoded = encode_image(Image.new("RGB", (64, 32), RED), "PNG", exif=exif)
    pixels = decoder.image(encoded, ResizeSpec(32, "pad"))  # shown upright: 16 wide, 32 high
    assert tuple(pixels[0, 16]) == tuple(pixels[31, 16]) == RED
    assert tuple(pixels[16, 7]) == tuple(pixels[16, 24]) == WHITE


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0rubbish", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"]
)
def test_broken_exif_does_not_cost_the_image(decoder, encode_image, exif):
    pixels = decoder.image(encode_image(quarters(), "JPEG", exif=exif), ResizeSpec(32))
    assert close(corners(pixels), [RED, GREEN, BLUE, YELLOW], 12)


def pair(mode, left, right, palette=()):
    """An image of two pixels."""
    image = Image.new(mode, (2, 1), left)
    if palette:
        image.putpalette([*palette, *[0] * (768 - len(palette))])
    image.putpixel((1, 0), right)
    return image


@pytest.mark.parametrize(
    ("kind", "image", "options", "shown"),
    [
        *(
            (kind, pair("RGBA", (0, 0, 0, 51), (0, 0, 0, 0)).convert(mode), {}, [204, 255])
            for kind in ("PNG", "TIFF")
            for mode in ("RGBA", "LA")
        ),
        # What lies under transparent pixels does not shine through.
        ("PNG", pair("RGBA", (255, 0, 0, 0), (0, 0, 0, 255)), {}, [255, 0]),
        ("WEBP", pair("RGBA", (255, 0, 0, 0), (0, 0, 0, 255)), {"lossless": True, "exact": True}, [255, 0]),
        ("PNG", pair("P", 0, 1, (10, 20, 30, 99, 99, 99)), {"transparency": 0}, [255, 99]),
        ("GIF", pair("P", 0, 1, (10, 20, 30, 99, 99, 99)), {"transparency": 0}, [255, 99]),
        ("PNG", pair("P", 0, 1, (0, 0, 0, 0, 0, 0)), {"transparency": bytes([0, 51])}, [255, 204]),
        ("PNG", pair("RGB", (9, 8, 7), (3, 3, 3)), {"transparency": (9, 8, 7)}, [255, 3]),
        ("PNG", pair("L", 77, 78), {"transparency": 77}, [255, 78]),
        *(
            (kind, pair("L", 0, 255).convert(mode), {}, [0, 255])
            for kind in ("PNG", "TIFF", "BMP", "GIF")
            for mode in ("1", "L", "P")
        ),
    ],
)
def test_each_mode_becomes_rgb_on_white(decoder, encode_image, kind, image, options, shown):
    pixels = decoder.image(encode_image(image, kind, **options), ResizeSpec(2))
    assert pixels[0].tolist() == [[value] * 3 for value in shown]


@pytest.mark.parametrize("mode", ["PA", "La", "RGBa"])
def test_rare_modes_with_alpha_are_laid_on_white(mode):
    num_colours = 3 if mode == "RGBa" else 1
    image = Image.frombytes(mode, (2, 1), b"\0" * num_colours + b"\x33" + b"\0" * num_colours + b"\0")
    if mode == "PA":
        image.putpalette([0, 0, 0, 9, 9, 9])
    assert np.asarray(to_rgb(image))[0].tolist() == [[204] * 3, [255] * 3]


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_is_not_inverted(decoder, encode_image, kind):
    """Pillow writes CMYK JPEGs as Adobe does, inverted, and says so in the file."""
    pixels = decoder.image(encode_image(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), kind), ResizeSpec(4))
    assert close(pixels[2, 2], RED, 6)
    pixels = decoder.image(encode_image(Image.new("CMYK", (16, 16), (0, 0, 0, 0)), kind), ResizeSpec(4))
    assert close(pixels[2, 2], WHITE, 6)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_not_clipped(decoder, encode_image, kind):
    values = np.array([[0, 256, 32896, 65535]], np.uint16).repeat(4, 0)
    pixels = decoder.image(encode_image(Image.fromarray(values), kind), ResizeSpec(4))
    assert pixels[1, :, 0].tolist() == [0, 1, 128, 255]
    assert (pixels == pixels[..., :1]).all()


def test_16_bit_grey_of_either_byte_order(decoder):
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
        assert decoder.image(tiff, ResizeSpec(2))[..., 0].ravel().tolist() == [0, 78, 156, 255]


def test_16_bit_colour_with_a_colour_key_is_not_lost(decoder):
    """Pillow cuts such images to 8 bits but leaves the key at 16."""
    rows = b"\0" + struct.pack(">6H", 65535, 0, 0, 0, 65535, 0)
    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    key = struct.pack(">3H", 1000, 2000, 3000)
    encoded = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"tRNS", key)
    encoded += chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert decoder.image(encoded, ResizeSpec(2))[0].tolist() == [list(RED), list(GREEN)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 200.0], [0, 100, 200]),
        ([0.0, 257.0, 65535.0], [0, 1, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([1e6, 2e6, 3e6], [0, 128, 255]),
        ([-5.0, -5.0, -5.0], [0, 0, 0]),
        ([0, 32896, 65535], [0, 128, 255]),
        ([-70000, 0, 70000], [0, 128, 255]),
        ([0, 9, 200], [0, 9, 200]),
    ],
)
def test_greys_of_32_bits_take_the_least_range_that_holds_them(decoder, encode_image, values, expected):
    image = Image.fromarray(np.array([values] * 3, np.float32 if isinstance(values[0], float) else np.int32))
    pixels = decoder.image(encode_image(image, "TIFF"), ResizeSpec(3))
    assert close(pixels[1, :, 0], expected, 1)


def test_undefined_float_values_are_refused(decoder, encode_image):
    image = Image.fromarray(np.array([[np.inf, 0.0]], np.float32))
    with pytest.raises(DecodeError, match="infinite"):
        decoder.image(encode_image(image, "TIFF"), ResizeSpec(2))


def test_crop_shows_the_middle_and_pad_the_whole(decoder, encode_image):
    image = Image.new("RGB", (96, 32), GREEN)
    image.paste(RED, (0, 0, 32, 32))
    image.paste(BLUE, (64, 0, 96, 32))
    encoded = encode_image(image, "PNG")
    assert (decoder.image(encoded, ResizeSpec(32, "crop")) == GREEN).all()
    padded = decoder.image(encoded, ResizeSpec(96, "pad"))
    assert [tuple(padded[y, x]) for y, x in ((31, 48), (32, 2), (48, 48), (63, 94), (64, 2))] == [
        WHITE,
        RED,
        GREEN,
        BLUE,
        WHITE,
    ]


def test_very_long_images_fit_without_great_memory(decoder, encode_image):
    encoded = encode_image(Image.new("RGB", (60_000, 1), GREEN), "PNG")
    for resampler in ("pillow", "torchvision"):
        for resize in ("squash", "crop"):
            assert (decoder.image(encoded, ResizeSpec(224, resize, resampler=resampler)) == GREEN).all()
        assert tuple(decoder.image(encoded, ResizeSpec(224, "pad", resampler=resampler))[111, 5]) == GREEN


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("resize", ["squash", "crop"])
def test_pixels_equal_the_plain_pillow_resize(decoder, encode_image, interpolation, resize):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (77, 131, 3), dtype=np.uint8))
    pixels = decoder.image(encode_image(image, "PNG"), ResizeSpec(32, resize, interpolation))
    method = Image.Resampling[interpolation.upper()]
    if resize == "squash":
        expected = image.resize((32, 32), method)
    else:
        expected = image.resize((54, 32), method).crop((11, 0, 43, 32))
    assert np.array_equal(pixels, np.asarray(expected))


def test_reduced_decode_is_near_and_never_below_twice_the_target(decoder, encode_image):
    y, x = np.mgrid[0:600, 0:800]
    waves = np.stack([np.sin(x / 40), np.sin(y / 50), np.sin((x + y) / 60)], -1) * 100 + 128
    encoded = encode_image(Image.fromarray(waves.astype(np.uint8)), "JPEG", quality=95)
    full, reduced = (decoder.image(encoded, ResizeSpec(64, reduced_decode=r)).astype(int) for r in (False, True))
    assert 0 < np.abs(full - reduced).max() <= 6
    # 1/2 of 800 x 600 would be below twice 224: nothing is reduced
    full, reduced = (decoder.image(encoded, ResizeSpec(224, reduced_decode=r)) for r in (False, True))
    assert np.abs(full.astype(int) - reduced).max() <= 1


@pytest.mark.parametrize("kind", LOSSLESS + LOSSY)
def test_truncated_files_are_refused(decoder, encode_image, kind):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    whole = encode_image(image, kind)
    for fit in (ResizeSpec(16), ResizeSpec(16, reduced_decode=True)):
        for keep in (0.9, 0.5, 0.1):
            with pytest.raises(DecodeError) as caught:
                decoder.image(whole[: int(len(whole) * keep)], fit)
            assert not caught.value.transient
            assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "rubbish", [b"", b"\x00", b"not an image", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe-3.0 EPSF"]
)
def test_what_is_no_image_is_refused(decoder, rubbish):
    with pytest.raises(DecodeError) as caught:
        decoder.image(rubbish, ResizeSpec(8))
    assert caught.value.error_type == ("EmptyFile" if not rubbish else "UnidentifiedImageError")
    assert "BytesIO" not in str(caught.value)


@pytest.mark.parametrize("kind", ["PPM", "ICO", "ICNS", "TGA", "PCX", "PDF", "EPS", "JPEG2000"])
def test_formats_off_the_list_are_refused(decoder, encode_image, kind):
    with pytest.raises(DecodeError, match="UnidentifiedImageError"):
        decoder.image(encode_image(quarters(), kind), ResizeSpec(8))


def test_noise_in_a_good_file_never_harms_the_next(decoder, encode_image, png):
    generator = np.random.default_rng(5)
    files = [encode_image(quarters(), kind) for kind in LOSSLESS + LOSSY]
    outcomes = set()
    for number in range(120):
        broken = bytearray(files[number % len(files)])
        for _ in range(6):
            broken[generator.integers(4, len(broken))] = generator.integers(0, 256)
        try:
            assert decoder.image(bytes(broken), ResizeSpec(16)).shape == (16, 16, 3)
            outcomes.add("decoded")
        except DecodeError:
            outcomes.add("refused")
    assert outcomes == {"decoded", "refused"}
    assert (decoder.image(png, ResizeSpec(4)) == (250, 120, 10)).all()
