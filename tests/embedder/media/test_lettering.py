"""Lettering: letters of every script are drawn as themselves, what no font has as its code point, never a box."""

import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image, ImageDraw, ImageFont, features

from embedder.media import fonts as fonts_module
from embedder.media import lettering as lettering_module
from embedder.media.bidi import base_direction, levels, visual_order
from embedder.media.fonts import Fonts
from embedder.media.lettering import Lettering, clusters

SIZE_PX, WIDTH_PX = 12, 160
SCRIPTS = {
    "Latin": "Åland Größe ñandú Łódź",
    "Cyrillic": "Привет, мир",
    "Greek": "Ελληνικά",
    "Hebrew": "שלום",
    "Arabic": "مرحبا",
    "Armenian": "Հայաստան",
    "Georgian": "საქართველო",
}


@pytest.fixture(scope="module")
def shipped():
    """Fonts that are the same on every machine."""
    return Fonts(system=False)


def drawn(text, fonts, width_px=WIDTH_PX, max_lines=1):
    """The first line of a text; uint8 (H, W), black on white."""
    lettering = Lettering(SIZE_PX, fonts)
    image = Image.new("RGB", (width_px, max_lines * lettering.line_px), "white")
    for number, line in enumerate(lettering.lines(text, width_px, max_lines)):
        lettering.draw(image, (0, number * lettering.line_px), width_px, line, (0, 0, 0))
    return np.asarray(image.convert("L"))


def read(text, fonts, width_px=WIDTH_PX, max_lines=1):
    """The lines that a text is broken into, as they are read."""
    lines = Lettering(SIZE_PX, fonts).lines(text, width_px, max_lines)
    return ["".join(letter.text for letter in line.letters) for line in lines]


def boxed(character, fonts):
    """The same font's image of a character that it does not have."""
    font = fonts.plain.at(SIZE_PX)
    mask = Image.new("L", (40, 24), 255)
    ImageDraw.Draw(mask).text((4, 4), character, 0, font)
    return np.asarray(mask)


