"""Contact sheets: a block for each query, in the format that the suffix names, whole or not at all."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from embedder.errors import ConfigError
from embedder.media import contact_sheet
from embedder.media.contact_sheet import CELL_PX, FRAME_PX, MARGIN_PX, Block, Cell, save_sheet
from embedder.media.fonts import Fonts
from embedder.media.lettering import Lettering
from embedder.media.sniff import is_own_sheet, sniff

SIZE_PX = 12


@pytest.fixture(scope="module")
def shipped():
    """Fonts that are the same on every machine."""
    return Fonts(system=False)


def grey(level, lines=()):
    return Cell(np.full((160, 160, 3), level, np.uint8), list(lines))


def sheet(path, lines, title="", **options):
    return drawn_sheet(path, [Block([grey(90, lines), Cell(None, lines)], title)], **options)


def drawn_sheet(path, blocks, **options):
    save_sheet(path, blocks, **options)
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_a_sheet_is_the_same_in_every_process(tmp_path, shipped):
    lines = ["0.5", "flag: Åland 中文 שלום \x1b", "a.png"]
    here = sheet(tmp_path / "a.png", lines, title="Größe", fonts=shipped)
    code = (
        "import sys, numpy as np; from pathlib import Path; from embedder.media.fonts import Fonts\n"
        "from embedder.media.contact_sheet import Block, Cell, save_sheet\n"
        f"cells = [Cell(np.full((160, 160, 3), 90, np.uint8), {lines!r}), Cell(None, {lines!r})]\n"
        "save_sheet(Path(sys.argv[1]), [Block(cells, 'Größe')], Fonts(system=False))\n"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b.png")], check=True, timeout=60)
    with Image.open(tmp_path / "b.png") as image:
        assert np.array_equal(here, np.asarray(image))


def test_rows_of_a_sheet_are_as_high_as_their_longest_text(tmp_path, shipped):
    short = sheet(tmp_path / "a.png", ["0.5", "a"], fonts=shipped)
    long = sheet(tmp_path / "b.png", ["0.5", "many words " * 100], fonts=shipped)
    assert long.shape[0] - short.shape[0] == Lettering(SIZE_PX, shipped).line_px
    assert (long[MARGIN_PX : MARGIN_PX + CELL_PX, MARGIN_PX : MARGIN_PX + CELL_PX] == 90).all(), "the image is whole"
    assert (long[:, 2 * MARGIN_PX + CELL_PX - 16 : 2 * MARGIN_PX + CELL_PX] == 255).all(), "tiles are apart"


def test_a_sheet_without_cells_or_title_is_drawn(tmp_path):
    save_sheet(tmp_path / "a.png", [])
    save_sheet(tmp_path / "b.png", [Block([], "nothing found")])
    save_sheet(tmp_path / "c.png", [Block([Cell(None, [])])])


def test_several_queries_stand_below_one_another_each_with_its_title(tmp_path, shipped):
    parts = [Block([grey(90)] * 7, "red"), Block([grey(150)] * 2, "blue")]
    both = drawn_sheet(tmp_path / "a.png", parts, fonts=shipped)
    alone = [drawn_sheet(tmp_path / f"{number}.png", [part], fonts=shipped) for number, part in enumerate(parts)]
    first, second = (each.shape[0] - MARGIN_PX for each in alone)
    assert both.shape == (first + second + MARGIN_PX, alone[0].shape[1], 3)
    assert np.array_equal(both[:first], alone[0][:first])
    assert np.array_equal(both[first : first + second, : alone[1].shape[1]], alone[1][:second])


def test_the_image_of_the_query_stands_in_a_frame_before_its_hits(tmp_path, shipped):
    image = drawn_sheet(tmp_path / "a.png", [Block([grey(150)] * 5, query=grey(90, ["query"]))], fonts=shipped)
    first = image[MARGIN_PX : MARGIN_PX + CELL_PX, MARGIN_PX : MARGIN_PX + CELL_PX]
    assert (first == 90).all()
    assert (image[MARGIN_PX + 80, MARGIN_PX - FRAME_PX : MARGIN_PX] == contact_sheet.INK).all()
    beside = MARGIN_PX + CELL_PX + MARGIN_PX
    assert (image[MARGIN_PX : MARGIN_PX + CELL_PX, beside : beside + CELL_PX] == 150).all()
    assert (image[MARGIN_PX + 80, beside - FRAME_PX : beside] == 255).all(), "hits have none"
    assert (image == 150).all(axis=2).sum() == 5 * CELL_PX**2, "six cells in two rows"


def test_a_query_without_hits_says_why(tmp_path, shipped):
    noted = drawn_sheet(tmp_path / "a.png", [Block([], "red", note="none fulfils the condition")], fonts=shipped)
    silent = drawn_sheet(tmp_path / "b.png", [Block([], "red")], fonts=shipped)
    assert noted.shape[0] > silent.shape[0]
    assert (noted[silent.shape[0] - MARGIN_PX :] < 200).any()


@pytest.mark.parametrize(("suffix", "kind"), [(".png", "PNG"), (".jpg", "JPEG"), (".JPEG", "JPEG"), (".webp", "WEBP")])
def test_the_suffix_names_the_format_and_a_sheet_is_known_by_its_content(suffix, kind, tmp_path, shipped):
    path = tmp_path / f"a{suffix}"
    pixels = drawn_sheet(path, [Block([grey(90)] * 3, "red")], fonts=shipped)
    with Image.open(path) as image:
        assert image.format == kind
    head = path.read_bytes()[:4096]
    assert sniff(head) == "image"
    assert is_own_sheet(head), "so that it is no item where it lies among images"
    middle = pixels[-MARGIN_PX - 80, MARGIN_PX + 80]
    assert np.abs(middle.astype(int) - 90).max() <= 2


def test_a_text_about_sheets_is_a_caption():
    assert not is_own_sheet(b"embedder contact sheet of a red car")


def test_a_pdf_has_a_page_for_each_query(tmp_path, shipped):
    path = tmp_path / "a.pdf"
    save_sheet(path, [Block([grey(90)] * 3, "red"), Block([], "blue", note="nothing"), Block([grey(9)], "x")], shipped)
    content = path.read_bytes()
    assert content.startswith(b"%PDF-")
    assert content.count(b"/Type /Page\n") == 3
    assert sniff(content[:4096]) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.gif", "known are .png, .jpg"), ("none/a.png", "there is no folder"), ("a", "it has no suffix")],
)
def test_a_sheet_of_another_format_or_in_no_folder_is_refused(name, message, tmp_path):
    with pytest.raises(ConfigError, match="^[^\n]*$") as caught:
        save_sheet(tmp_path / name, [Block([grey(90)])])
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_sheet_that_a_format_can_not_hold_is_refused_before_it_is_drawn(tmp_path, shipped, monkeypatch):
    high = [Block([Cell(None, [])] * 500)]
    for suffix in ("webp", "pdf", "jpg"):
        monkeypatch.setitem(contact_sheet.MAX_SIDE_PX, {"jpg": "JPEG"}.get(suffix, suffix.upper()), 16_383)
        with pytest.raises(ConfigError, match="would be 896 x 17,616 px; .* a side; write a .png"):
            save_sheet(tmp_path / f"a.{suffix}", high, shipped)
    monkeypatch.setattr(contact_sheet, "MAX_PIXELS", 1_000_000)
    with pytest.raises(ConfigError, match="all of a sheet may have 1,000,000 px; ask for fewer hits"):
        save_sheet(tmp_path / "a.png", high, shipped)
    assert list(tmp_path.iterdir()) == []


def test_an_older_sheet_stays_where_the_new_one_can_not_be_written(tmp_path, shipped, monkeypatch):
    path = tmp_path / "a.png"
    save_sheet(path, [Block([grey(90)])], shipped)
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(contact_sheet, "_write", fail)
    with pytest.raises(ConfigError, match="No space left"):
        save_sheet(path, [Block([grey(9)])], shipped)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
