"""Contact sheet: images in a grid, a few short lines under each. Drawn from pixels; decodes no file."""

from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from embedder.media.fonts import Fonts
from embedder.media.lettering import Lettering, Line
from embedder.media.sniff import SHEET_MARK

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

COLUMNS = 5
CELL_PX = 160
MARGIN_PX = 16
FONT_PX = 12
TITLE_PX = 20
MAX_LINES = 2  # of one text; the rest of it is an ellipsis
INK, PALE, PAPER, MISSING = (20, 20, 20), (110, 110, 110), (255, 255, 255), (235, 235, 235)


class Cell(NamedTuple):
    """One image, uint8 (H, W, 3) or None where it could not be read, and the texts under it."""

    pixels: Pixels | None
    lines: list[str]


def save_sheet(path: Path, cells: list[Cell], title: str = "", fonts: Fonts | None = None) -> None:
    """Draw the cells and write the sheet as PNG, making its folder where needed.

    Args:
        path: the file.
        cells: in reading order, five per row.
        title: line above the grid; empty for none.
        fonts: for all texts; default: those of this machine.
    """
    small, large = Lettering(FONT_PX, fonts), Lettering(TITLE_PX, fonts)
    texts = [[small.lines(text, CELL_PX, MAX_LINES) for text in cell.lines] for cell in cells]
    num_lines = max((sum(map(len, of_cell)) for of_cell in texts), default=0)
    step_x, step_y = CELL_PX + MARGIN_PX, CELL_PX + num_lines * small.line_px + MARGIN_PX
    columns, rows = max(1, min(COLUMNS, len(cells))), -(-len(cells) // COLUMNS)
    width = MARGIN_PX + columns * step_x
    head = large.lines(title, width - 2 * MARGIN_PX, MAX_LINES)
    top = MARGIN_PX + (len(head) * large.line_px + MARGIN_PX // 2 if head else 0)
    sheet = Image.new("RGB", (width, top + rows * step_y), PAPER)
    for number, line in enumerate(head):
        large.draw(sheet, (MARGIN_PX, MARGIN_PX + number * large.line_px), width - 2 * MARGIN_PX, line, INK)
    for number, (cell, of_cell) in enumerate(zip(cells, texts, strict=True)):
        row, column = divmod(number, COLUMNS)
        corner = (MARGIN_PX + column * step_x, top + row * step_y)
        _draw_image(sheet, corner, cell.pixels, small)
        _draw_texts(sheet, (corner[0], corner[1] + CELL_PX), of_cell, small)
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = PngInfo()
    mark.add_text("Software", SHEET_MARK)  # so that a sheet saved among the images is not taken for one of them
    sheet.save(path, "PNG", pnginfo=mark)


def _draw_image(sheet: Image.Image, corner: tuple[int, int], pixels: Pixels | None, small: Lettering) -> None:
    if pixels is not None:
        sheet.paste(Image.fromarray(pixels).resize((CELL_PX, CELL_PX)), corner)
        return
    x, y = corner
    ImageDraw.Draw(sheet).rectangle((x, y, x + CELL_PX - 1, y + CELL_PX - 1), fill=MISSING)
    (line,) = small.lines("not readable", CELL_PX, 1)
    indent = round(CELL_PX - sum(letter.width_px for letter in line.letters)) // 2
    small.draw(sheet, (x + indent, y + (CELL_PX - small.line_px) // 2), CELL_PX - indent, line, PALE)


def _draw_texts(sheet: Image.Image, corner: tuple[int, int], texts: list[list[Line]], small: Lettering) -> None:
    """Draw texts below one another, the first in ink."""
    x, y = corner
    for number, lines in enumerate(texts):
        for line in lines:
            small.draw(sheet, (x, y), CELL_PX, line, INK if number == 0 else PALE)
            y += small.line_px


def encode_png(pixels: Pixels) -> bytes:
    """One image as a PNG file."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def encode_webp(pixels: Pixels, quality: int) -> bytes:
    """One image as a WebP file; quality from 0 to 100."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", quality=quality, method=3)
    return file.getvalue()
