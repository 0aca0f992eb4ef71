"""Colour: a picture in any space next to its plain sRGB twin, files that lie about theirs, and pixels read as ever."""

import io
import struct
import time

import numpy as np
import pytest
from colour_twins import (
    DISPLAY_P3,
    SRGB,
    TO_BT2020,
    WIDE,
    chrm,
    cicp,
    encoded_srgb,
    gama,
    grey_profile,
    hlg,
    iccp,
    in_profile,
    linear,
    png,
    pq,
    rgb_profile,
    scene,
    swapped_inks_profile,
    write_frames,
    write_video,
)
from PIL import Image, ImageCms

from embedder.media.colour import changes_colours, may_follow_resize, profile_of, to_rgb, to_srgb
from embedder.media.colour_profiles import adobe_rgb_profile, cicp_profile, gamma_profile
from embedder.media.colour_tags import MAX_PROFILE_BYTES, heif_cicp, png_cicp
from embedder.media.resize import ResizeSpec

SIZE = 48
SHOWN = ResizeSpec(SIZE, "squash")
RAW = ResizeSpec(SIZE, "squash", colour="raw")
PROFILES = {
    "display_p3": rgb_profile(DISPLAY_P3, 2.2),
    "wide": rgb_profile(WIDE, 1.8),
    "linear": rgb_profile(SRGB, 1.0),
    "swapped": rgb_profile((SRGB[1], SRGB[2], SRGB[0]), 2.2),
}


def difference(one, other):
    return float(np.abs(one.astype(int) - other.astype(int)).mean())


@pytest.fixture
def plain(decoder, encode_image):
    """`plain(image)` -> pixels of its PNG without a word about colour."""
    return lambda image: decoder.image(encode_image(image, "PNG"), SHOWN)


FULL_COLOURS = {"subsampling": 0, "quality": 100}
OPTIONS = {
    "JPEG": FULL_COLOURS,
    "MPO": FULL_COLOURS,
    "AVIF": {"subsampling": "4:4:4", "quality": 100},
    "HEIF": {"chroma": 444, "quality": -1},
    "WEBP": {"lossless": True},
}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", *OPTIONS])
@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_applied_in_each_format(decoder, plain, encode_image, name, kind):
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    turned, options = in_profile(scene(), PROFILES[name]), OPTIONS.get(kind, {})
    encoded = encode_image(turned, kind, icc_profile=PROFILES[name], **options)
    lossy_shadows = name in ("linear", "wide") and kind in ("JPEG", "MPO", "AVIF")  # they are in few levels
    assert difference(decoder.image(encoded, SHOWN), plain(scene())) <= (4 if lossy_shadows else 2)
    turned.info.clear()
    raw, unmarked = decoder.image(encoded, RAW), encode_image(turned, kind, **options)
    assert np.array_equal(raw, decoder.image(unmarked, SHOWN)) and difference(raw, plain(scene())) > 4


def test_transparency_is_laid_on_white_after_the_profile(decoder, encode_image):
    image = in_profile(scene(), PROFILES["swapped"])
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    twin = scene()
    twin.putalpha(Image.linear_gradient("L").resize(image.size))
    found = decoder.image(encode_image(image, "PNG", icc_profile=PROFILES["swapped"]), SHOWN)
    assert difference(found, decoder.image(encode_image(twin, "PNG"), SHOWN)) <= 2


def test_a_palette_is_read_by_the_profile(decoder, encode_image):
    image = scene().quantize(32)
    palette = Image.new("RGB", (256, 1))
    palette.putdata([tuple(image.getpalette()[3 * i : 3 * i + 3]) for i in range(32)] + [(0, 0, 0)] * 224)
    turned = image.copy()
    turned.putpalette(in_profile(palette, PROFILES["swapped"]).tobytes())
    found = decoder.image(encode_image(turned, "PNG", icc_profile=PROFILES["swapped"]), SHOWN)
    assert difference(found, decoder.image(encode_image(image, "PNG"), SHOWN)) <= 2


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
def test_grey_profiles(decoder, plain, encode_image, kind):
    grey = scene().convert("L")
    dark = Image.fromarray((linear(grey) ** (1 / 1.2) * 255).round().astype(np.uint8))
    encoded = encode_image(dark, kind, icc_profile=grey_profile(1.2), **({"quality": 100} if kind == "JPEG" else {}))
    assert difference(decoder.image(encoded, SHOWN), plain(grey)) <= 2
    assert difference(decoder.image(encoded, RAW), plain(grey)) > 20


