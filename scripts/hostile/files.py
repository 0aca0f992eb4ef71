"""Good files of every accepted format, small, and media that were crafted to harm, made of the shipped images."""

import gzip
import io
import json
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import av
import numpy as np
import pillow_heif
import pillow_jxl  # noqa: F401 - makes Pillow write JPEG XL
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, ImageCms
from PIL.TiffImagePlugin import ImageFileDirectory_v2
from pyarrow import csv

from corpus import encode, read_shipped, write_clip

FORMS = {"B": 1, "A": 2, "H": 3, "I": 4, "R": 5, "S": 10}
"""Letter -> number of the type of a tag's values; `R` and `S` are quotients."""
XYZ_TO_SRGB = (32405, -15371, -4985, -9693, 18760, 416, 556, -2040, 10572)
"""Colours of a camera whose sensor sees in sRGB, each times 10,000."""
Tags = dict[int, tuple[str, Any]]

SUBFILE_TYPE, WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, MAKE, MODEL = 254, 256, 257, 258, 259, 262, 271, 272
OFFSET, ORIENTATION, SAMPLES, ROWS, NUM_BYTES, SUB_IFDS = 273, 274, 277, 278, 279, 330
HERE = [0]
"""Value of `OFFSET`, to which the place of the directory's data is added."""


def dng(pixels_HW3: NDArray[np.uint8], *, orientation: int = 1, preview: bytes | None = None, **changed: Any) -> bytes:
    wide = pixels_HW3.astype(np.uint16) * 257
    seen = wide[:, :, 1].copy()  # under a Bayer filter: red, green / green, blue
    seen[0::2, 0::2], seen[1::2, 1::2] = wide[0::2, 0::2, 0], wide[1::2, 1::2, 2]
    height, width = changed.get("height", seen.shape[0]), changed.get("width", seen.shape[1])
    data = seen.astype("<u2").tobytes()
    # 33421: size of the filter's pattern, and its colours; 50714: black and white; 50706: version of DNG
    sensor: Tags = {
        SUBFILE_TYPE: ("I", [0]), WIDTH: ("I", [width]), HEIGHT: ("I", [height]), BITS: ("H", [16]),
        COMPRESSION: ("H", [1]), PHOTOMETRIC: ("H", [32803]), OFFSET: ("I", HERE), SAMPLES: ("H", [1]),
        ROWS: ("I", [height]), NUM_BYTES: ("I", [len(data)]), 33421: ("H", [2, 2]),
        33422: ("B", bytes([0, 1, 1, 2])), 50714: ("H", [0]), 50717: ("H", [65535]),
    }  # fmt: skip
    camera: Tags = {
        MAKE: ("A", b"Acme"), MODEL: ("A", b"One"), ORIENTATION: ("H", [orientation]),
        50706: ("B", bytes([1, 4, 0, 0])), 50708: ("A", b"Acme One"),
        50721: ("S", [Fraction(value, 10_000) for value in XYZ_TO_SRGB]), 50728: ("R", [1] * 3), 50778: ("H", [21]),
    }  # fmt: skip
    if preview is None:
        return tiff_of([(sensor | camera, data)])
    shown: Tags = {
        SUBFILE_TYPE: ("I", [1]), WIDTH: ("I", [pixels_HW3.shape[1]]), HEIGHT: ("I", [pixels_HW3.shape[0]]),
        BITS: ("H", [8, 8, 8]), COMPRESSION: ("H", [7]), PHOTOMETRIC: ("H", [6]), OFFSET: ("I", HERE),
        SAMPLES: ("H", [3]), ROWS: ("I", [pixels_HW3.shape[0]]), NUM_BYTES: ("I", [len(preview)]),
    }  # fmt: skip
    return tiff_of([(shown | camera, preview), (sensor, data)])


def tiff_of(directories: list[tuple[Tags, bytes]], order: str = "<") -> bytes:
    """A TIFF of a directory with its data, and of those that are below it."""
    (first, data), *below = directories
    tail, places = b"", []
    if below:
        first = first | {SUB_IFDS: ("I", [0] * len(below))}
        start = 8 + len(_directory(first, data, 8, order))
        for tags, content in below:
            places.append(start + len(tail))
            tail += _directory(tags, content, places[-1], order)
        first = first | {SUB_IFDS: ("I", places)}
    mark = b"II*\0" if order == "<" else b"MM\0*"
    return mark + struct.pack(f"{order}I", 8) + _directory(first, data, 8, order) + tail


