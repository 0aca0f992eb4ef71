"""Pictures in other colour spaces next to their plain sRGB twins: profiles written here by hand, files by NumPy."""

import io
import struct
import zlib
from fractions import Fraction

import av
import numpy as np
from PIL import Image, ImageCms

SRGB = ((0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7141))
"""Red, green and blue of sRGB, adapted to D50 (Source: the profile of the ICC, sRGB2014.icc)."""
DISPLAY_P3 = ((0.5151, 0.2412, -0.0011), (0.2919, 0.6922, 0.0419), (0.1572, 0.0666, 0.7841))
WIDE = ((0.7977, 0.288, 0.0), (0.1352, 0.7119, 0.0), (0.0313, 0.0001, 0.8249))
TO_BT2020 = np.array([[0.6274, 0.3293, 0.0433], [0.0691, 0.9195, 0.0114], [0.0164, 0.088, 0.8956]])
"""Linear sRGB to linear BT.2020 (Source: ITU-R BT.2087)."""


def scene(size=(64, 48), brightest=230):
    """Soft colours of all hues, without the extremes that other spaces clip."""
    x, y = np.meshgrid(np.linspace(0, 1, size[0]), np.linspace(0, 1, size[1]))
    waves = [0.5 + 0.45 * np.sin(6.3 * (x * a + y * b) + c) for a, b, c in ((1, 0.3, 0), (0.4, 1.1, 2), (1.3, 0.8, 4))]
    return Image.fromarray((np.stack(waves, -1) * brightest).round().astype(np.uint8))


def linear(image):
    """Linear light of an sRGB image, (H, W, 3)."""
    values = np.asarray(image, np.float64) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def encoded_srgb(light):
    return np.where(light <= 0.0031308, light * 12.92, 1.055 * np.maximum(light, 0) ** (1 / 2.4) - 0.055)


def pq(light_of_white):
    """PQ signal of linear light, 1 for 203 nit (Source: SMPTE ST 2084)."""
    power = np.clip(light_of_white * 203 / 10_000, 0, 1) ** 0.1593017578125
    return ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** 78.84375


def hlg(light_of_white):
    """HLG signal of linear light, 1 for 75 % (Source: ARIB STD-B67)."""
    light = np.clip(light_of_white * 0.26496, 0, 1)
    bright = 0.17883277 * np.log(np.maximum(12 * light - 0.28466892, 1e-9)) + 0.55991073
    return np.where(light <= 1 / 12, np.sqrt(3 * light), bright)


def _s15(*values):
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def icc(space, tags, kind=b"mntr", connection=b"XYZ "):
    table, body = struct.pack(">I", len(tags)), b""
    start = 132 + 12 * len(tags)
    for name, data in tags:
        padded = data + bytes(-len(data) % 4)
        table, body = table + name + struct.pack(">II", start + len(body), len(data)), body + padded
    head = struct.pack(">I4xI4s4s4s", 128 + len(table + body), 0x02400000, kind, space, connection)
    head += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + _s15(0.9642, 1, 0.8249)
    return head.ljust(128, b"\0") + table + body


_DESCRIPTION = b"desc\0\0\0\0" + struct.pack(">I", 5) + b"test\0" + bytes(78)
_COMMON = [
    (b"desc", _DESCRIPTION),
    (b"cprt", b"text\0\0\0\0none\0"),
    (b"wtpt", b"XYZ \0\0\0\0" + _s15(0.9642, 1, 0.8249)),
]


def _gamma(gamma):
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256))


def rgb_profile(columns, gamma):
    tags = [
        (name, b"XYZ \0\0\0\0" + _s15(*xyz)) for name, xyz in zip((b"rXYZ", b"gXYZ", b"bXYZ"), columns, strict=True)
    ]
    return icc(b"RGB ", [*_COMMON, *tags, *((name, _gamma(gamma)) for name in (b"rTRC", b"gTRC", b"bTRC"))])


def grey_profile(gamma):
    return icc(b"GRAY", [*_COMMON, (b"kTRC", _gamma(gamma))])


