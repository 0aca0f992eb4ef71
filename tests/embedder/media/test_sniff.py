"""Kinds are recognised by content, whatever the name."""

import io

import pytest
from PIL import Image

from embedder.media.sniff import extra_kind, may_be_animated, other_kind, sniff, unreadable_kind


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "MPO"])
def test_images_are_known_by_their_first_bytes(kind):
    file = io.BytesIO()
    Image.new("RGB", (20, 10), "red").save(file, kind)
    assert sniff(file.getvalue()[:4096]) == "image"


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        *(("mp4", "mpeg4"), ("mov", "mpeg4"), ("mkv", "mpeg4"), ("webm", "libvpx-vp9"), ("avi", "mpeg4")),
        *(("mpegts", "libx264"), ("mpeg", "mpeg2video"), ("flv", "flv"), ("asf", "wmv2")),  # of camcorders and tapes
    ],
)
def test_videos_are_known_by_their_first_bytes(make_video, kind, codec):
    assert sniff(make_video([(9, 9, 9)] * 30, kind=kind, codec=codec, rate=25).read_bytes()[:4096]) == "video"


@pytest.mark.parametrize("stamp", [b"", b"\0\1\2\3"])
def test_a_transport_stream_shows_its_mark_five_times(stamp):
    packet = stamp + b"\x47" + b"\0" * 187
    assert sniff(packet * 5) == "video"
    assert sniff(packet * 4) is None
    assert sniff(packet * 4 + b"\0" * 400) is None


@pytest.mark.parametrize(
    ("junk", "kind"), [(b"\n", "image"), (b"\r\n", "image"), (b"x" * 16, "image"), (b"x" * 17, None)]
)
def test_a_jpeg_is_known_behind_a_few_bytes_of_junk(junk, kind):
    assert sniff(junk + b"\xff\xd8\xff\xe0\0\x10JFIF\0") == kind


@pytest.mark.parametrize("box", [b"moov", b"mdat", b"wide", b"free", b"skip"])
def test_old_quicktime_without_ftyp_is_a_video(box):
    assert sniff(b"\x00\x00\x00\x08" + box + b"\x00\x00\x01\x00mdat") == "video"
    assert sniff(b"\x00\x00\x00\x01" + box + b"\x00" * 7 + b"\x80") == "video"


@pytest.mark.parametrize(
    "text",
    [
        "Get free stuff",  # "free" where an old QuickTime file has its first box
        "BMW, parked\n",
        "RIFF raff AVI ",
        "GIF89a is a format",
        "a\tcaption\r\nin two lines\f",
        "ein Käfer \u00a0 \u4e2d\u6587 \U0001f600\u200d",
        "\ufeffwith a byte order mark",
    ],
)
def test_captions_are_text_even_if_they_begin_like_media(text):
    assert sniff(text.encode()) == "text"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_captions_of_other_encodings_are_text_by_their_byte_order_mark(encoding):
    head = "ein Käfer \u4e2d \U0001f600\n".encode(encoding) * 200
    assert sniff(head[:4095]) == "text"
    assert other_kind(head[:4095]) == "text"


def test_text_cut_within_a_character_is_still_text():
    head = ("x" * 10 + "日本").encode()
    assert [sniff(head[:stop]) for stop in range(11, len(head))] == ["text"] * (len(head) - 11)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xef\xbb\xbf",  # a byte order mark and nothing else
        b"\x00" * 64,
        b"caption with a NUL\x00",
        b"bell \x07",
        "next line \x85".encode(),
        b"latin-1 caf\xe9 ole",
        "UTF-16 without a mark".encode("utf-16-le"),
        b"\xff\xfe",  # its mark and nothing else
        b"\xff\xfe" + bytes(range(1, 256)),
        b"%PDF-1.7\n%\xe2\xe3\xcf\xd3",
        b"PK\x03\x04\x14\x00",
        b"RIFF\x24\x00\x00\x00WAVEfmt ",
        b"BM\x00\x00\x00\x00\x00\x00\x00\x00\x36\x00\x00\x00\x99\x00\x00\x00",
        b"\x1a\x45\xdf\xa3\x9f\x42\x82\x84xyzw",
        b"\x00\x00\x00\x02free",
        b"\x00\x00\x00\x08",
    ],
)
def test_what_is_nothing_known_is_none(head):
    assert sniff(head) is None


