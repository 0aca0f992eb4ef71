"""HEIC, JPEG XL and camera raws, made by their own encoders: the colours that come out, upright and once."""

import io
from importlib import import_module
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
from PIL import Image
from quarters import BLUE, GREEN, RED, SHOWN, WHITE, YELLOW, close, corners, quarters
from sandbox_checks import refused

from embedder.installation import MISSING_EXTRA
from embedder.media.extra_formats import camera_raw
from embedder.media.extra_formats.jpeg_xl import declared_size
from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import UNSUPPORTED_CAMERA
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from hostile.files import dng, heic_size, jxl_size

STORED = [RED, GREEN, BLUE, YELLOW]
FORMATS = ["HEIF", "JXL"]
MAX_PIXELS = 100_000_000


@pytest.fixture(autouse=True, scope="module")
def _encoders():
    pillow_heif.register_heif_opener()
    import_module("pillow_jxl")


def exif_of(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_gives_its_colours_in_their_places(decoder, encode_image, kind):
    pixels = decoder.image(encode_image(quarters(), kind), ResizeSpec(32))
    assert (pixels.shape, pixels.dtype) == ((32, 32, 3), np.uint8)
    assert close(corners(pixels), STORED, 6)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_heic_is_turned_once_though_container_and_exif_both_say_so(decoder, encode_image, orientation):
    encoded = encode_image(quarters(128, 64), "HEIF", exif=exif_of(orientation))
    assert (b"irot" in encoded or b"imir" in encoded) == (orientation != 1) and b"Exif" in encoded
    pixels = decoder.image(encoded, ResizeSpec(16))
    assert close(corners(pixels), [STORED[i] for i in SHOWN[orientation]], 25)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_exif_orientation_that_the_container_does_not_have_is_not_applied(decoder, encode_image, kind):
    more = {"use_container": True} if kind == "JXL" else {}
    encoded = encode_image(quarters(128, 64), kind, exif=exif_of(1), **more)
    (as_stored, turned_exif) = (exif_of(orientation).removeprefix(b"Exif\0\0") for orientation in (1, 6))
    assert encoded.count(as_stored) == 1
    turned = encoded.replace(as_stored, turned_exif)
    assert close(corners(decoder.image(turned, ResizeSpec(16))), STORED, 25)


def test_proportions_of_a_turned_heic_are_those_that_are_seen(decoder, encode_image):
    encoded = encode_image(Image.new("RGB", (128, 64), RED), "HEIF", exif=exif_of(6))
    pixels = decoder.image(encoded, ResizeSpec(32, "pad"))
    assert close(pixels[0, 16], RED, 12) and close(pixels[16, 4], WHITE, 0)


def test_ten_bits_become_eight(decoder):
    wide = np.asarray(quarters(), np.uint16) * 257
    file = io.BytesIO()
    pillow_heif.from_bytes("RGB;16", (64, 48), wide.tobytes()).save(file)
    assert file.getvalue()[8:12] == b"heix"
    assert close(corners(decoder.image(file.getvalue(), ResizeSpec(32))), STORED, 6)
    grey, file = np.full((48, 64), 128 * 257, np.uint16), io.BytesIO()
    pillow_heif.from_bytes("L;16", (64, 48), grey.tobytes()).save(file)
    assert close(decoder.image(file.getvalue(), ResizeSpec(8)), 128, 2)


@pytest.mark.parametrize("kind", FORMATS)
def test_alpha_is_laid_on_white(decoder, encode_image, kind):
    image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 32, 64))
    options = {"quality": -1} if kind == "HEIF" else {"lossless": True}
    pixels = decoder.image(encode_image(image, kind, **options), ResizeSpec(8))
    assert close(pixels[4, 1], 0, 4) and close(pixels[4, 6], 255, 4)


def test_tiles_of_a_phone_are_one_image(decoder, encode_image):
    encoded = encode_image(quarters(160, 120), "HEIF", tile_size=64)
    assert b"grid" in encoded
    assert close(corners(decoder.image(encoded, ResizeSpec(32))), STORED, 8)


