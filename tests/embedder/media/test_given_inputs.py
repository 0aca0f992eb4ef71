"""Images handed over by programs: the pixels that the decoder sees are those that were given, whatever holds them."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from embedder.errors import ArgumentTypeError, ConfigError
from embedder.media.given_inputs import file_or_content, image_list, text_list
from embedder.media.images import decode_image
from embedder.media.resize import ResizeSpec

SIDE = 12
PIXELS = np.random.default_rng(3).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
RESIZE = ResizeSpec(SIDE)


def seen(content: bytes) -> np.ndarray:
    """Pixels that the decoder makes of a file's content."""
    return np.frombuffer(decode_image(content, RESIZE, 10**6).data, np.uint8).reshape(SIDE, SIDE, 3)


def grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[:, :, None], 3, axis=2)


IMAGE, SHADES = Image.fromarray(PIXELS), Image.fromarray(PIXELS[:, :, 1])
WIDE = Image.fromarray(PIXELS[:, :, 1].astype(np.uint16) * 257)
OPAQUE = np.full((SIDE, SIDE), 255, np.uint8)
COLOURED = [IMAGE.convert(mode) for mode in ("1", "L", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")]
COLOURED += [IMAGE.convert("RGBA").convert("RGBa"), IMAGE.convert("P").convert("PA")]
GREY = [*(SHADES.convert(mode) for mode in ("I", "F", "LA")), SHADES.convert("LA").convert("La"), WIDE]
GREY.append(Image.frombytes("I;16B", WIDE.size, np.asarray(WIDE).astype(">u2").tobytes()))
SEEN = {
    "RGB": (PIXELS, PIXELS),
    "HW": (PIXELS[:, :, 0], grey(PIXELS[:, :, 0])),
    "HW1": (PIXELS[:, :, :1], grey(PIXELS[:, :, 0])),
    "not in one piece of memory": (PIXELS[::-1, :, ::-1], PIXELS[::-1, :, ::-1]),
    "opaque": (np.dstack([PIXELS, OPAQUE]), PIXELS),
    "transparent": (np.dstack([PIXELS, 0 * OPAQUE]), np.full_like(PIXELS, 255)),
}
SEEN |= {f"Pillow's {each.mode}": (each, np.asarray(each.convert("RGB"))) for each in COLOURED}
SEEN |= {f"Pillow's {each.mode} of a grey": (each, grey(PIXELS[:, :, 1])) for each in GREY}  # in its whole range


@pytest.mark.parametrize("name", SEEN)
def test_what_is_given_is_seen_as_it_is(name):
    given, expected = SEEN[name]
    assert np.array_equal(seen(file_or_content(given)), expected)


def test_a_tensor_of_another_library_is_an_array():
    torch = pytest.importorskip("torch")
    assert np.array_equal(seen(file_or_content(torch.from_numpy(PIXELS))), PIXELS)


ARRAYS = {
    "floats": (PIXELS / np.float32(255), "found float32 of shape (12, 12, 3)", "(255 * array).round().astype('uint8')"),
    "integers": (PIXELS.astype(np.int64), "found int64", "uint8 [0, 255]"),
    "bits": (PIXELS > 9, "found bool", "uint8 [0, 255]"),
    "channels first": (PIXELS.transpose(2, 0, 1), "shape (3, 12, 12)", "array.transpose(1, 2, 0)"),
    "two channels": (PIXELS[:, :, :2], "shape (12, 12, 2)", "(H, W, 4) with transparency"),
    "a vector": (PIXELS[0, 0], "shape (3,)", "(H, W) in grey"),
    "several": (PIXELS[None], "shape (1, 12, 12, 3)", "(H, W, 3)"),
    "nothing": (PIXELS[:0], "shape (0, 12, 3)", "(H, W, 3)"),
    "a number": (np.uint8(3), "shape ()", "(H, W, 3)"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_breaks_the_rule_is_told_with_the_cure(name):
    array, found, cure = ARRAYS[name]
    with pytest.raises(ConfigError, match="^query: found [^\n]*$") as caught:
        file_or_content(array, "query")
    assert found in str(caught.value)
    assert cure in str(caught.value)


SRGB, LAB = (ImageCms.createProfile(name) for name in ("sRGB", "LAB"))


def test_an_image_of_colours_of_lab_is_seen_nearly_as_it_is():
    image = ImageCms.profileToProfile(IMAGE, SRGB, LAB, outputMode="LAB")
    assert np.abs(seen(file_or_content(image)).astype(int) - PIXELS).mean() < 5, "Pillow's own LAB is a rough one"


@pytest.mark.parametrize(("form", "mode"), [("PNG", "RGB"), ("TIFF", "CMYK")])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_an_opened_file_is_seen_as_the_file_itself(form, mode, orientation):
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(PIXELS).convert(mode).save(file, form, exif=exif)
    with Image.open(io.BytesIO(file.getvalue())) as opened:
        assert np.array_equal(seen(file_or_content(opened)), seen(file.getvalue()))


def test_transparent_colours_of_a_palette_are_seen_as_in_the_file():
    file = io.BytesIO()
    Image.fromarray(PIXELS).quantize(8).save(file, "PNG", transparency=2)
    with Image.open(io.BytesIO(file.getvalue())) as opened:
        assert opened.mode == "P"
        assert np.array_equal(seen(file_or_content(opened)), seen(file.getvalue()))


def test_an_image_that_pillow_can_not_load_is_told():
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)).save(file, "PNG")
    with (
        Image.open(io.BytesIO(file.getvalue()[:2000])) as cut,
        pytest.raises(ConfigError, match="^image: Pillow can't"),
    ):
        file_or_content(cut)
    with pytest.raises(ConfigError, match="0 x 4 pixels"):
        file_or_content(Image.new("RGB", (0, 4)))


def test_paths_and_contents_stay_what_they_are(tmp_path):
    assert file_or_content("a.png").name == "a.png"
    assert file_or_content(tmp_path) is not None
    for content in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        assert file_or_content(content) == b"abc"


@pytest.mark.parametrize("value", [5, 1.5, object(), ["a.png"], {"image": b""}, None])
def test_anything_else_is_told_with_what_is_taken(value):
    with pytest.raises(ArgumentTypeError, match=f"found {type(value).__name__}; give a path, the bytes of a file"):
        file_or_content(value)
    with pytest.raises(TypeError):
        file_or_content(value)


def test_lists_are_lists():
    assert text_list(("a", "b")) == ["a", "b"]
    assert text_list(iter(["a"])) == ["a"]
    assert [type(each).__name__ for each in image_list([b"x", PIXELS])] == ["bytes", "bytes"]
    assert len(image_list(PIXELS[None])) == 1
    for texts in ("a red car", 5, None, ["a", None], [b"a"]):
        with pytest.raises(ArgumentTypeError, match="^texts: found"):
            text_list(texts)
    for images in ("a.png", b"x", PIXELS, PIXELS[0], 5, Image.fromarray(PIXELS)):
        with pytest.raises(ArgumentTypeError, match="^images: found"):
            image_list(images)
    with pytest.raises(ArgumentTypeError, match=r"^images\[1\]: found int"):
        image_list([b"x", 5])


def test_pillow_is_not_imported_for_what_needs_none_of_it():
    program = (
        "import sys; from embedder.retrieval.queries import read_queries; import numpy as np;"
        "read_queries('a', None); read_queries(np.ones(3), None); read_queries(None, [b'x', 'a.png']);"
        "print('PIL' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("address", ["https://example.org/x.png", Path("https://example.org/x.png"), "s3://a/x.png"])
def test_an_address_is_refused_as_one(address):
    with pytest.raises(ConfigError, match="found an address, which isn't fetched"):
        file_or_content(address)
    assert file_or_content("C:/x.png") == Path("C:/x.png")


def test_a_file_in_a_folder_that_is_named_as_a_scheme_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ab:").mkdir()
    (tmp_path / "ab:/x.png").touch()
    assert file_or_content("ab:/x.png") == Path("ab:/x.png")
