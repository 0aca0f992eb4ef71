"""A contact sheet: pictures in a grid, a few short lines under each. Drawn from pixels; decodes no file."""

from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from embedder.media.sniff import SHEET_MARK

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

COLUMNS = 5
CELL_PX = 160
MARGIN_PX = 16
LINE_PX = 16
FONT_PX = 12
TITLE_PX = 20
INK, PALE, PAPER, MISSING = (20, 20, 20), (110, 110, 110), (255, 255, 255), (235, 235, 235)


class Cell(NamedTuple):
    """One picture, uint8 (H, W, 3) or None where it could not be read, and the lines under it."""

    pixels: Pixels | None
    lines: list[str]


def save_sheet(path: Path, cells: list[Cell], title: str = "") -> None:
    """Draw the cells and write the sheet as PNG, making its folder where needed."""
    num_lines = max((len(cell.lines) for cell in cells), default=0)
    step_x, step_y = CELL_PX + MARGIN_PX, CELL_PX + num_lines * LINE_PX + MARGIN_PX
    top = MARGIN_PX + (TITLE_PX + MARGIN_PX if title else 0)
    columns, rows = max(1, min(COLUMNS, len(cells))), -(-len(cells) // COLUMNS)
    sheet = Image.new("RGB", (MARGIN_PX + columns * step_x, top + rows * step_y), PAPER)
    draw = ImageDraw.Draw(sheet)
    if title:
        _write(draw, (MARGIN_PX, MARGIN_PX), title, TITLE_PX, sheet.width - 2 * MARGIN_PX, INK)
    for number, cell in enumerate(cells):
        row, column = divmod(number, COLUMNS)
        _draw_cell(sheet, draw, (MARGIN_PX + column * step_x, top + row * step_y), cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = PngInfo()
    mark.add_text("Software", SHEET_MARK)  # so that a sheet saved among the pictures is not taken for one of them
    sheet.save(path, "PNG", pnginfo=mark)


def _draw_cell(sheet: Image.Image, draw: ImageDraw.ImageDraw, corner: tuple[int, int], cell: Cell) -> None:
    x, y = corner
    if cell.pixels is None:
        draw.rectangle((x, y, x + CELL_PX - 1, y + CELL_PX - 1), fill=MISSING)
        draw.text((x + CELL_PX / 2, y + CELL_PX / 2), "not readable", PALE, _font(FONT_PX), anchor="mm")
    else:
        sheet.paste(Image.fromarray(cell.pixels).resize((CELL_PX, CELL_PX)), corner)
    for number, line in enumerate(cell.lines):
        colour = INK if number == 0 else PALE
        _write(draw, (x, y + CELL_PX + number * LINE_PX + 2), line, FONT_PX, CELL_PX, colour)


def _write(
    draw: ImageDraw.ImageDraw, corner: tuple[int, int], text: str, size_px: int, width_px: int, colour: tuple[int, ...]
) -> None:
    """Write one line, cut with an ellipsis where it is too wide."""
    font = _font(size_px)
    text = " ".join(text.split())[:500]
    if draw.textlength(text, font) > width_px:
        while text and draw.textlength(text + "…", font) > width_px:
            text = text[:-1]
        text += "…"
    draw.text(corner, text, colour, font)


def _font(size_px: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size_px)


def encode_png(pixels: Pixels) -> bytes:
    """One picture as a PNG file."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