def test_of_several_images_the_primary_one_counts_and_no_thumbnail(decoder, encode_image):
    blank = Image.new("RGB", (64, 48), WHITE)
    encoded = encode_image(
        blank, "HEIF", save_all=True, append_images=[quarters(), blank], primary_index=1, thumbnails=[32]
    )
    assert close(corners(decoder.image(encoded, ResizeSpec(32))), STORED, 8)


def test_a_clip_branded_as_an_image_is_refused_in_a_line(decoder, make_video):
    clip = make_video([RED] * 3).read_bytes().replace(b"ftypisom", b"ftyphevc", 1)
    error = refused(decoder, clip)
    assert (error.error_type, error.message[:5]) == ("BrokenImage", "HEIC:")


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
def test_modes_of_jpeg_xl(decoder, encode_image, mode):
    image = Image.new("L", (16, 16), 100).convert(mode)
    assert (decoder.image(encode_image(image, "JXL", lossless=True), ResizeSpec(4)) == 100).all()


def test_deep_greys_of_jpeg_xl_span_all_of_their_range(decoder, encode_image):
    wide = Image.fromarray(np.full((16, 16), 128 * 257, np.uint16))
    raw = ResizeSpec(4, colour="raw")  # the encoder marks deep greys as linear
    assert (decoder.image(encode_image(wide, "JXL", lossless=True), raw) == 128).all()
    assert (decoder.image(encode_image(wide, "JXL", lossless=True), ResizeSpec(4)) == 188).all()
    real = Image.fromarray(np.full((16, 16), 0.5, np.float32))
    assert close(decoder.image(encode_image(real, "JXL", lossless=True), raw), 128, 1)


def test_a_jpeg_kept_as_jpeg_xl_is_that_jpeg_orientation_included(decoder, encode_image, tmp_path):
    jpeg = tmp_path / "a.jpg"
    jpeg.write_bytes(encode_image(quarters(256, 128), "JPEG", exif=exif_of(6)))
    with Image.open(jpeg) as image:
        encoded = encode_image(image, "JXL", lossless_jpeg=True)
    for resize in (ResizeSpec(32), ResizeSpec(16, reduced_decode=True)):
        assert np.array_equal(decoder.image(encoded, resize), decoder.image(jpeg, resize))


@pytest.mark.parametrize("size", [(8, 8), (256, 256), (64, 48), (33, 17), (1000, 3), (4032, 3024), (1920, 1080)])
@pytest.mark.parametrize("container", [False, True])
def test_the_size_of_a_jpeg_xl_is_read_from_its_header(encode_image, size, container):
    encoded = encode_image(Image.new("L", size), "JXL", lossless=True, effort=1, use_container=container)
    assert declared_size(encoded) == size


RAW = quarters(128, 96)


def jpeg(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("orientation", "preview"),
    [
        *((orientation, each) for orientation in (1, 3, 6, 8) for each in (None, jpeg(RAW))),
        (6, jpeg(RAW, exif=exif_of(6))),  # which has its own orientation
        # Too small, cut, turned: they show something else.
        *((1, jpeg(Image.new("RGB", size, (10, 20, 30)))) for size in ((31, 24), (96, 96), (96, 128))),
        (1, b"\xff\xd8\xff" + b"\xa5" * 999),
        (1, b"no jpeg at all"),
    ],
    ids=range(14),
)
def test_a_raw_is_turned_once_whatever_its_preview(decoder, orientation, preview):
    pixels = decoder.image(dng(np.asarray(RAW), orientation=orientation, preview=preview), ResizeSpec(32))
    assert close(corners(pixels), [STORED[i] for i in SHOWN[orientation]], 20)


def test_the_preview_is_what_the_photographer_saw(decoder, encode_image):
    seen = encode_image(Image.new("RGB", (128, 96), (10, 20, 30)), "JPEG")
    assert close(decoder.image(dng(np.asarray(quarters(128, 96)), preview=seen), ResizeSpec(32)), (10, 20, 30), 4)


@pytest.mark.parametrize(("side", "size"), [(48, (64, 48)), (49, (128, 96))])
def test_a_raw_is_developed_at_half_size_where_that_is_enough(side, size):
    raw, resize = dng(np.asarray(quarters(128, 96))), ResizeSpec(side, "crop")
    assert camera_raw.load("DNG", raw, resize, MAX_PIXELS).image.size == size