def swapped_inks_profile(points=9):
    """Profile of a press whose first ink is magenta and whose second is cyan; what Pillow's own conversion mixes up."""
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, points)] * 4, indexing="ij"), -1).reshape(-1, 4)
    magenta, cyan, yellow, black = grid.T
    rgb = np.stack([(1 - cyan) * (1 - black), (1 - magenta) * (1 - black), (1 - yellow) * (1 - black)], -1)
    lab_profile, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    colours = Image.fromarray((rgb * 255).round().astype(np.uint8)[None])
    lab = ImageCms.profileToProfile(colours, srgb, lab_profile, ImageCms.Intent.RELATIVE_COLORIMETRIC, outputMode="LAB")
    raw = np.frombuffer(lab.tobytes(), np.uint8).reshape(-1, 3).copy()
    raw[:, 1:] ^= 128  # signed in Pillow's images, offset by 128 in profiles
    ramp = bytes(range(256))
    table = b"mft1\0\0\0\0" + bytes([4, 3, points, 0]) + _s15(1, 0, 0, 0, 1, 0, 0, 0, 1)
    table += ramp * 4 + raw.tobytes() + ramp * 3
    return icc(b"CMYK", [*_COMMON, (b"A2B0", table), (b"A2B1", table)], b"prtr", b"Lab ")


def in_profile(image, profile):
    """The same colours in a profile's numbers, by littlecms."""
    opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
    return ImageCms.profileToProfile(image, ImageCms.createProfile("sRGB"), opened, intent)


def png(pixels, *chunks):
    """PNG of uint8 or uint16, (H, W) or (H, W, 3), with chunks before the pixels; written without Pillow."""
    pixels = np.asarray(pixels)
    rows = pixels.astype(pixels.dtype.newbyteorder(">")).reshape(len(pixels), -1)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    size = struct.pack(">II", pixels.shape[1], pixels.shape[0])
    head = size + bytes([8 * pixels.itemsize, 2 if pixels.ndim == 3 else 0, 0, 0, 0])
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


def iccp(profile):
    return b"iCCP", b"a profile\0\0" + zlib.compress(profile)


def gama(value):
    return b"gAMA", struct.pack(">I", round(value * 100_000))


def chrm(*points):
    return b"cHRM", struct.pack(">8I", *(round(value * 100_000) for value in points))


def cicp(primaries, transfer):
    return b"cICP", bytes([primaries, transfer, 0, 1])


def write_video(path, rgb, primaries, transfer, matrix, *, depth=10, full_range=False):
    """One second of one picture as H.264, whose colours are computed here; `rgb` is the signal (H, W, 3) in [0, 1]."""
    kr, kb = {"bt2020nc": (0.2627, 0.0593), "bt709": (0.2126, 0.0722), "smpte170m": (0.299, 0.114)}[matrix]
    luma = rgb @ [kr, 1 - kr - kb, kb]
    chroma = [(rgb[..., 2] - luma) / (2 * (1 - kb)), (rgb[..., 0] - luma) / (2 * (1 - kr))]
    top = (1 << depth) - 1
    scale, (low, high, wide) = 1 << (depth - 8), (0, 255, 255) if full_range else (16, 219, 224)
    planes = [np.round((high * luma + low) * scale)]
    planes += [np.round((wide * each + 128) * scale) for each in chroma]
    pix_fmt = "yuv444p10le" if depth == 10 else "yuv444p"
    tags = f"colorprim={primaries}:transfer={transfer}:colormatrix={matrix}:fullrange={'on' if full_range else 'off'}"
    height, width = luma.shape
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", 5, options={"crf": "4", "preset": "ultrafast", "x264-params": tags})
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        for number in range(5):
            frame = av.VideoFrame(width, height, pix_fmt)
            for plane, values in zip(frame.planes, planes, strict=True):
                whole = np.ascontiguousarray(np.clip(values, 0, top).astype(np.uint16 if depth == 10 else np.uint8))
                padded = np.zeros((plane.height, plane.line_size), np.uint8)
                padded[:, : width * whole.itemsize] = whole.view(np.uint8).reshape(height, -1)
                plane.update(padded.tobytes())
            frame.pts, frame.time_base = number, Fraction(1, 5)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))


def write_frames(path, pixels, options):
    """One second of one picture as H.264 without a word about colour."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", 5, options={"preset": "ultrafast", **options})
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[:2], "yuv444p"
        for number in range(5):
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24").reformat(format="yuv444p")
            frame.pts, frame.time_base = number, Fraction(1, 5)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