@pytest.mark.parametrize("kind", ["TIFF", "JPEG"])
def test_cmyk_by_its_profile_and_without_one_as_ever(decoder, plain, encode_image, kind):
    cyan, magenta, yellow = (255 - np.asarray(scene())).transpose(2, 0, 1)
    inks = Image.merge("CMYK", [Image.fromarray(each) for each in (magenta, cyan, yellow, np.zeros_like(cyan))])
    options = {"quality": 100, "subsampling": 0} if kind == "JPEG" else {}
    encoded = encode_image(inks, kind, icc_profile=swapped_inks_profile(), **options)
    assert difference(decoder.image(encoded, SHOWN), plain(scene())) <= 3
    unmarked = encode_image(inks, kind, **options)
    assert np.array_equal(decoder.image(unmarked, SHOWN), decoder.image(unmarked, RAW))
    assert np.array_equal(decoder.image(unmarked, RAW), decoder.image(encoded, RAW))


@pytest.mark.parametrize("exponent", [1.0, 1.8, 2.6])
def test_png_gamma(decoder, plain, exponent):
    values = (linear(scene()) ** (1 / exponent) * 65535).round().astype(np.uint16)
    assert difference(decoder.image(png(values, gama(1 / exponent)), SHOWN), plain(scene())) <= 2.5
    grey = (linear(scene().convert("L")) ** (1 / exponent) * 65535).round().astype(np.uint16)
    assert difference(decoder.image(png(grey, gama(1 / exponent)), SHOWN), plain(scene().convert("L"))) <= 1


def test_png_primaries(decoder, plain):
    """Adobe RGB's primaries and gamma, computed with the matrix of its specification."""
    matrix = np.array([[0.71516, 0.28484, 0.0], [0.0, 1.0, 0.0], [0.0, 0.04117, 0.95883]])
    values = (np.clip(linear(scene()) @ matrix.T, 0, 1) ** (256 / 563) * 255).round().astype(np.uint8)
    chunks = gama(256 / 563), chrm(0.3127, 0.329, 0.64, 0.33, 0.21, 0.71, 0.15, 0.06)
    assert difference(decoder.image(png(values, *chunks), SHOWN), plain(scene())) <= 2
    # only cHRM says nothing, as in browsers
    assert np.array_equal(decoder.image(png(values, chunks[1]), SHOWN), decoder.image(png(values), SHOWN))


def test_what_nearly_all_files_with_gamma_mean_is_srgb(decoder, plain):
    marked = png(np.asarray(scene()), gama(0.45455), chrm(0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06))
    assert np.array_equal(decoder.image(marked, SHOWN), plain(scene()))


def test_png_chunks_by_their_precedence(decoder, plain):
    """cICP before iCCP before sRGB before gAMA (Source: PNG, third edition, table 12.1)."""
    swapped, p3 = iccp(PROFILES["swapped"]), cicp(12, 13)
    pixels = np.asarray(scene())

    def shown(*chunks):
        return decoder.image(png(pixels, *chunks), SHOWN)

    assert np.array_equal(shown(p3, swapped, gama(1.0)), shown(p3))
    assert np.array_equal(shown(swapped, gama(1.0)), shown(swapped))
    assert np.array_equal(shown((b"sRGB", b"\0"), gama(1.0)), plain(scene()))
    assert len({shown(*each).tobytes() for each in ((p3,), (swapped,), (gama(1.0),), ())}) == 4