def _directory(tags: Tags, data: bytes, start: int, order: str) -> bytes:
    """Directory at a place, followed by the values that don't fit into it, and by its data."""
    directory = ImageFileDirectory_v2(b"II*\0\0\0\0\0" if order == "<" else b"MM\0*\0\0\0\0")
    for tag, (form, values) in tags.items():
        directory.tagtype[tag] = FORMS[form]
        directory[tag] = values
    content = directory.tobytes(start) + data
    return content + b"\0" * (len(content) % 2)


NUM_IMAGES = 3
SIZE = (128, 96)
CLIPS = {"mp4": "mpeg4", "h264.mp4": "libx264", "mkv": "libx264", "webm": "libvpx", "vp9.webm": "libvpx-vp9"} | {
    "avi": "mpeg4", "mjpeg.avi": "mjpeg", "mov": "mpeg4", "ts": "libx264", "mpg": "mpeg2video", "flv": "flv",
    "wmv": "wmv2",
}  # fmt: skip
FORMAT_OF = {"mkv": "matroska", "ts": "mpegts", "mpg": "mpeg", "wmv": "asf"}


def good_files() -> dict[str, bytes]:
    """File content by name; the suffix says what it is."""
    images, captions = (each[:NUM_IMAGES] for each in read_shipped())
    files = encoded_images([Image.open(io.BytesIO(image)).convert("RGBA").resize(SIZE) for image in images])
    files |= {f"clip.{name}": clip(codec, name.rpartition(".")[2]) for name, codec in CLIPS.items()}
    files["caption.txt"] = captions[0].encode()
    files["caption.json"] = json.dumps({"caption": captions[1], "tags": ["a", "b"]}).encode()
    members = [("clip.mp4", files["clip.mp4"], {})]
    for key, caption in enumerate(captions):
        members.append((f"{key}.jpg", files["plain.jpg"], {}))
        members.append((f"{key}.json", json.dumps({"caption": caption}).encode(), {}))
    files["shard.tar"] = tar_of(*members)
    return files | tables(files, captions)


def encoded_images(images: list[Image.Image]) -> dict[str, bytes]:
    rgba = images[0]
    rgb, grey = rgba.convert("RGB"), rgba.convert("L")
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    animation = {"save_all": True, "append_images": [each.convert("RGB") for each in images[1:]], "duration": 80}
    return {
        "plain.jpg": encode(rgb, "JPEG"),
        "progressive.jpg": encode(rgb, "JPEG", progressive=True, exif=exif, icc_profile=profile),
        "cmyk.jpg": encode(rgb.convert("CMYK"), "JPEG"),
        "several.mpo": encode(rgb, "MPO", **{key: animation[key] for key in ("save_all", "append_images")}),
        "rgba.png": encode(rgba, "PNG", exif=exif, icc_profile=profile),
        "palette.png": encode(rgb.quantize(16), "PNG", transparency=3),
        "sixteen.png": encode(Image.fromarray(np.asarray(grey, np.uint16) * 257), "PNG"),
        "animated.gif": encode(rgb, "GIF", **animation),
        "lossy.webp": encode(rgb, "WEBP", exif=exif),
        "lossless.webp": encode(rgba, "WEBP", lossless=True),
        "animated.webp": encode(rgb, "WEBP", **animation),
        "raw.tiff": encode(rgb, "TIFF", exif=exif),
        "lzw.tiff": encode(rgb, "TIFF", compression="tiff_lzw"),
        "deflate.tiff": encode(grey, "TIFF", compression="tiff_adobe_deflate"),
        "plain.bmp": encode(rgb, "BMP"),
        "palette.bmp": encode(rgb.quantize(8), "BMP"),
        "plain.avif": encode(rgb, "AVIF"),
        "animated.avif": encode(rgb, "AVIF", **animation),
        "animated.png": encode(rgb, "PNG", **animation),
    } | extra_images(images)


