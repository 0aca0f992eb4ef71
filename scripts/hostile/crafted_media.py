"""Images and videos made to be as bad as the formats allow: bombs, lies about size, playlists, endless clips."""

import gzip
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path

import av
import numpy as np
from PIL import Image

from corpus import encode
from hostile.crafted_formats import extra_contents

Make = Callable[[Path], None]
"""Fills an empty folder with one case."""
Good = dict[str, bytes]

ENDLESS_S = 4 * 3600
SECRET_TEXT = "file '/etc/hostname'\n"


def media_cases(good: Good) -> Iterator[tuple[str, Make]]:
    for name, content in chain(contents(good), extra_contents(good)):
        yield name, writer(name, content)
    yield "endless video.mkv", endless_video
    yield "video with years between frames.mkv", lambda folder: video(folder / "years.mkv", [0, 1, 10**7, 3 * 10**7])
    yield "huge sparse image.jpg", lambda folder: sparse_file(folder / "huge.jpg", good["plain.jpg"], 1 << 40)
    yield "huge sparse video.mp4", lambda folder: sparse_file(folder / "huge.mp4", good["clip.mp4"], 1 << 40)
    yield "playlist beside what it names", playlist


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
    yield "huge logical screen.gif", good["animated.gif"][:6] + b"\xff\xff\xff\xff" + good["animated.gif"][10:]
    yield "65,500 x 65,500.jpg", jpeg_size(jpeg, 65_500, 65_500)
    yield "size 0 x 0.jpg", jpeg_size(jpeg, 0, 0)
    yield "exif of nothing but 255.jpg", jpeg_segment(jpeg, 0xE1, b"Exif\0\0" + b"\xff" * 60_000)
    yield "exif that loops.jpg", jpeg_segment(jpeg, 0xE1, exif_loop())
    yield "orientation 99.jpg", jpeg_segment(jpeg, 0xE1, exif_orientation(99))
    yield "profile of noise.jpg", jpeg_segment(jpeg, 0xE2, b"ICC_PROFILE\0\x01\x01" + b"\xa5" * 60_000)
    yield "200 profiles.jpg", jpeg_segment(jpeg, 0xE2, b"ICC_PROFILE\0\x01\xff" + b"\0" * 60_000, 200)
    yield "ten thousand comments.jpg", jpeg_segment(jpeg, 0xFE, b"c" * 60, 10_000)
    yield "directory that loops.tiff", tiff({}, next_at=8)
    yield "huge strips.tiff", tiff({256: 60_000, 257: 60_000, 258: 8, 259: 1, 273: 8, 278: 60_000, 279: 0xFFFFFFF0})
    yield "a million tiles.tiff", tiff({256: 30_000, 257: 3_000, 258: 8, 259: 1, 322: 16, 323: 16, 324: 8, 325: 1})
    yield "size below zero.bmp", good["plain.bmp"][:18] + struct.pack("<ii", -5, -5) + good["plain.bmp"][26:]
    yield "2^31 wide.bmp", good["plain.bmp"][:18] + struct.pack("<ii", 2**31 - 1, 2**31 - 1) + good["plain.bmp"][26:]
    yield "16,383 x 16,383.webp", webp_size(good["lossy.webp"], 0x3FFF)
    yield "declared endless.mp4", mp4.replace(b"mdat", b"free", 1) + struct.pack(">I4sQ", 1, b"mdat", 2**62)
    yield "box of no size.mp4", struct.pack(">I4s", 0, b"moov") + mp4
    yield "a million boxes.mp4", mp4[:32] + struct.pack(">I4s", 8, b"free") * 1_000_000
    yield "boxes in boxes.mp4", mp4[:32] + nested_boxes(20_000)
    yield "60,000 pixels wide.mp4", lambda: wide_video(mp4)
    yield "huge element.mkv", good["clip.mkv"][:60] + b"\x15\x49\xa9\x66\x01" + b"\xff" * 7 + good["clip.mkv"][60:]
    yield "riff of 4 GiB.avi", good["clip.avi"][:4] + b"\xff\xff\xff\xff" + good["clip.avi"][8:]
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
    place = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:place] + struct.pack(">HH", height, width) + jpeg[place + 4 :]


def jpeg_segment(jpeg: bytes, marker: int, content: bytes, times: int = 1) -> bytes:
    segment = bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content
    return jpeg[:2] + segment * times + jpeg[2:]


def exif_loop() -> bytes:
    """A directory whose sub-directory and successor are itself."""
    entry = struct.pack("<HHII", 0x8769, 4, 1, 8)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + struct.pack("<I", 8)


def exif_orientation(value: int) -> bytes:
    entry = struct.pack("<HHII", 0x0112, 3, 1, value)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + struct.pack("<I", 0)


def tiff(tags: dict[int, int], next_at: int = 0) -> bytes:
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", next_at) + b"\0" * 64


def webp_size(webp: bytes, size: int) -> bytes:
    place = webp.index(b"\x9d\x01\x2a") + 3
    return webp[:place] + struct.pack("<HH", size, size) + webp[place + 4 :]


def nested_boxes(depth: int) -> bytes:
    return b"".join(struct.pack(">I4s", 8 * (depth - level), b"moov") for level in range(depth))


def wide_video(mp4: bytes) -> bytes:
    """The sample description says 60,000 x 60,000."""
    place = mp4.index(b"mp4v") + 4 + 24
    return mp4[:place] + struct.pack(">HH", 60_000, 60_000) + mp4[place + 4 :]


def endless_video(folder: Path) -> None:
    """Four hours, and a header that gives no length, as of a recording that still goes on."""
    video(folder / "endless.mkv", range(0, ENDLESS_S), {"live": "1"})


def video(path: Path, times_s: range | list[int], options: dict[str, str] | None = None) -> None:
    """One encoded frame, shown at these times."""
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