def test_a_monochrome_row_of_pixels_is_no_crash(decoder):
    error = refused(decoder, dng(np.zeros((2, 2, 3), np.uint8)))
    assert error.message.startswith("DNG: ")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda encode: heic_size(encode(quarters(), "HEIF"), 60_000, 60_000), "60000 x 60000"),
        (lambda encode: jxl_size(60_000, 50_000), "60000 x 50000"),
        (lambda encode: dng(np.asarray(quarters()), width=30_000, height=30_000), "30000 x 30000"),
    ],
    ids=["HEIC", "JXL", "DNG"],
)
def test_what_is_too_large_is_refused_before_it_is_decoded_and_the_limit_is_named(decoder, encode_image, make, kind):
    error = refused(decoder, make(encode_image))
    assert error.error_type == "TooManyPixels"
    assert kind in error.message and error.message.endswith("(`max_pixels`)")


@pytest.mark.medium
@pytest.mark.parametrize("kind", FORMATS)
def test_an_image_of_up_to_twice_the_pixels_is_halved(encode_image, kind):
    encoded = encode_image(quarters(160, 120), kind)
    with SandboxedDecoder(DecodeLimits(max_pixels=160 * 120 - 1)) as small:
        assert close(corners(small.image(encoded, ResizeSpec(32))), STORED, 12)
    with SandboxedDecoder(DecodeLimits(max_pixels=160 * 120 // 2 - 1)) as smaller:
        assert refused(smaller, encoded).error_type == "TooManyPixels"


@pytest.mark.medium
def test_memory_that_is_not_there_is_told_and_the_next_image_is_fine(encode_image, png):
    encoded = encode_image(Image.new("RGB", (4000, 3000)), "JXL", effort=1)
    with SandboxedDecoder(DecodeLimits(memory_bytes=100 << 20)) as decoder:
        error = refused(decoder, encoded)
        assert error.error_type == "DecoderCrashed" or "`memory_bytes`" in error.message
        assert decoder.image(png, ResizeSpec(8)).shape == (8, 8, 3)


@pytest.mark.parametrize("kind", ["HEIF", "JXL", "DNG"])
def test_every_cut_of_a_file_is_an_image_or_a_reason(decoder, encode_image, kind):
    whole = dng(np.asarray(quarters(32, 32))) if kind == "DNG" else encode_image(quarters(), kind)
    for stop in range(0, len(whole) - 1, max(1, len(whole) // 40)):
        error = refused(decoder, whole[:stop])
        assert error.message and "b'" not in error.message and "\\x" not in error.message


def test_a_camera_that_libraw_does_not_know_is_told_apart_from_a_broken_file(decoder):
    error = refused(decoder, b"\0\0\0\x18ftypcrx \0\0\0\1crx isom" + b"\xa5" * 5000)
    assert (error.error_type, error.message[:4]) == (UNSUPPORTED_CAMERA, "CR3:")


@pytest.mark.parametrize(
    ("make", "package", "kind"),
    [
        (lambda encode: encode(quarters(), "HEIF"), "pillow_heif", "HEIC"),
        (lambda encode: encode(quarters(), "JXL"), "pillow_jxl", "JXL"),
        (lambda encode: dng(np.asarray(quarters())), "rawpy", "DNG"),
    ],
)
def test_without_the_extra_the_line_says_what_to_install(encode_image, png, hide_packages, make, package, kind):
    encoded = make(encode_image)
    hide_packages(package)
    with SandboxedDecoder() as decoder:
        error = refused(decoder, encoded)
        assert error.error_type == MISSING_EXTRA
        assert error.message.startswith(f"{kind}: needs ")
        assert error.message.endswith("pip install 'embedder[formats]'")
        assert decoder.image(png, ResizeSpec(8)).shape == (8, 8, 3)


def test_packages_are_loaded_with_the_first_file_that_needs_them(encode_image, png):
    heic = encode_image(quarters(), "HEIF")
    with SandboxedDecoder() as decoder:
        decoder.image(png, ResizeSpec(8))
        maps = Path(f"/proc/{decoder.child_pid}/maps")
        assert not any(name in maps.read_text() for name in ("heif", "pillow_jxl", "rawpy"))
        decoder.image(heic, ResizeSpec(8))
        assert "libheif" in maps.read_text() and "rawpy" not in maps.read_text()
