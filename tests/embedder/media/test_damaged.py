"""Images that viewers show are decoded, whatever is wrong with their files; of others it is said how much is there."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec

SIZE = (320, 240)
WHOLE = ResizeSpec(224)
JPEGS = {
    "baseline": {},
    "of one component each": {"subsampling": 0},
    "with restarts": {"restart_marker_rows": 1},
    "progressive": {"progressive": True},
}


def picture(mode="RGB"):
    noise = np.random.default_rng(4).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(SIZE, Image.Resampling.BICUBIC).convert(mode)


def encoded(kind, mode="RGB", **options):
    file = io.BytesIO()
    picture(mode).save(file, kind, **options)
    return file.getvalue()


def chunk(name, data, error=0):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data) ^ error)


def with_chunk(name, data, error=0):
    png = encoded("PNG")
    return png[:33] + chunk(name, data, error) + png[33:]


def decode(decoder, content, resize=WHOLE):
    (found,) = decoder.images([(content, resize)])
    if isinstance(found, DecodeError):
        raise found
    return found.pixels, found.note


def check_whole(decoder, content, whole, resize=WHOLE):
    pixels, note = decode(decoder, content, resize)
    assert note is None
    assert np.array_equal(pixels, decoder.image(whole, resize))


@pytest.mark.parametrize("resize", [WHOLE, ResizeSpec(32, reduced_decode=True)])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("kind", JPEGS)
def test_a_jpeg_without_its_end_is_the_whole_picture(decoder, kind, mode, resize):
    whole = encoded("JPEG", mode, quality=92, **JPEGS[kind])
    for content in (
        whole[:-2],
        whole[:-1],
        b"\n" + whole,
        b"\r\n" + whole[:-2],
        b"\xef\xbb\xbf" + whole,
        whole + b"\0" * 999,
    ):
        check_whole(decoder, content, whole, resize)


@pytest.mark.parametrize("kind", ["baseline", "of one component each", "with restarts"])
def test_a_jpeg_cut_off_in_its_last_rows_is_embedded_with_a_note(decoder, kind):
    whole = encoded("JPEG", quality=92, **JPEGS[kind])
    expected, rows = decoder.image(whole, WHOLE).astype(int), 224 * 90 // 100
    pixels, note = decode(decoder, whole[: len(whole) * 98 // 100])
    assert "of the picture is there" in note
    assert np.array_equal(pixels[:rows], expected[:rows])
    assert decode(decoder, whole)[1] is None, "the note is only of the last image"


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("keep", [0.1, 0.3, 0.5])
def test_half_a_jpeg_is_refused_with_what_is_there(decoder, kind, keep):
    whole = encoded("JPEG", quality=92, **JPEGS[kind])
    with pytest.raises(DecodeError, match="cut off") as caught:
        decoder.image(whole[: int(len(whole) * keep)], WHOLE)
    assert caught.value.error_type == "TruncatedImage"


def test_half_a_grey_jpeg_with_restarts_at_the_end_of_a_row_is_refused(decoder):
    """What decoders put in place of missing blocks is the grey that is there, and the cut is between two intervals."""
    file = io.BytesIO()
    Image.new("RGB", SIZE, (128, 128, 128)).save(file, "JPEG", restart_marker_rows=1)
    whole = file.getvalue()
    with pytest.raises(DecodeError, match="cut off"):
        decoder.image(whole[: whole.index(b"\xff\xd5")], WHOLE)


def test_a_progressive_jpeg_may_lack_what_refines_it(decoder):
    whole = encoded("JPEG", quality=92, progressive=True)
    expected = decoder.image(whole, WHOLE).astype(int)
    pixels, note = decode(decoder, whole[: len(whole) * 85 // 100])
    assert "refines" in note
    assert np.abs(pixels - expected).max() < 24


@pytest.mark.parametrize(
    "content",
    [
        with_chunk(b"tEXt", b"a\0b", error=1),
        with_chunk(b"pHYs", b"\0\0\1\0\0\0\1\0\1", error=1),
        with_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(20 << 20))),
        b"".join([encoded("PNG")[:33], *[chunk(b"iTXt", b"a\0\1\0\0\0" + zlib.compress(bytes(1 << 20)))] * 70])
        + encoded("PNG")[33:],
        encoded("PNG")[:-12],
        encoded("PNG") + b"rubbish",
    ],
    ids=["checksum of a text", "checksum of the density", "long text", "many texts", "no end", "more than the end"],
)
def test_what_stands_beside_the_pixels_of_a_png_does_not_cost_them(decoder, content):
    check_whole(decoder, content, encoded("PNG"))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "1", "I;16"])
@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_other_formats_cut_off_in_their_last_rows_are_embedded_with_a_note(decoder, kind, mode):
    if (kind, mode) == ("BMP", "I;16"):
        return
    image = picture("L").convert("I;16") if mode == "I;16" else picture(mode)
    file = io.BytesIO()
    image.save(file, kind, **({"compress_level": 0} if kind == "PNG" else {}))
    whole = file.getvalue()
    pixels, note = decode(decoder, whole[: len(whole) * 98 // 100])
    expected = decoder.image(whole, WHOLE)
    assert "of the picture is there" in note
    assert np.array_equal(pixels[20:200], expected[20:200]), "a BMP begins with its last row"
    with pytest.raises(DecodeError, match="TruncatedImage"):
        decoder.image(whole[: len(whole) * 8 // 10], WHOLE)


def test_a_webp_whose_last_byte_is_missing_is_embedded(decoder):
    whole = encoded("WEBP")
    pixels, _ = decode(decoder, whole[:-1])
    assert np.abs(pixels.astype(int) - decoder.image(whole, WHOLE)).mean() < 1
