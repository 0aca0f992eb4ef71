"""Captions and keywords in the metadata of files that other programs made, place by place, and of XMP sidecars."""

import json
from pathlib import Path

import pytest
from PIL import Image

from embedder.media.caption_text import (
    MAX_CAPTION_CHARACTERS,
    MAX_KEYWORD_CHARACTERS,
    clean_caption,
    clean_keywords,
)
from embedder.media.decoder_process import MAX_MESSAGE_BYTES
from embedder.media.media_errors import DecodeError
from embedder.media.picture_texts import decode_legacy, read_user_comment
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.sources.byte_ranges import open_ranges
from embedder.sources.item_ranges import BytesRanges

FILES = Path(__file__).parent / "caption_files"
NONE = ({}, [])
EVERYWHERE = ({"xmp": "of XMP", "iptc": "of IPTC", "exif": "of Exif"}, ["one", "three", "two"])
WITHOUT_IPTC = ({"xmp": "of XMP", "exif": "of Exif"}, ["one", "two"])
EXPECTED = {
    "description.jpg": ({"xmp": "Ein Mädchen am Fluss"}, []),
    "title.jpg": ({"xmp": "The harbour"}, []),
    "headline.jpg": ({"xmp": "Floods in Porto"}, []),
    "alt_text.jpg": ({"xmp": "a dog that sleeps"}, []),
    "languages.jpg": ({"xmp": "a bridge"}, []),
    "subject.jpg": ({}, ["sea", "two boats", "été"]),
    "entities.jpg": ({"xmp": "Salt & pepper – a table"}, []),
    "lines.jpg": ({"xmp": "first line\nsecond line"}, []),
    "caption.jpg": ({"iptc": "Žižkov in snow"}, []),
    "caption_1252.jpg": ({"iptc": "Jürgen’s café"}, []),
    "caption_first.jpg": ({"iptc": "ascii alone"}, []),
    "news.jpg": ({"iptc": "The storm"}, []),
    "object_name.jpg": ({"iptc": "Regatta 2019"}, []),
    "keywords.jpg": ({}, ["sailing", "Cowes Week"]),
    "long.jpg": ({"iptc": "x" + "ä" * 31 + "."}, []),  # as exiftool cuts it
    "image_description.jpg": ({"exif": "a red kite"}, []),
    "image_description_utf8.jpg": ({"exif": "ein Kranich über Rügen"}, []),
    "image_description_latin.jpg": ({"exif": "ein Kranich über Rügen"}, []),
    "comment.jpg": ({"exif": "the first day of school"}, []),
    "comment_utf16.jpg": ({"exif": "Первый день"}, []),
    "comment_utf16_le.jpg": ({"exif": "Überfahrt nach Föhr"}, []),
    "comment_utf16_be.jpg": ({"exif": "Überfahrt nach Föhr"}, []),
    "xp_title.jpg": ({"exif": "Großmutter"}, []),
    "xp_comment.jpg": ({"exif": "in the garden"}, []),
    "xp_subject.jpg": ({"exif": "the market"}, []),
    "xp_keywords.jpg": ({}, ["market", "fish", "魚"]),
    "olympus.jpg": ({"exif": "at the lake"}, []),
    "sony.jpg": NONE,
    "phone.jpg": NONE,
    "drone.jpg": NONE,
    "plain.jpg": NONE,
    "comment_only.jpg": NONE,
    "ffmpeg.jpg": NONE,  # it copies none of it
    "all.jpg": EVERYWHERE,
    "all.tif": EVERYWHERE,
    "all.png": WITHOUT_IPTC,
    "all.webp": WITHOUT_IPTC,
    "all.heic": WITHOUT_IPTC,
    "all.avif": WITHOUT_IPTC,
    "all.jxl": WITHOUT_IPTC,
    "all.gif": NONE,  # its XMP is not read
    "magick.png": WITHOUT_IPTC,  # Exif behind the pixels, XMP as hexadecimal text
    "magick.webp": ({"exif": "of Exif"}, ["two", "one"]),
    "libheif.heic": WITHOUT_IPTC,
    "libheif.avif": WITHOUT_IPTC,
    "libjxl.jxl": EVERYWHERE,  # in the JPEG that it keeps
    "sidecar.xmp": ({"xmp": "beside the picture"}, ["tree", "house"]),
    "shorthand.xmp": ({"xmp": "in an attribute"}, []),
}
RULE = ResizeSpec(16)


@pytest.fixture(scope="module")
def decoder():
    with SandboxedDecoder(medium_columns=("keywords", "metadata_note")) as decoder:
        yield decoder


def texts(decoder, content, languages=()):
    found = decoder.header(BytesRanges(content), languages)
    return found["captions"], found["keywords"]


def test_every_file_is_expected():
    assert {path.name for path in FILES.iterdir()} == EXPECTED.keys() | {"make.sh"}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_place_of_files_by_other_programs_is_read(decoder, name):
    found = decoder.header(open_ranges(str(FILES / name)), ())
    captions, keywords = EXPECTED[name]
    assert found == {"captions": captions, "keywords": keywords}


@pytest.mark.parametrize("name", [name for name in EXPECTED if not name.endswith(".xmp")])
def test_decoding_fills_the_column_of_keywords(decoder, name):
    (image,) = decoder.images([((FILES / name).read_bytes(), RULE)])
    assert image.medium == ({"keywords": EXPECTED[name][1]} if EXPECTED[name][1] else {})