def extra_images(images: list[Image.Image]) -> dict[str, bytes]:
    """Images of the formats that the extra `formats` decodes, and some of their variants."""
    pillow_heif.register_heif_opener()
    rgba, rgb = images[0], images[0].convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = pillow_heif.from_bytes("RGB;16", rgb.size, (np.asarray(rgb, np.uint16) * 257).tobytes())
    deep_file = io.BytesIO()
    deep.save(deep_file)
    jpeg = encode(rgb, "JPEG")
    with tempfile.NamedTemporaryFile(suffix=".jpg") as file:
        Path(file.name).write_bytes(jpeg)
        from_jpeg = encode(Image.open(file.name), "JXL", lossless_jpeg=True)
    return {
        "plain.heic": encode(rgb, "HEIF", exif=exif.tobytes()), "alpha.heic": encode(rgba, "HEIF"),
        "tiles.heic": encode(rgb, "HEIF", tile_size=64),
        "several.heic": encode(rgb, "HEIF", save_all=True, append_images=[rgba], thumbnails=[32]),
        "deep.heic": deep_file.getvalue(), "lossy.jxl": encode(rgb, "JXL"),
        "lossless.jxl": encode(rgba, "JXL", lossless=True, use_container=True, exif=exif.tobytes()),
        "jpeg.jxl": from_jpeg, "plain.dng": dng(np.asarray(rgb)),
        "preview.dng": dng(np.asarray(rgb), orientation=6, preview=jpeg),
    }  # fmt: skip


def clip(codec: str, kind: str) -> bytes:
    frames = [np.full((48, 64, 3), 10 * number, np.uint8) for number in range(24)]
    for pixels in frames:
        pixels[:24, :32] = (200, 30, 90)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"clip.{kind}"
        write_clip(path, frames, codec, FORMAT_OF.get(kind, kind))
        return path.read_bytes()