def make_font(path, characters):
    """A font whose glyphs are squares of different sizes; the glyph of what it does not have is empty."""
    names = [f"g{ord(character):X}" for character in characters]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", *names])
    builder.setupCharacterMap({ord(character): name for character, name in zip(characters, names, strict=True)})
    glyphs = {".notdef": TTGlyphPen(None).glyph()}
    for number, name in enumerate(names):
        pen = TTGlyphPen(None)
        side = 400 + 40 * number
        pen.moveTo((50, 0))
        for corner in ((50, side), (50 + side, side), (50 + side, 0)):
            pen.lineTo(corner)
        pen.closePath()
        glyphs[name] = pen.glyph()
    builder.setupGlyf(glyphs)
    builder.setupHorizontalMetrics(dict.fromkeys(glyphs, (1000, 50)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": path.stem, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    path.parent.mkdir(parents=True, exist_ok=True)
    builder.save(path)
    return path


@pytest.fixture
def machine_fonts(tmp_path, monkeypatch):
    """A folder of fonts, and nothing else, as what this machine has."""
    folder = tmp_path / "share" / "fonts"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_letter_of_a_script_is_drawn_as_itself_and_not_as_a_box(script, shipped):
    missing = boxed("\U000f1234", shipped)
    for character in set(SCRIPTS[script]) - {" ", ","}:
        assert shipped.find(character) is shipped.plain, character
        assert not np.array_equal(boxed(character, shipped), missing), character
    different = {drawn(character, shipped).tobytes() for character in set(SCRIPTS[script]) - {" "}}
    assert len(different) == len(set(SCRIPTS[script]) - {" "})


def test_an_umlaut_has_its_dots_composed_or_not(shipped):
    assert not np.array_equal(drawn("Aland", shipped), drawn("Åland", shipped))
    decomposed = unicodedata.normalize("NFD", "Åland Größe")
    assert decomposed != "Åland Größe"
    assert np.array_equal(drawn(decomposed, shipped), drawn("Åland Größe", shipped))


@pytest.mark.parametrize("character", ["\ue123", "\U000f1234", "中", "\U0001f9ff"])
def test_what_no_font_has_is_drawn_by_its_code_point(character, shipped):
    assert shipped.find(character) is None
    (line,) = Lettering(SIZE_PX, shipped).lines(f"a{character}b", WIDTH_PX, 1)
    texts = [text for text, _, _ in Lettering(SIZE_PX, shipped)._runs(line)]
    assert texts == ["a", f"U+{ord(character):04X}", "b"]
    there = drawn(character, shipped)
    assert (there < 200).any(), "digits are to be seen"
    other = drawn("\ue124", shipped)
    assert not np.array_equal(there, other), "another character has other digits, which a box would not show"


def test_a_font_of_the_machine_draws_what_the_shipped_one_lacks(machine_fonts):
    make_font(machine_fonts / "cjk" / "NotoSansTest-Regular.ttf", "中文")
    found = Fonts()
    assert found.find("中").path.endswith("NotoSansTest-Regular.ttf")
    assert found.find("Å") is found.plain, "the shipped font comes first"
    assert found.find("犬") is None
    one, two = drawn("中", found), drawn("文", found)
    assert (one < 100).any()
    assert not np.array_equal(one, two)
    assert not np.array_equal(one, drawn("中", Fonts(system=False)))


def test_plain_fonts_are_taken_before_bold_ones(machine_fonts):
    for name in ("AAA-Bold", "BBB-Italic", "CCC-Regular"):
        make_font(machine_fonts / f"{name}.ttf", "中")
    assert Fonts().find("中").path.endswith("CCC-Regular.ttf")


def test_one_text_mixes_fonts_letter_by_letter(machine_fonts):
    make_font(machine_fonts / "A.ttf", "中")
    make_font(machine_fonts / "B.ttf", "あ")
    (line,) = Lettering(SIZE_PX, Fonts()).lines("x中あ犬y", WIDTH_PX, 1)
    paths = [letter.face.path if letter.face else None for letter in line.letters]
    assert [path and path[-5:] for path in paths] == ["s.ttf", "A.ttf", "B.ttf", None, "s.ttf"]


def test_broken_and_coloured_fonts_are_passed_over(machine_fonts):
    machine_fonts.mkdir(parents=True)
    good = make_font(machine_fonts / "z.ttf", "中")
    data = good.read_bytes()
    (machine_fonts / "a.ttf").write_bytes(b"")
    (machine_fonts / "b.otf").write_bytes(b"no font" * 100)
    (machine_fonts / "c.ttc").write_bytes(data[: len(data) // 2])
    (machine_fonts / "d.ttf").mkdir()
    (machine_fonts / "e.ttf").symlink_to(machine_fonts / "nowhere")
    for seed in range(60):
        rng = np.random.default_rng(seed)
        damaged = np.frombuffer(data, np.uint8).copy()
        damaged[rng.integers(0, len(damaged), 20)] = rng.integers(0, 256, 20)
        (machine_fonts / f"m{seed:02}.ttf").write_bytes(damaged.tobytes())
    colour = make_font(machine_fonts / "color.ttf", "中🧿")
    from fontTools.ttLib import TTFont, newTable

    with TTFont(colour) as font:
        font["SVG "] = newTable("SVG ")
        font["SVG "].docList = []
        font.save(machine_fonts / "color.ttf")
    found = Fonts()
    assert found.find("🧿") is None
    assert found.find("中") is not None


@pytest.mark.medium
def test_a_font_of_boxes_for_everything_is_passed_over(machine_fonts):
    boxes = Path(Fonts(system=False).plain.path).parent / "LastResortHE-Regular.ttf"
    if not boxes.exists():
        pytest.skip("this matplotlib comes without such a font")
    machine_fonts.mkdir(parents=True)
    shutil.copy(boxes, machine_fonts)
    assert Fonts().find("中") is None


def test_only_so_many_fonts_are_read(machine_fonts, monkeypatch):
    monkeypatch.setattr(fonts_module, "MAX_FILES", 3)
    for number in range(5):
        make_font(machine_fonts / f"{number}.ttf", chr(0x4E00 + number))
    found = Fonts()
    assert [found.find(chr(0x4E00 + number)) is not None for number in range(5)] == [True, True, True, False, False]


def test_control_characters_are_written_and_never_drawn(shipped):
    assert read("a\x1b[31m\n\u202eb", shipped) == [r"a\x1b[31m\n\u202eb"]
    assert np.array_equal(drawn("a\nb", shipped), drawn(r"a\nb", shipped))


def test_a_long_text_is_wrapped_between_words_and_ends_in_an_ellipsis(shipped):
    first, second = read("several words that are too long for one line of a tile, or two", shipped, max_lines=2)
    assert first.endswith(" ")
    assert "several words that are too long for one line".startswith(first + second[:4])
    assert second.endswith("…")
    assert read("short", shipped, max_lines=2) == ["short"]
    assert read("", shipped, max_lines=2) == []


@pytest.mark.medium
def test_ten_thousand_characters_take_two_lines_whatever_they_are(shipped):
    for unit in ("x", "word ", "中", "שלום ", "é", "\x1b", "Z\u0351", "👩‍❤️‍👨", "\u0351", "\u200d", "\udcff"):
        lines = read(unit * 10_000, shipped, max_lines=2)
        assert len(lines) == 2 or unit == "\u0351", unit
        assert lines[-1].endswith("…"), unit


def test_nothing_is_drawn_outside_its_box(shipped):
    lettering = Lettering(SIZE_PX, shipped)
    for text in ("W" * 100, "Z" + "\u0351\u0316" * 60, "שלום " * 40, "U\ue123" * 40):
        image = Image.new("RGB", (WIDTH_PX + 80, 80), "white")
        (line, *_) = lettering.lines(text, WIDTH_PX, 1)
        lettering.draw(image, (40, 30), WIDTH_PX, line, (0, 0, 0))
        ink = np.argwhere(np.asarray(image.convert("L")) < 255)
        assert len(ink)
        (top, left), (bottom, right) = ink.min(axis=0), ink.max(axis=0)
        assert top >= 30
        assert bottom < 30 + lettering.line_px
        assert left >= 40
        assert right < 40 + WIDTH_PX


def order(text):
    """The letters of a line from left to right."""
    parts = clusters(text)
    return "".join(parts[place] for place in visual_order(levels(parts, base_direction(text))))


@pytest.mark.parametrize(
    ("text", "left_to_right"),
    [
        ("abc", "abc"),
        ("אבג", "גבא"),
        ("car אבג ד.", "car ד גבא."),
        ("אבג car", "car גבא"),
        ("אבג 123", "123 גבא"),
        ("אבג 1,5% ד", "ד 1,5% גבא"),
        ("x אב 12 גד y", "x דג 12 בא y"),
        ("אב (cd) ה", "ה )cd( בא"),  # which are mirrored when they are drawn
        ("1 2", "1 2"),
        ("", ""),
    ],
)
def test_right_to_left_text_stands_in_its_order(text, left_to_right):
    assert order(text) == left_to_right


@pytest.mark.skipif(not features.check("raqm"), reason="Pillow can't shape text on this machine")
def test_our_order_is_that_of_the_library_that_shapes(shipped):
    font = ImageFont.truetype(shipped.plain.path, SIZE_PX)
    for text in ("שלום עולם", "car שלום bus", "שלום 42 עולם", "a (שלום) b"):
        expected = Image.new("L", (WIDTH_PX, 18))
        direction = "rtl" if base_direction(text) == "R" else "ltr"
        ImageDraw.Draw(expected).text((0, 14), text, 255, font, anchor="ls", direction=direction)
        found = Image.fromarray(255 - drawn(text, shipped))
        columns = [np.flatnonzero(np.asarray(each).max(axis=0)) for each in (expected, found)]
        starts = [each[0] for each in columns]
        width = columns[0][-1] - starts[0] + 1
        one, two = (
            np.asarray(each)[:, start : start + width].astype(int)
            for each, start in zip((expected, found), starts, strict=True)
        )
        assert np.abs(one - two).mean() < 20, text


def test_right_to_left_text_stands_in_its_order_where_pillow_cannot_shape(shipped, monkeypatch):
    monkeypatch.setattr(lettering_module.features, "check", lambda name: False)
    lettering = Lettering(SIZE_PX, shipped)
    (line,) = lettering.lines("אב (ג) car", WIDTH_PX, 1)
    texts = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, where, text, *_, **__: texts.append(text))
    lettering.draw(Image.new("RGB", (WIDTH_PX, 20)), (0, 0), WIDTH_PX, line, (0, 0, 0))
    assert texts == ["car", " (ג) בא"], "from left to right"


def test_text_that_runs_from_right_to_left_begins_on_the_right(shipped):
    ink = np.flatnonzero(drawn("שלום", shipped).min(axis=0) < 200)
    assert ink[0] > WIDTH_PX // 2
    assert ink[-1] >= WIDTH_PX - 3


def test_a_letter_keeps_its_marks_and_an_emoji_its_family():
    assert clusters("e\u0301a") == ["e\u0301", "a"]
    assert clusters("👩‍❤️‍👨!") == ["👩‍❤️‍👨", "!"]
    assert clusters("🧑🏽x") == ["🧑🏽", "x"]


def test_an_emoji_that_a_font_has_is_drawn_and_its_selector_leaves_no_box(shipped):
    assert np.array_equal(drawn("❤\ufe0f", shipped), drawn("❤", shipped))
    assert (drawn("😀", shipped) < 200).any()