@pytest.mark.parametrize(
    ("languages", "caption"),
    [
        (("de",), "eine Brücke"),
        (("DE", "fr"), "eine Brücke"),
        (("en",), "a British bridge"),
        (("es", "fr"), "un pont"),
        (("es",), "a bridge"),
        (("e",), "a bridge"),
    ],
)
def test_languages_choose_among_alternatives(decoder, languages, caption):
    assert texts(decoder, (FILES / "languages.jpg").read_bytes(), languages)[0] == {"xmp": caption}


@pytest.mark.parametrize(
    "text",
    [
        *("OLYMPUS DIGITAL CAMERA", "Minolta DSC", "KODAK Digital Still Camera", "<Digimax i5, Samsung #1>"),
        *("Exif_JPEG_PICTURE", "edf_soft", "DCIM\\100MEDIA\\a.jpg", "IMG_20190605_112233", "a b.JPG.jpg"[4:]),
        *("Created with GIMP", "LEAD Technologies Inc. V1.01", "Screenshot", "untitled", " \0\0 ", "&nbsp;"),
    ],
)
def test_what_cameras_and_programs_write_is_no_caption(text):
    assert not clean_caption(text)


@pytest.mark.parametrize(
    "text",
    [
        *("Olympus digital camera on a table", "a screenshot of a shop", "Kodak moments", "Sony building, Ginza"),
        *("IMG_1234 shows my cat", "default risk; a chart", "Photo 12 of the series, with Ann", "none of them came"),
    ],
)
def test_what_people_write_is_a_caption(text):
    assert clean_caption(text) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"ASCII\0\0\0plain", "plain"),
        (b"\0" * 8 + "grün".encode(), "grün"),
        (b"UNICODE\0" + "grün".encode("utf-16"), "\ufeffgrün"),
        (b"UNICODE\0" + "a".encode("utf-16-be") + b"x", "a"),
        (b"JIS\0\0\0\0\0" + "魚".encode("iso2022_jp"), "魚"),
        (b"no code at all", "no code at all"),
        (b"UNICODE\0", ""),
        (b"", ""),
        (None, ""),
        (17, ""),
    ],
)
def test_user_comments_are_read_by_their_character_codes(value, text):
    assert read_user_comment(value, "le") == text


def test_a_letter_that_a_limit_has_cut_is_left_out():
    cut = "Zürich ü".encode()[:-1]
    assert decode_legacy(cut, may_be_cut=True) == "Zürich "
    assert decode_legacy(cut) == "ZÃ¼rich Ã"


@pytest.mark.parametrize("description", ["&#55296;", "&#x110000;", "&#1114112;", "&#0;", "\ud800", "x" * 10**6])
def test_captions_are_valid_text_of_a_bounded_length(description):
    cleaned = clean_caption(f"a{description}b")
    assert cleaned.encode()
    assert len(cleaned) <= MAX_CAPTION_CHARACTERS


def xmp_with(description, keywords):
    items = "".join(f"<rdf:li>{each}</rdf:li>" for each in keywords)
    return (
        '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        '<rdf:Description xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:description><rdf:Alt>'
        f'<rdf:li xml:lang="x-default">{description}</rdf:li></rdf:Alt></dc:description>'
        f"<dc:subject><rdf:Bag>{items}</rdf:Bag></dc:subject></rdf:Description></rdf:RDF></x:xmpmeta>"
    ).encode()


def test_the_longest_texts_of_eight_pictures_fit_a_message(decoder, tmp_path):
    xmp = xmp_with("\U0001f600" * 100_000, [f"{number:04}" + "\U0001f600" * 200 for number in range(1500)])
    Image.new("RGB", (16, 16)).save(tmp_path / "a.webp", xmp=xmp)
    content = (tmp_path / "a.webp").read_bytes()
    captions, keywords = texts(decoder, content)
    assert captions == {"xmp": "\U0001f600" * MAX_CAPTION_CHARACTERS}
    assert MAX_KEYWORD_CHARACTERS - 250 < sum(map(len, keywords)) <= MAX_KEYWORD_CHARACTERS
    assert 3 * len(json.dumps(captions)) < MAX_MESSAGE_BYTES
    for image in decoder.images([(content, RULE)] * 8):
        assert image.medium == {"keywords": keywords}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no XML",
        b"\xff\xfe<",
        b"<a>" * 600_000,
        b'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><x>&e;</x>',
        b"<x>" + b" " * (3 << 20) + b"</x>",
    ],
)
def test_a_sidecar_that_is_no_xmp_is_an_error_or_empty(decoder, content):
    pid = decoder.child_pid
    try:
        found = texts(decoder, content)
    except DecodeError as error:
        assert not error.transient
    else:
        assert found == NONE
    assert pid in (decoder.child_pid, None), "the sandbox died of it"


def test_a_png_that_was_cut_off_keeps_what_is_before(decoder):
    content = (FILES / "all.png").read_bytes()
    assert texts(decoder, content[: content.index(b"IDAT") + 20]) == WITHOUT_IPTC


def test_keywords_are_told_apart_by_what_they_say():
    assert clean_keywords(["  a  b ", "A B", "", "\0", "c;d", "é"]) == ["a b", "c;d", "é"]