@pytest.mark.parametrize(("transfer", "signal"), [(16, pq), (18, hlg)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_png_hdr(decoder, plain, transfer, signal, dtype):
    light = np.clip(linear(scene()) @ TO_BT2020.T, 0, 1)
    values = (signal(light) * np.iinfo(dtype).max).round().astype(dtype)
    assert difference(decoder.image(png(values, cicp(9, transfer)), SHOWN), plain(scene())) <= 3.5
    assert difference(decoder.image(png(values, cicp(9, transfer)), RAW), plain(scene())) > 20


@pytest.mark.parametrize(("transfer", "signal"), [(16, pq), (18, hlg)])
def test_the_white_of_hdr_is_near_white_and_highlights_stay_apart(transfer, signal):
    levels = (signal(np.array([0.18, 0.5, 1.0, 1.6, 3.0])) * 255).round().astype(np.uint8)
    strip = Image.fromarray(np.repeat(levels[None, :, None], 3, 2))
    found = np.asarray(to_srgb(strip, cicp_profile((9, transfer))))[0, :, 0].tolist()
    assert found[0] == pytest.approx(255 * encoded_srgb(np.array(0.18)), abs=3)
    assert found[1] == pytest.approx(255 * encoded_srgb(np.array(0.5)), abs=3)
    assert 243 <= found[2] <= 250
    assert found == sorted(found) and len(set(found)) == 5


def test_an_hdr_profile_says_so_by_its_codes():
    tagged = rgb_profile(SRGB, 2.2)
    number = int.from_bytes(tagged[128:132], "big")
    grown = bytearray(tagged[:128] + struct.pack(">I", number + 1))
    for place in range(132, 132 + 12 * number, 12):
        name, start, size = struct.unpack(">4sII", tagged[place : place + 12])
        grown += struct.pack(">4sII", name, start + 12, size)
    grown += struct.pack(">4sII", b"cicp", len(tagged) + 12, 12) + tagged[132 + 12 * number :]
    grown += b"cicp\0\0\0\0" + bytes([9, 16, 0, 1])
    image = Image.new("RGB", (1, 1), (148, 148, 148))
    image.info["icc_profile"] = bytes(grown)
    assert to_rgb(image).getpixel((0, 0)) == to_srgb(image, cicp_profile((9, 16))).getpixel((0, 0)) == (246, 246, 246)


@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
def test_codes_of_avif_and_heic(decoder, plain, encode_image, kind):
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    light = np.clip(linear(scene()) @ TO_BT2020.T, 0, 1)
    image = Image.fromarray((hlg(light) * 255).round().astype(np.uint8))
    encoded = encode_image(image, kind, **OPTIONS[kind])
    assert heif_cicp(encoded) == (1, 13)
    marked = encoded.replace(b"nclx\0\1\0\x0d", b"nclx\0\x09\0\x12")
    assert heif_cicp(marked) == (9, 18)
    assert difference(decoder.image(marked, SHOWN), plain(scene())) <= 3.5
    assert np.array_equal(decoder.image(marked, RAW), decoder.image(encoded, RAW))


@pytest.mark.parametrize("order", ["big", "little"])
def test_an_exif_of_adobe_rgb_counts_where_there_is_no_profile(decoder, plain, encode_image, order):
    exif = Image.Exif()
    exif.endian = "<" if order == "little" else ">"
    exif.get_ifd(0x8769)[0xA001] = 0xFFFF
    exif.get_ifd(0x8769)[0xA005] = {1: "R03"}
    adobe = rgb_profile(
        ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457)), 2.19921875
    )
    image = in_profile(scene(), adobe)
    encoded = encode_image(image, "JPEG", exif=exif, quality=100, subsampling=0)
    assert profile_of(Image.open(io.BytesIO(encoded))) == adobe_rgb_profile()
    assert difference(decoder.image(encoded, SHOWN), plain(scene())) <= 2
    both = encode_image(
        scene(),
        "JPEG",
        exif=exif,
        icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
        quality=100,
        subsampling=0,
    )
    assert np.array_equal(decoder.image(both, SHOWN), decoder.image(both, RAW))