def test_avif_is_known_by_a_compatible_brand():
    assert sniff(b"\x00\x00\x00\x1cftypmif1\x00\x00\x00\x00mif1avifmiaf") == "image"
    assert extra_kind(b"\x00\x00\x00\x14ftypmif1\x00\x00\x00\x00heic avif") == "HEIC"  # beyond the end of the box


def test_every_prefix_of_a_signature_is_answered():
    for whole in (
        b"\x89PNG\r\n\x1a\n\x00",
        b"\x00\x00\x00\x20ftypisom\x00\x00\x02\x00isomiso2",
        b"\x1a\x45\xdf\xa3webm",
    ):
        for stop in range(len(whole) + 1):
            sniff(whole[:stop])


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JP2"),
        (b"8BPS\0\x01", "PSD"),
        (b"\xff\x4f\xff\x51\0", "JP2"),
        (b'<?xml version="1.0"?>\n<!-- made by hand -->\n<svg width="1">', "SVG"),
        (b"\xef\xbb\xbf  <SVG>", "SVG"),
        (b".RMF\0\0", "RM"),
        (b"<?xml version='1.0'?><rss></rss>", None),
        (b"G" + b"\0" * 999, None),
        (b"%PDF-1.7", None),
        (b"PK\x03\x04", None),
        (b"", None),
    ],
)
def test_kinds_that_cannot_be_read_are_named(head, kind):
    assert unreadable_kind(head) == kind
    assert sniff(head) in (None, "text")


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0heic", "HEIC"),
        (b"\0\0\0\x18ftypheix\0\0\0\0mif1heix", "HEIC"),
        (b"\0\0\0\x18ftyphevc\0\0\0\0msf1hevc", "HEIC"),
        (b"\0\0\0\x18ftypcrx \0\0\0\x01crx isom", "CR3"),
        (b"\xff\x0a\0\0", "JXL"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JXL"),
        (b"FUJIFILMCCD-RAW 0201\0", "RAF"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf", None),
        (b"\0\0\0\x14ftypqt  \0\0\0\0qt  ", None),
        (b"\0\0\0\x1cftypisom\0\0\0\0isomheic", None),
        (b"\x89PNG\r\n\x1a\n", None),
        (b"", None),
    ],
)
def test_images_of_the_extra_formats_are_told_by_content(head, kind):
    assert extra_kind(head) == kind
    assert kind is None or (sniff(head), unreadable_kind(head)) == ("image", None)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"", "an empty file"),
        (b"\0" * 99, "nothing but zeros"),
        (b"%PDF-1.7\n%\xe2\xe3", "a PDF"),
        (b"%PDF-1.4\nplain", "a PDF"),
        (b"PK\x03\x04\x14\0", "a ZIP archive, or a document packed as one"),
        (b"RIFF\x24\0\0\0WAVEfmt \x10", "sound (WAV)"),
        (b"ID3\x04\0", "sound (MP3)"),
        (b"\x7fELF\x02\x01\x01\0", "a program"),
        (b"MZ is a text", "text"),
        (b"<!DOCTYPE HTML><title>404</title>", "a web page"),
        (b"\xef\xbb\xbf <html>", "a web page"),
        (b"\x07\x99\xfe", "of a kind that isn't known here"),
    ],
)
def test_what_is_no_media_is_said_in_words_and_never_as_bytes(head, words):
    assert other_kind(head) == words


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "AVIF"])
def test_animated_images_are_known_by_their_first_bytes(kind):
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "green", "blue")]
    moving, still = io.BytesIO(), io.BytesIO()
    frames[0].save(moving, kind, save_all=True, append_images=frames[1:], duration=100)
    frames[0].save(still, kind)
    assert may_be_animated(moving.getvalue()[:4096])
    assert may_be_animated(still.getvalue()[:4096]) == (kind == "GIF")  # of which only the end says it


def test_no_prefix_of_an_animation_is_a_crash():
    for head in (
        b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\x02",
        b"\x89PNG\r\n\x1a\n\0\0\0\x08acTL",
        b"\0\0\0\x18ftypavis\0\0\0\0avis",
    ):
        assert [may_be_animated(head[:stop]) for stop in (0, 4, 11)] == [False] * 3
        assert may_be_animated(head)