def tar_of(*members: tuple[str, bytes, dict[str, object]]) -> bytes:
    """A tar of members: name, content, and changes of the header."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content, changes in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in changes.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def tables(files: dict[str, bytes], captions: list[str]) -> dict[str, bytes]:
    """Rows with images or captions, in each format of tables."""
    rows = [{"id": f"r{number}", "caption": caption} for number, caption in enumerate(captions)]
    images = pa.array([files["plain.jpg"], files["rgba.png"], None], pa.binary())
    table, parquet, text = pa.Table.from_pylist(rows), io.BytesIO(), io.BytesIO()
    pq.write_table(table.append_column("image", images), parquet)
    csv.write_csv(table, text)
    lines = "\n".join(json.dumps(row) for row in rows)
    return {"table.parquet": parquet.getvalue(), "table.csv": text.getvalue(), "table.jsonl": lines.encode()}


JXL_CONTAINER = b"\0\0\0\x0cJXL \r\n\x87\n\0\0\0\x14ftypjxl \0\0\0\0jxl "
HUGE_JXL = 2**30


def extra_contents(good: dict[str, bytes]) -> Iterator[tuple[str, Callable[[], bytes] | bytes]]:
    heic, jxl, raw = good["plain.heic"], good["lossy.jxl"], good["plain.dng"]
    square = np.zeros((64, 64, 3), np.uint8)
    yield "60,000 x 60,000.heic", heic_size(heic, 60_000, 60_000)
    yield "14,000 x 14,000 of a few pixels.heic", heic_size(heic, 14_000, 14_000)
    grid = struct.pack(">BBBBHH", 0, 0, 255, 255, 65_535, 65_535)  # 256 x 256 tiles, of which it has four
    yield "65,535 tiles a side.heic", patch(good["tiles.heic"], b"idat", 4, grid)
    yield "4 billion items.heic", heic.replace(b"iloc\0", b"iloc\xff", 1)
    yield "a million boxes.heic", heic[:28] + box(b"free", b"") * 1_000_000
    yield "boxes in boxes.heic", heic[:28] + nest_boxes(b"meta", 5_000, b"\0\0\0\0")
    yield "nothing but its brand.heic", box(b"ftyp", b"heic\0\0\0\0mif1heic")
    yield "a clip that says it is an image.heic", good["clip.mp4"].replace(b"ftypisom", b"ftypheic", 1)
    yield "a billion pixels a side.jxl", jxl_size(HUGE_JXL, HUGE_JXL)
    yield "a billion pixels a side, in a box.jxl", JXL_CONTAINER + box(b"jxlc", jxl_size(HUGE_JXL, HUGE_JXL))
    yield "14,000 x 14,000 without pixels.jxl", jxl_size(14_000, 14_000)
    large = Image.new("L", (9990, 9990))
    yield "bomb just below the pixel limit.jxl", lambda: encode(large, "JXL", lossless=True, effort=1)
    yield "a million boxes.jxl", JXL_CONTAINER + box(b"free", b"") * 1_000_000
    yield "box of no length.jxl", JXL_CONTAINER + struct.pack(">I4s", 0, b"jxlp") + jxl
    cut = ((3, 40), (0, 0), (0x80000001, 80))
    parts = (box(b"jxlp", struct.pack(">I", number) + jxl[start : start + 40]) for number, start in cut)
    yield "parts in the wrong order.jxl", JXL_CONTAINER + b"".join(parts)
    yield "no more than a mark.jxl", b"\xff\x0a"
    yield "60,000 x 60,000.dng", dng(square, width=60_000, height=60_000)
    yield "14,000 x 14,000 of a few pixels.dng", dng(square, width=14_000, height=14_000)
    yield "0 x 0.dng", dng(square, width=0, height=0)
    yield "preview of 65,500 x 65,500.dng", dng(square, preview=jpeg_size(good["plain.jpg"], 65_500, 65_500))
    yield "preview of noise.dng", dng(square, preview=b"\xff\xd8\xff" + b"\xa5" * 5000)
    own_directory = patch(good["preview.dng"], struct.pack("<HHI", SUB_IFDS, 4, 1), 8, struct.pack("<I", 8))
    yield "directory that is its own sub-directory.dng", own_directory
    yield "cut to its tags.dng", raw[:700]
    yield "sensor of a camera that nobody made.nef", dng(square).replace(struct.pack("<H", 50706), b"\x99\x99", 1)
    yield "noise.cr3", box(b"ftyp", b"crx \0\0\0\x01crx isom") + b"\xa5" * 50_000
    yield "noise.raf", b"FUJIFILMCCD-RAW 0201" + b"\xa5" * 50_000
    yield "noise.orf", b"IIRO\x08\0\0\0" + b"\xff" * 50_000
    yield "noise.rw2", b"IIU\0\x18\0\0\0" + b"\xff" * 50_000
    yield "noise.x3f", b"FOVb" + b"\xff" * 50_000


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def nest_boxes(kind: bytes, depth: int, head: bytes = b"") -> bytes:
    size = 8 + len(head)
    return b"".join(struct.pack(">I4s", size * (depth - level), kind) + head for level in range(depth))


def patch(data: bytes, mark: bytes, skip: int, new: bytes) -> bytes:
    """Data with other bytes so many behind the beginning of a mark."""
    place = data.index(mark) + skip
    return data[:place] + new + data[place + len(new) :]


def heic_size(heic: bytes, width: int, height: int) -> bytes:
    """Every image of the file says that it has this size."""
    parts = heic.split(b"ispe\0\0\0\0")
    size = struct.pack(">II", width, height)
    return parts[0] + b"".join(b"ispe\0\0\0\0" + size + part[8:] for part in parts[1:])


def jxl_size(width: int, height: int) -> bytes:
    """The header of a codestream with this size, and zeros behind it."""
    value, place = 0, 1  # the first bit: not small
    for edge, has_ratio in ((height, True), (width, False)):
        value |= 3 << place | (edge - 1) << (place + 2)
        place += 32 + (3 if has_ratio else 0)
    return b"\xff\x0a" + value.to_bytes(12, "little") + b"\0" * 200


Make = Callable[[Path], None]
"""Fills an empty folder with one case."""
Good = dict[str, bytes]

ENDLESS_S = 4 * 3600
SECRET_TEXT = "file '/etc/hostname'\n"


def media_cases(good: Good) -> Iterator[tuple[str, Make]]:
    for name, content in chain(contents(good), extra_contents(good)):
        yield name, writer(name, content)
    # A header that gives no length, as of a recording in progress.
    yield "endless video.mkv", lambda folder: video(folder / "endless.mkv", range(ENDLESS_S), {"live": "1"})
    yield "video with years between frames.mkv", lambda folder: video(folder / "years.mkv", [0, 1, 10**7, 3 * 10**7])
    yield "huge sparse image.jpg", lambda folder: sparse_file(folder / "huge.jpg", good["plain.jpg"], 1 << 40)
    yield "huge sparse video.mp4", lambda folder: sparse_file(folder / "huge.mp4", good["clip.mp4"], 1 << 40)
    yield "playlist next to what it names", playlist


def writer(name: str, content: Callable[[], bytes] | bytes) -> Make:
    def make(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content())

    return make


def contents(good: Good) -> Iterator[tuple[str, Callable[[], bytes] | bytes]]:
    jpeg, mp4 = good["plain.jpg"], good["clip.mp4"]
    yield "bomb of 60,000 x 60,000.png", png_bomb
    yield "bomb just below the pixel limit.png", lambda: encode(Image.new("1", (9990, 9990)))
    yield "bomb in a text chunk.png", lambda: text_bomb(good["rgba.png"])
    yield "bomb in a profile.png", lambda: text_bomb(good["rgba.png"], b"iCCP", b"p\0\0")
    yield "wide as a street.png", lambda: encode(Image.new("L", (1_000_000, 1)))
    yield "high as a tower.gif", lambda: encode(Image.new("L", (1, 65_000)), "GIF")
    yield "ten thousand frames.gif", many_frames
    yield "huge logical screen.gif", patch(good["animated.gif"], b"GIF", 6, b"\xff" * 4)
    yield "65,500 x 65,500.jpg", jpeg_size(jpeg, 65_500, 65_500)
    yield "size 0 x 0.jpg", jpeg_size(jpeg, 0, 0)
    yield "exif of nothing but 255.jpg", jpeg_segment(jpeg, 0xE1, b"Exif\0\0" + b"\xff" * 60_000)
    yield "exif that loops.jpg", jpeg_segment(jpeg, 0xE1, exif_of(0x8769, 4, 8, next_at=8))
    yield "orientation 99.jpg", jpeg_segment(jpeg, 0xE1, exif_of(0x0112, 3, 99))
    yield "profile of noise.jpg", jpeg_segment(jpeg, 0xE2, b"ICC_PROFILE\0\x01\x01" + b"\xa5" * 60_000)
    yield "200 profiles.jpg", jpeg_segment(jpeg, 0xE2, b"ICC_PROFILE\0\x01\xff" + b"\0" * 60_000, 200)
    yield "ten thousand comments.jpg", jpeg_segment(jpeg, 0xFE, b"c" * 60, 10_000)
    yield "directory that loops.tiff", tiff({}, next_at=8)
    yield "huge strips.tiff", tiff({256: 60_000, 257: 60_000, 258: 8, 259: 1, 273: 8, 278: 60_000, 279: 0xFFFFFFF0})
    yield "a million tiles.tiff", tiff({256: 30_000, 257: 3_000, 258: 8, 259: 1, 322: 16, 323: 16, 324: 8, 325: 1})
    yield "size below zero.bmp", patch(good["plain.bmp"], b"BM", 18, struct.pack("<ii", -5, -5))
    yield "2^31 wide.bmp", patch(good["plain.bmp"], b"BM", 18, struct.pack("<ii", 2**31 - 1, 2**31 - 1))
    yield "16,383 x 16,383.webp", patch(good["lossy.webp"], b"\x9d\x01\x2a", 3, struct.pack("<HH", 0x3FFF, 0x3FFF))
    yield "declared endless.mp4", mp4.replace(b"mdat", b"free", 1) + struct.pack(">I4sQ", 1, b"mdat", 2**62)
    yield "box of no size.mp4", struct.pack(">I4s", 0, b"moov") + mp4
    yield "a million boxes.mp4", mp4[:32] + struct.pack(">I4s", 8, b"free") * 1_000_000
    yield "boxes in boxes.mp4", mp4[:32] + nest_boxes(b"moov", 20_000)
    yield "60,000 pixels wide.mp4", patch(mp4, b"mp4v", 28, struct.pack(">HH", 60_000, 60_000))
    yield "huge element.mkv", good["clip.mkv"][:60] + b"\x15\x49\xa9\x66\x01" + b"\xff" * 7 + good["clip.mkv"][60:]
    yield "riff of 4 GiB.avi", patch(good["clip.avi"], b"RIFF", 4, b"\xff" * 4)
    yield "two files in one.jpg", jpeg + mp4 + good["rgba.png"]
    yield "packed.jpg", gzip.compress(b"\0" * 100_000_000)
    yield "empty.png", b""
    yield "one byte.jpg", b"\xff"
    yield "drawing.svg", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    yield "program.png", b"\x7fELF" + b"\0" * 4000
    yield "postscript.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) (r) file\n"
    yield "script.eps.jpg", b"\xc5\xd0\xd3\xc6" + b"\0" * 400
    yield "icon.ico", encode(Image.new("RGB", (16, 16)), "ICO")
    yield "old.pcx", encode(Image.new("RGB", (16, 16)), "PCX")
    yield "hdf.jpg", b"\x89HDF\r\n\x1a\n" + b"\0" * 2000
    for name, text in playlists().items():
        yield name, text.encode()


def playlists() -> dict[str, str]:
    return {
        "concat.mp4": f"ffconcat version 1.0\n{SECRET_TEXT}",
        "session.mp4": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 4444 RTP/AVP 96\n",
        "stream.m3u8.mp4": "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n",
        "stream.mp4": "#EXTM3U\n#EXTINF:10,\nhttp://127.0.0.1:9/secret\n",
        "manifest.mkv": '<?xml version="1.0"?><MPD><BaseURL>http://127.0.0.1:9/</BaseURL></MPD>',
        "link.mov": '<?xml version="1.0"?><?quicktime type="application/x-quicktime-media-link"?><embed src="/etc"/>',
    }


def playlist(folder: Path) -> None:
    (folder / "list.mp4").write_text("ffconcat version 1.0\nfile 'neighbour.txt'\n")
    (folder / "neighbour.txt").write_text("a red car")


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_bomb() -> bytes:
    """60,000 x 60,000 pixels of one bit: 450 MB behind 450 kB."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 1, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0" * (7501 * 60_000), 9)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")