def tiff(pixels, photometric, bits):
    """Uncompressed TIFF, little-endian, written without Pillow."""
    data = pixels.tobytes()
    samples = pixels.shape[2] if pixels.ndim == 3 else 1
    place = 8 + len(data)
    entries = [(256, 4, 1, pixels.shape[1]), (257, 4, 1, pixels.shape[0]), (258, 3, samples, bits), (259, 3, 1, 1)]
    entries += [(262, 3, 1, photometric), (273, 4, 1, 8), (277, 3, 1, samples), (278, 4, 1, pixels.shape[0])]
    entries += [(279, 4, 1, len(data))]
    if samples > 1:
        entries[2] = (258, 3, samples, place + 2 + 12 * len(entries) + 4)
    ifd = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", place) + data + ifd + struct.pack("<H", bits) * samples


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_tiff_whose_white_is_zero(decoder, plain, dtype):
    grey = np.asarray(scene().convert("L")).astype(dtype) * (257 if dtype == np.uint16 else 1)
    turned, upright = (tiff(each, kind, 8 * grey.itemsize) for each, kind in ((~grey, 0), (grey, 1)))
    assert difference(decoder.image(upright, SHOWN), plain(scene().convert("L"))) == 0
    assert np.array_equal(decoder.image(turned, SHOWN), decoder.image(upright, SHOWN))


def test_a_tiff_in_lab(decoder, plain):
    """CIE L*a*b* of D50, computed by the formulas of its definition."""
    xyz = linear(scene()) @ np.array(SRGB) / [0.9642, 1.0, 0.8249]
    root = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    lab = np.stack(
        [116 * root[..., 1] - 16, 500 * (root[..., 0] - root[..., 1]), 200 * (root[..., 1] - root[..., 2])], -1
    )
    stored = np.concatenate(
        [(lab[..., :1] * 2.55).round().astype(np.uint8), lab[..., 1:].round().astype(np.int8).view(np.uint8)], -1
    )
    assert difference(decoder.image(tiff(stored, 8, 8), SHOWN), plain(scene())) <= 2


@pytest.mark.parametrize("kind", ["MBED", "calibrated"])
def test_bmp_of_later_versions(decoder, plain, kind):
    profile = PROFILES["display_p3"] if kind == "MBED" else None
    image = in_profile(scene(), PROFILES["display_p3"] if kind == "MBED" else rgb_profile(DISPLAY_P3, 1.8))
    pixels = np.asarray(image)[::-1, :, ::-1].tobytes()
    head = struct.pack("<IiiHHIIiiII", 124, *image.size, 1, 24, 0, len(pixels), 0, 0, 0, 0) + bytes(16)
    if profile is not None:
        head += b"DEBM" + bytes(48)
        head += struct.pack("<I", 4) + struct.pack("<III", 124 + len(pixels), len(profile), 0)
    else:
        points = np.array([[0.48657, 0.22897, 0.0], [0.26567, 0.69174, 0.04511], [0.19822, 0.07929, 1.04394]])
        head += bytes(4) + struct.pack("<9i", *(int(value * 2**30) for value in points.ravel()))
        head += struct.pack("<3I", *[int(1.8 * 65536)] * 3) + bytes(16)
    assert len(head) == 124
    size = 138 + len(pixels) + len(profile or b"")
    encoded = b"BM" + struct.pack("<IHHI", size, 0, 0, 138) + head + pixels + (profile or b"")
    assert difference(decoder.image(encoded, SHOWN), plain(scene())) <= 2.5
    assert difference(decoder.image(encoded, RAW), plain(scene())) > 4


VIDEOS = [
    ("bt2020", "smpte2084", "bt2020nc", pq, 5),
    ("bt2020", "arib-std-b67", "bt2020nc", hlg, 4),
    ("bt2020", "bt2020-10", "bt2020nc", encoded_srgb, 3),
]


@pytest.mark.parametrize(("primaries", "transfer", "matrix", "signal", "limit"), VIDEOS)
def test_hdr_and_wide_videos_look_as_their_still(decoder, plain, tmp_path, primaries, transfer, matrix, signal, limit):
    rgb = signal(np.clip(linear(scene()) @ TO_BT2020.T, 0, 1))
    write_video(tmp_path / "clip.mp4", rgb, primaries, transfer, matrix)
    shown, raw = (decoder.frame_at(tmp_path / "clip.mp4", rule, 0.4) for rule in (SHOWN, RAW))
    assert difference(shown, plain(scene())) <= limit
    assert difference(raw, plain(scene())) > 2 * difference(shown, plain(scene()))


