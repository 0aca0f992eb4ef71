"""Values of the medium's columns of files that other programs made, and of metadata that is broken on purpose."""

import io
import random
import struct
import time
import zlib
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFilter
from samples import make_image

from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.medium_columns import BY_NAME, OF_PIXELS
from embedder.sources.byte_ranges import open_ranges
from embedder.sources.item_ranges import BytesRanges

FILES = Path(__file__).parent / "foreign_files"
RULE = ResizeSpec(32)
TAGS = {
    "taken_at": "2023-07-04T12:34:56.780000",
    "taken_offset_min": 120,
    "camera": "Canon EOS R5",
    "lens": "RF 24-70mm",
    "focal_length_mm": 35.0,
    "exposure_s": 0.004,
    "f_number": 2.8,
    "iso": 400,
    "latitude": 48.137154,
    "longitude": 11.576124,
    "altitude_m": 519.5,
    "creator": "Ann Lee",
    "credit": "Agency",
    "copyright": "© Ann",
    "software": "Test",
}
PLAIN = {"bits": 8, "has_alpha": False, "is_animated": False, "num_frames": 1, "orientation": 1}
TURNED = PLAIN | {"width": 32, "height": 48, "orientation": 6}
LEVEL = PLAIN | {"width": 48, "height": 32}
SQUARE = PLAIN | {"width": 16, "height": 16}
CLIP = {"bits": 8, "has_alpha": False, "num_frames": 10, "duration_s": 1.0, "fps": 10.0, "codec": "h264"}
EXPECTED = {
    "plain.jpg": LEVEL | {"format": "JPEG"},
    "tagged.jpg": TURNED | TAGS | {"format": "JPEG"},
    "tagged.png": TURNED | TAGS | {"format": "PNG"},
    "tagged.webp": TURNED | TAGS | {"format": "WEBP"},
    "tagged.tif": TURNED | TAGS | {"format": "TIFF"},
    "tagged.heic": LEVEL | TAGS | {"format": "HEIC"},  # the container's own rotation counts, and it has none
    "tagged.avif": LEVEL | TAGS | {"format": "AVIF"},
    "tagged.jxl": LEVEL | TAGS | {"format": "JXL"},
    "xmp.jpg": LEVEL
    | {
        "format": "JPEG",
        "taken_at": "2020-01-02T03:04:05",
        "taken_offset_min": -300,
        "camera": "NIKON Z 6",
        "lens": "50 mm",
        "exposure_s": 2.0,
        "f_number": 11.0,
        "latitude": -33.856784,
        "longitude": -151.215297,
        "creator": "One, Two",
        "copyright": "all kept",
        "software": "Some Editor",
    },
    "iptc.jpg": LEVEL
    | {
        "format": "JPEG",
        "taken_at": "2019-05-06T07:08:09",
        "taken_offset_min": 60,
        "creator": "Jürg",
        "credit": "Keystone",
        "copyright": "Keystone 2019",
    },
    "low.jpg": LEVEL | {"format": "JPEG", "latitude": 31.5, "longitude": 35.5, "altitude_m": -430.0},
    "frames.gif": SQUARE | {"format": "GIF", "num_frames": 3, "is_animated": True},
    "pages.tif": SQUARE | {"format": "TIFF", "num_frames": 3, "bits": 16},
    "deep.png": SQUARE | {"format": "PNG", "bits": 16},
    "clear.webp": SQUARE | {"format": "WEBP", "has_alpha": True},
    "clip.mp4": CLIP
    | {
        "width": 64,
        "height": 48,
        "orientation": 1,
        "format": "MP4",
        "has_audio": True,
        "created_at": "2023-07-04T10:34:56",
        "latitude": 48.1371,
        "longitude": 11.5761,
    },
    "turned.mov": CLIP | {"width": 48, "height": 64, "orientation": 8, "format": "MOV", "has_audio": False},
}
ONLY_DECODED = {"tagged.jxl": {"bits", "has_alpha"}, "frames.gif": {"num_frames", "is_animated"}}
"""Columns that headers don't give: libjxl decodes whatever it reads; frames of a GIF take the whole file."""


@pytest.fixture(scope="module")
def decoder():
    with SandboxedDecoder(medium_columns=BY_NAME) as decoder:
        yield decoder


def decoded(decoder, content):
    if content[4:8] == b"ftyp" and content[8:12] in (b"isom", b"qt  "):
        return next(decoder.video(content, RULE, segment_s=5.0, frames_per_segment=2)).medium
    (image,) = decoder.images([(content, RULE)])
    assert not isinstance(image, DecodeError), image
    return image.medium


def without_pixels(values):
    """Leave out what depends on pixels, on the version of a library, or on the program's own name."""
    names = {*OF_PIXELS, "colour_profile", *(("software",) if str(values.get("software")).startswith("Lav") else ())}
    return {name: value for name, value in values.items() if name not in names}