def text_bomb(png: bytes, kind: bytes = b"zTXt", head: bytes = b"k\0\0") -> bytes:
    """A chunk that unpacks to 500 MB, before the pixels."""
    return png[:33] + png_chunk(kind, head + zlib.compress(b"\0" * 500_000_000, 1)) + png[33:]


def many_frames() -> bytes:
    file, frames = io.BytesIO(), [Image.new("P", (8, 8), number % 7) for number in range(10_000)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=10, optimize=False)
    return file.getvalue()


def jpeg_size(jpeg: bytes, width: int, height: int) -> bytes:
    return patch(jpeg, b"\xff\xc0", 5, struct.pack(">HH", height, width))


def jpeg_segment(jpeg: bytes, marker: int, content: bytes, times: int = 1) -> bytes:
    segment = bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content
    return jpeg[:2] + segment * times + jpeg[2:]


def exif_of(tag: int, form: int, value: int, next_at: int = 0) -> bytes:
    """A directory of one entry, which may be its own sub-directory and successor."""
    entry = struct.pack("<HHII", tag, form, 1, value)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + struct.pack("<I", next_at)


def tiff(tags: dict[int, int], next_at: int = 0) -> bytes:
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", next_at) + b"\0" * 64


def video(path: Path, times_s: range | list[int], options: dict[str, str] | None = None) -> None:
    with av.open(str(path), "w", format="matroska", options=options or {}) as container:
        stream = container.add_stream("mpeg4", rate=Fraction(1))
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
        frame.pts = 0
        data = b"".join(map(bytes, [*stream.encode(frame), *stream.encode()]))
        for time_s in times_s:
            packet = av.Packet(data)
            packet.stream, packet.time_base = stream, Fraction(1)
            packet.pts = packet.dts = time_s
            packet.is_keyframe = True
            container.mux_one(packet)


def sparse_file(path: Path, head: bytes, size: int) -> None:
    """A file that says it has a terabyte, and takes no space."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