def test_p3_of_a_video(decoder, plain, tmp_path):
    rgb = np.asarray(in_profile(scene(), rgb_profile(DISPLAY_P3, 2.2)), float) / 255
    write_video(tmp_path / "clip.mp4", rgb, "smpte432", "iec61966-2-1", "bt709")
    assert difference(decoder.frame_at(tmp_path / "clip.mp4", SHOWN, 0.4), plain(scene())) <= 3


@pytest.mark.parametrize("full_range", [False, True])
@pytest.mark.parametrize("matrix", ["bt709", "smpte170m"])
@pytest.mark.parametrize("transfer", ["bt709", "iec61966-2-1", "undef"])
def test_ordinary_videos_are_read_as_ever(decoder, plain, tmp_path, transfer, matrix, full_range):
    rgb = np.asarray(scene(), float) / 255
    write_video(tmp_path / "clip.mp4", rgb, "bt709", transfer, matrix, depth=8, full_range=full_range)
    shown, raw = (decoder.frame_at(tmp_path / "clip.mp4", rule, 0.4) for rule in (SHOWN, RAW))
    assert np.array_equal(shown, raw) and difference(shown, plain(scene())) <= 2.5


def test_interlaced_frames_show_one_moment(decoder, tmp_path):
    """A bar that moves by a third of the picture from one field to the next; woven, its sides are combs."""
    fields = [np.zeros((64, 96, 3), np.uint8) for _ in range(2)]
    fields[0][:, 10:30], fields[1][:, 50:70] = 255, 255
    woven = fields[0].copy()
    woven[1::2] = fields[1][1::2]
    for name, flags in (("interlaced", "tff=1"), ("progressive", "qp=1")):
        write_frames(tmp_path / f"{name}.mp4", woven, {"x264-params": flags, "crf": "4"})
    whole = ResizeSpec(96, "fit")
    interlaced, progressive = (
        decoder.frame_at(tmp_path / f"{name}.mp4", whole, 0.4)[8:-8, :, 0].astype(int)
        for name in ("interlaced", "progressive")
    )
    assert np.abs(np.diff(progressive, axis=0)).mean() > 60
    assert np.abs(np.diff(interlaced, axis=0)).mean() < 10
    dark, bright = sorted((interlaced[:, 15:25].mean(), interlaced[:, 55:65].mean()))
    assert dark < 50 and bright > 200
    raw = decoder.frame_at(tmp_path / "interlaced.mp4", ResizeSpec(96, "fit", colour="raw"), 0.4)
    assert np.abs(np.diff(raw[8:-8, :, 0].astype(int), axis=0)).mean() > 60


def broken_profiles():
    p3 = PROFILES["swapped"]
    rng = np.random.default_rng(3)
    yield "empty", b""
    yield "rubbish", bytes(rng.integers(0, 256, 3000, dtype=np.uint8))
    yield "cut off", p3[:200]
    yield "only the head", p3[:132]
    yield "no colours", rgb_profile(((0.1, 0.1, 0.1),) * 3, 2.2)[:-60]
    yield "huge", p3 + bytes(MAX_PROFILE_BYTES)
    yield "grey in a colour picture", grey_profile(1.0)
    yield "inks in a colour picture", swapped_inks_profile(3)
    yield "a link of devices", p3[:12] + b"link" + p3[16:]
    yield (
        "tags beyond the end",
        p3[:132]
        + b"".join(
            p3[place : place + 4] + b"\x7f\xff\xff\xf0" + p3[place + 8 : place + 12]
            for place in range(132, 132 + 108, 12)
        ),
    )