def test_every_file_is_expected():
    assert {path.name for path in FILES.iterdir()} == EXPECTED.keys() | {"make.sh"}


@pytest.mark.parametrize("name", EXPECTED)
def test_decoding_fills_the_columns_of_files_by_other_programs(decoder, name):
    assert without_pixels(decoded(decoder, (FILES / name).read_bytes())) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_headers_alone_give_the_same(decoder, name):
    ranges = open_ranges(str(FILES / name))
    missing = ONLY_DECODED.get(name, ())
    expected = {column: value for column, value in EXPECTED[name].items() if column not in missing}
    assert without_pixels(decoder.header(ranges)) == expected


def test_headers_take_a_small_part_of_a_large_picture(decoder, tmp_path):
    path = tmp_path / "large.jpg"
    pixels = np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), np.uint8)
    Image.fromarray(pixels).save(path, quality=90)
    ranges = open_ranges(str(path))
    read = []
    read_at, size = ranges.read_at, ranges.size

    class Counting:
        version = ""

        def __init__(self):
            self.size = size

        def read_at(self, offset, length):
            found = read_at(offset, length)
            read.append(len(found))
            return found

        def close(self):
            ranges.close()

    assert decoder.header(Counting())["width"] == 1500
    assert size > 1 << 20
    assert sum(read) <= 1 << 16


def test_an_image_of_a_png_for_viewers_without_animation_is_no_frame(decoder):
    for num_frames in (1, 2):
        images = [Image.new("RGB", (16, 16), colour) for colour in ("white", "red", "blue")[: num_frames + 1]]
        content = _png(images[0], save_all=True, append_images=images[1:], default_image=True)
        for values in (decoded(decoder, content), decoder.header(BytesRanges(content))):
            assert (values["num_frames"], values["is_animated"]) == (num_frames, num_frames > 1)


@pytest.mark.parametrize(
    ("part", "microseconds"), [(b"78", 780_000), ("٧٨".encode(), 0), ("²".encode(), 0), (b"7.8", 0)]
)
def test_a_fraction_of_a_second_that_is_no_number_costs_no_time(decoder, part, microseconds):
    exif = Image.Exif()
    times = {ExifTags.Base.DateTimeOriginal: "2023:07:04 12:34:56", ExifTags.Base.SubsecTimeOriginal: part}
    exif[ExifTags.IFD.Exif] = times
    taken_at = datetime.fromisoformat(decoded(decoder, _png(Image.new("RGB", (16, 16)), exif=exif))["taken_at"])
    assert taken_at == datetime(2023, 7, 4, 12, 34, 56, microseconds)


@pytest.mark.medium
def test_pixels_are_the_same_with_and_without_columns(decoder):
    with SandboxedDecoder() as without:
        for path in sorted(FILES.glob("*.[jptgwha]*")):
            if path.suffix in (".mp4", ".mov"):
                continue
            content = path.read_bytes()
            (expected,), (found,) = without.images([(content, RULE)]), decoder.images([(content, RULE)])
            assert np.array_equal(expected.pixels, found.pixels), path
            assert expected.medium is None


def test_columns_of_pixels_tell_blank_blurred_and_busy_pictures_apart(decoder):
    busy = make_image(3, 200, 160)
    noisy = Image.fromarray(np.random.default_rng(1).integers(0, 256, (160, 200, 3), np.uint8))
    found = {
        name: decoded(decoder, _png(image))
        for name, image in {
            "white": Image.new("RGB", (200, 160), "white"),
            "black": Image.new("RGB", (200, 160)),
            "noisy": noisy,
            "blurred": noisy.filter(ImageFilter.GaussianBlur(12)),
            "busy": busy,
            "larger": busy.resize((400, 320)),
        }.items()
    }
    assert found["white"]["brightness"] == 1.0
    assert found["black"]["brightness"] == 0.0
    assert found["white"]["one_colour_share"] == found["black"]["one_colour_share"] == 1.0
    assert found["noisy"]["one_colour_share"] < 0.2
    assert found["white"]["sharpness"] == 0.0
    assert found["noisy"]["sharpness"] > 20 * found["blurred"]["sharpness"]
    assert distance(found["busy"], found["larger"]) <= 6
    assert distance(found["busy"], found["noisy"]) >= 12


def distance(one, other):
    return (int(one["perceptual_hash"], 16) ^ int(other["perceptual_hash"], 16)).bit_count()


