"""Camera raws are known by their tags and first bytes; other TIFFs stay images."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from embedder.media.raw_kinds import raw_kind
from embedder.media.sniff import extra_kind, sniff
from hostile.files import MAKE, SUB_IFDS, SUBFILE_TYPE, dng, tiff_of

PIXELS = np.zeros((4, 4, 3), np.uint8)


def tagged(order="<", **more):
    """Head of a TIFF as cameras write it: a preview with the tag SubIFDs, and a maker."""
    tags = {SUBFILE_TYPE: ("I", [1]), MAKE: ("A", b"NIKON CORPORATION\0"), SUB_IFDS: ("I", [200, 300])}
    tags |= {int(name.removeprefix("tag_")): value for name, value in more.items()}
    return tiff_of([({tag: value for tag, value in tags.items() if value is not None}, b"")], order)


@pytest.mark.parametrize(
    ("maker", "kind"),
    [
        (b"NIKON CORPORATION\0", "NEF"),
        (b"SONY\0", "ARW"),
        (b"Canon\0", "CR2"),
        (b"PENTAX Corporation\0", "PEF"),
        (b"RICOH IMAGING COMPANY, LTD.\0", "PEF"),
        (b"SAMSUNG\0", "SRW"),
        (b"Hasselblad\0", "3FR"),
        (b"A maker of 2031\0", "RAW"),
    ],
)
@pytest.mark.parametrize("order", ["<", ">"])
def test_a_preview_above_other_directories_is_a_raw_of_its_maker(maker, kind, order):
    head = tagged(order, tag_271=("A", maker))
    assert (raw_kind(head), extra_kind(head), sniff(head)) == (kind, kind, "image")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"tag_50706": ("B", bytes([1, 4, 0, 0]))}, "DNG"),
        ({"tag_34310": ("B", b"a")}, "MOS"),
        ({"tag_254": None, "tag_330": None, "tag_262": ("H", [32803])}, "NEF"),
        ({"tag_254": None, "tag_330": None, "tag_262": ("H", [34892]), "tag_271": None}, "RAW"),
        ({"tag_254": None, "tag_330": None, "tag_259": ("H", [65535]), "tag_271": ("A", b"PENTAX\0")}, "PEF"),
        ({"tag_330": None}, None),  # one page of a fax, of a scanner with a name
        ({"tag_254": ("I", [0])}, None),  # an image with smaller copies of itself
        ({"tag_271": None}, None),
    ],
)
def test_each_tag_counts(changes, kind):
    assert raw_kind(tagged(**changes)) == kind


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"II*\0\x10\0\0\0CR\2\0\x88\x99\0\0", "CR2"),
        (b"II*\0\x08\0\0\0IIIITIFF", "IIQ"),
        (b"FUJIFILMCCD-RAW 0201", "RAF"),
        (b"IIRO\x08\0\0\0", "ORF"),
        (b"MMOR\0\0\0\x08", "ORF"),
        (b"IIU\0\x18\0\0\0", "RW2"),
        (b"FOVb\0\0\3\0", "X3F"),
        (b"\0MRM\0\0\1\0", "MRW"),
        (b"II\x1a\0\0\0HEAPCCDR", "CRW"),
        (b"\0\0\0\x18ftypcrx \0\0\0\1crx isom", "CR3"),
        (b"II+\0\x08\0\0\0", None),
        (b"II*\0", None),
        (b"II*\0\xff\xff\xff\xff", None),
        (b"MM\0*\0\0\0\x08\xff\xff", None),
        (b"", None),
    ],
)
def test_kinds_by_first_bytes(head, kind):
    assert raw_kind(head) == kind


@pytest.mark.parametrize("options", [{}, {"compression": "tiff_lzw"}, {"compression": "jpeg"}, {"save_all": True}])
def test_images_and_pages_that_pillow_writes_are_no_raws(options):
    file, exif = io.BytesIO(), Image.Exif()
    exif[271], exif[272] = "NIKON CORPORATION", "a scanner"
    more = {"append_images": [Image.new("RGB", (9, 9))]} if options.get("save_all") else {}
    Image.new("RGB", (20, 10)).save(file, "TIFF", exif=exif, **options, **more)
    assert (raw_kind(file.getvalue()), sniff(file.getvalue()[:4096])) == (None, "image")


def test_a_directory_beyond_the_head_is_found_in_the_whole_file():
    whole = dng(PIXELS)
    (num,) = struct.unpack_from("<H", whole, 8)
    directory = whole[8 : 8 + 2 + 12 * num + 4]
    moved = whole[:4] + struct.pack("<I", 8 + 5000) + b"\0" * 5000 + directory
    assert (raw_kind(moved[:4096]), raw_kind(moved)) == (None, "DNG")


def test_every_prefix_is_answered():
    whole = dng(PIXELS, preview=b"\xff\xd8\xff\xd9")
    assert raw_kind(whole) == "DNG"
    assert {raw_kind(whole[:stop]) for stop in range(len(whole))} <= {None, "DNG", "RAW"}