@pytest.mark.parametrize(
    ("name", "profile"), list(broken_profiles()), ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
def test_a_broken_profile_is_ignored(decoder, encode_image, kind, name, profile):
    encoded, unmarked = encode_image(scene(), kind, icc_profile=profile), encode_image(scene(), kind)
    assert np.array_equal(decoder.image(encoded, SHOWN), decoder.image(unmarked, SHOWN))


def test_a_profile_of_colours_in_a_grey_picture_is_ignored(decoder, encode_image):
    grey = scene().convert("L")
    encoded = encode_image(grey, "PNG", icc_profile=PROFILES["linear"])
    assert np.array_equal(decoder.image(encoded, SHOWN), decoder.image(encoded, RAW))


@pytest.mark.parametrize(
    "chunks",
    [
        [gama(0.000001)],
        [gama(900.0)],
        [gama(1.0), chrm(*[0.0] * 8)],
        [gama(1.0), chrm(*[0.3] * 8)],
        [(b"cICP", b"\x09")],
        [cicp(250, 250)],
        [(b"tEXt", b"cicp\0not codes"), (b"tEXt", b"icc_profile\0none"), (b"tEXt", b"gamma\0one")],
    ],
)
def test_statements_that_cannot_be_are_ignored(decoder, plain, chunks):
    found = decoder.image(png(np.asarray(scene()), *chunks), SHOWN)
    assert np.array_equal(found, plain(scene()))


def test_profiles_turned_at_random_never_cost_a_picture(decoder, encode_image):
    rng = np.random.default_rng(8)
    for _ in range(40):
        profile = bytearray(PROFILES["wide"] if rng.random() < 0.7 else swapped_inks_profile(2))
        for place in rng.integers(0, len(profile), 6):
            profile[place] = rng.integers(256)
        assert decoder.image(encode_image(scene(), "JPEG", icc_profile=bytes(profile)), SHOWN).shape == (SIZE, SIZE, 3)


def test_parsers_take_anything():
    rng = np.random.default_rng(5)
    heads = [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe2", b"\0\0\0\x18ftypavif\0\0\0\0avifmif1\0\0\0\x40meta"]
    for _ in range(500):
        encoded = heads[rng.integers(3)] + bytes(rng.integers(0, 256, rng.integers(0, 300), dtype=np.uint8))
        for parse in (png_cicp, heif_cicp):
            parse(encoded)


def test_srgb_profiles_change_nothing(decoder, encode_image):
    for profile in (ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(), gamma_profile(2.2)):
        assert not changes_colours(profile)
        encoded = encode_image(scene(), "PNG", icc_profile=profile)
        assert np.array_equal(decoder.image(encoded, SHOWN), decoder.image(encoded, RAW))
    assert changes_colours(PROFILES["display_p3"]) and not changes_colours(None) and not changes_colours(b"rubbish")


def test_a_resize_comes_first_where_averages_stay_averages(decoder, plain, encode_image):
    """Of profiles as phones have them: their colours cost a fraction, and are within a level of the picture's own."""
    further = {"adobe": adobe_rgb_profile(), "pq": cicp_profile((9, 16))}
    later = {name: may_follow_resize(scene(), profile) for name, profile in (PROFILES | further).items()}
    assert later["display_p3"] and later["adobe"]
    assert not later["linear"] and not later["wide"] and not later["pq"]
    half = ResizeSpec(SIZE // 2, "crop", "bicubic", resampler="torchvision", colour="srgb")
    profile = PROFILES["display_p3"]
    for kind, options in (("JPEG", FULL_COLOURS), ("PNG", {})):
        encoded = encode_image(in_profile(scene(), profile), kind, icc_profile=profile, **options)
        whole = to_srgb(Image.open(io.BytesIO(encoded)), profile)
        whole.info.clear()
        assert 0 < difference(decoder.image(encoded, half), decoder.image(encode_image(whole, "PNG"), half)) <= 1


def test_a_picture_that_says_nothing_costs_microseconds(encode_image):
    image = Image.open(io.BytesIO(encode_image(scene(), "JPEG")))
    image.load()
    best = {}
    for colour in ("raw", "srgb"):
        times = []
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(100):
                to_rgb(image, colour)
            times.append(time.perf_counter() - began)
        best[colour] = min(times) / 100
    assert best["srgb"] - best["raw"] < 20e-6