def _png(image, **options):
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def with_app1(block):
    """A JPEG with a block of metadata behind its first marker."""
    plain = (FILES / "plain.jpg").read_bytes()
    return plain[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + plain[2:]


def with_chunk(name, data):
    """A PNG with a chunk before its pixels."""
    whole = (FILES / "deep.png").read_bytes()
    chunk = struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    place = whole.index(b"IDAT") - 4
    return whole[:place] + chunk + whole[place:]


def ifd(*entries, following=0):
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return struct.pack("<H", len(entries)) + packed + struct.pack("<I", following)


XMP = b"http://ns.adobe.com/xap/1.0/\0"
TIFF = b"II*\0\x08\0\0\0"
LAUGHS = b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "ha">%s]><x>&z;</x>' % b"".join(
    b'<!ENTITY %c "%s">' % (letter, b"&%c;" % (letter - 1) * 10) for letter in range(ord("b"), ord("z") + 1)
)
HOSTILE = {
    "a million tags": lambda: with_app1(b"Exif\0\0" + TIFF + b"\xff\xff" + bytes(60_000)),
    "values of 4 GB": lambda: with_app1(b"Exif\0\0" + TIFF + ifd((271, 2, 0xFFFFFFF0, 8), (305, 2, 0x7FFFFFFF, 8))),
    "values upon each other": lambda: with_chunk(
        b"eXIf", TIFF + ifd(*[(tag, 7, 4_000_000, 8) for tag in range(1900)]) + bytes(4_100_000)
    ),
    "a circle of directories": lambda: with_app1(
        b"Exif\0\0" + TIFF + ifd((34665, 4, 1, 8), (34853, 4, 1, 8), following=8)
    ),
    "a billion laughs": lambda: with_app1(XMP + LAUGHS),
    "a file outside": lambda: with_app1(XMP + b'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>'),
    "a deep tree": lambda: with_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + b"<a>" * 600_000),
    "a broad tree": lambda: with_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<a>" + b"<b/>" * 450_000 + b"</a>"),
    "no numbers": lambda: with_app1(
        b"Exif\0\0"
        + TIFF
        + ifd((34665, 4, 1, 26))
        + ifd((33434, 5, 1, 60), (33437, 5, 1, 60), (34855, 4, 1, 2**32 - 1))
        + bytes(16)
    ),
    "a number that fills the memory": lambda: with_app1(
        XMP + b'<r:RDF xmlns:r="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><r:Description '
        b'xmlns:e="http://ns.adobe.com/exif/1.0/" e:ExposureTime="1e999999999" e:FNumber="1/0"/></r:RDF>'
    ),
}
NOTED = set(HOSTILE) - {"values of 4 GB", "a circle of directories", "no numbers", "a number that fills the memory"}


@pytest.mark.medium
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_costs_its_columns_and_never_the_picture(decoder, name):
    content = HOSTILE[name]()
    began = time.process_time()
    pid = decoder.child_pid
    values = decoded(decoder, content)
    assert time.process_time() - began < 1
    assert decoder.child_pid == pid, "the sandbox died of it"
    assert values["width"] in (16, 48)
    assert not {"exposure_s", "f_number", "camera", "latitude", "software"} & values.keys()
    assert ("metadata_note" in values) == (name in NOTED)
    assert decoder.header(BytesRanges(content), ()) == {"captions": {}, "keywords": []}
    assert time.process_time() - began < 1
    assert decoder.child_pid == pid, "the sandbox died of its captions"


def metadata_spans(content):
    """Places of the payloads of a JPEG's metadata segments."""
    place, spans = 2, []
    while content[place : place + 2] in (b"\xff\xe0", b"\xff\xe1", b"\xff\xed"):
        size = int.from_bytes(content[place + 2 : place + 4], "big")
        if content[place + 1] != 0xE0:
            spans.append(range(place + 4, place + 2 + size))
        place += 2 + size
    return spans


def mutated(rng, content):
    """Change some bytes of a JPEG's metadata: anywhere in it, or in the first hundred bytes, which say where all is."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 3, 10, 40))):
        span = rng.choice(metadata_spans(content))
        place = rng.choice(span if rng.random() < 0.5 else span[:100])
        changed[place] = rng.choice((0, 1, 255, 127, rng.randrange(256)))
    return bytes(changed)


def check_mutations(decoder, num):
    rng = random.Random(num)
    sources = [(FILES / name).read_bytes() for name in ("tagged.jpg", "xmp.jpg", "iptc.jpg", "low.jpg")]
    num_noted = 0
    pid, slowest_s = None, 0.0
    for number in range(num):
        content = mutated(rng, sources[number % len(sources)])
        began = time.monotonic()
        values = decoded(decoder, content)
        assert decoder.header(BytesRanges(content), ("en",)).keys() == {"captions", "keywords"}
        slowest_s = max(slowest_s, time.monotonic() - began)
        pid = pid or decoder.child_pid
        assert decoder.child_pid == pid, f"the sandbox died of mutation {number}"
        assert {values["width"], values["height"]} == {48, 32}
        num_noted += "metadata_note" in values
    assert slowest_s < 10  # the sandbox has a deadline of 30 s; a file takes a millisecond
    return num_noted


@pytest.mark.medium
def test_two_hundred_mutated_blocks_cost_no_picture(decoder):
    assert check_mutations(decoder, 200) > 10


@pytest.mark.slow
def test_two_thousand_mutated_blocks_cost_no_picture(decoder):
    assert check_mutations(decoder, 2000) > 100
