"""Draws a contact sheet: images in a grid, a few short lines under each, a block per query; decodes no file."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from PIL import ExifTags, Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from embedder.errors import ConfigError
from embedder.media.arrays import Pixels
from embedder.media.fonts import Fonts
from embedder.media.lettering import Lettering, Line
from embedder.media.sniff import SHEET_MARK
from embedder.storage.atomic_write import atomic_write
from embedder.storage.output_file import check_output_file

COLUMNS = 5
CELL_PX = 160
MARGIN_PX = 16
FONT_PX = 12
TITLE_PX = 20
FRAME_PX = 3  # around the image that was searched with
MAX_LINES = 2  # of one text; the rest becomes an ellipsis
INK, PALE, PAPER, MISSING = (20, 20, 20), (110, 110, 110), (255, 255, 255), (235, 235, 235)

SHEET_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".pdf": "PDF"}
MAX_SIDE_PX = {"JPEG": 65_500, "WEBP": 16_383, "PDF": 28_800}  # PDF: Acrobat's 200 inches
MAX_PIXELS = 250_000_000  # of all pages: 750 MB, as 6,000 images need
QUALITY = 90  # of JPEG, WebP and PDF
PDF_DPI = 144.0  # five columns are 6.2 inches wide


class Cell(NamedTuple):
    """One image, uint8 (H, W, 3) or None if it couldn't be read, and the texts under it."""

    pixels: Pixels | None
    lines: list[str]


class Block(NamedTuple):
    """Images of one query.

    `cells` are in reading order, five per row. `title` is the line above them, empty for none. `query` is the image
    that was searched with, drawn with a frame before the others; None for none. `note` is shown if there are no cells.
    """

    cells: Sequence[Cell]
    title: str = ""
    query: Cell | None = None
    note: str = ""


def save_sheet(path: Path, blocks: Sequence[Block], fonts: Fonts | None = None) -> None:
    """Draw the blocks from top to bottom and write or replace the sheet; a PDF has one page per block.

    The suffix of `path` names the format; `fonts` None means those of this machine. Raises a ConfigError for an unknown
    suffix, too many images for the format, or a file that can't be written.
    """
    kind = SHEET_FORMATS[check_output_file(path, SHEET_FORMATS, "contact sheet")]
    small, large = Lettering(FONT_PX, fonts), Lettering(TITLE_PX, fonts)
    blocks = blocks or [Block([])]
    columns = max(1, min(COLUMNS, max(len(_cells(block)) for block in blocks)))
    pages = [[_Layout(block, columns, small, large) for block in blocks]]
    if kind == "PDF":
        pages = [[layout] for layout in pages[0]]
    sizes = [(page[0].width_px, sum(layout.height_px for layout in page) + MARGIN_PX) for page in pages]
    _check_sizes(path, kind, sizes)
    drawn = [_draw_page(page, size) for page, size in zip(pages, sizes, strict=True)]
    try:
        with atomic_write(path) as file:
            _write(drawn, kind, file)
    except OSError as error:
        where = f"contact sheet {path}"
        raise ConfigError(f"{where}: {error.strerror or error}; name a place that can be written") from None


class _Layout:
    """Lines and sizes of a block; it has a margin above and none below."""

    def __init__(self, block: Block, columns: int, small: Lettering, large: Lettering) -> None:
        self.block, self.small, self.large = block, small, large
        self.cells = _cells(block)
        self.texts = [[small.lines(text, CELL_PX, MAX_LINES) for text in cell.lines] for cell in self.cells]
        self.width_px = MARGIN_PX + columns * (CELL_PX + MARGIN_PX)
        self.head = large.lines(block.title, self.inner_px, MAX_LINES)
        self.note = [] if block.cells else small.lines(block.note, self.inner_px, MAX_LINES)
        head_px = len(self.head) * large.line_px + MARGIN_PX // 2 if self.head else 0
        self.note_top_px = MARGIN_PX + head_px
        self.top_px = self.note_top_px + len(self.note) * small.line_px
        num_lines = max((sum(map(len, of_cell)) for of_cell in self.texts), default=0)
        self.step_px = CELL_PX + num_lines * small.line_px + MARGIN_PX
        num_rows = -(-len(self.cells) // COLUMNS)
        self.height_px = self.top_px + num_rows * self.step_px - (MARGIN_PX if num_rows else 0)

    @property
    def inner_px(self) -> int:
        """Return the width between the margins."""
        return self.width_px - 2 * MARGIN_PX

    def draw(self, sheet: Image.Image, y: int) -> None:
        """Draw the block at height `y`."""
        for number, line in enumerate(self.head):
            corner = (MARGIN_PX, y + MARGIN_PX + number * self.large.line_px)
            self.large.draw(sheet, corner, self.inner_px, line, INK)
        for number, line in enumerate(self.note):
            corner = (MARGIN_PX, y + self.note_top_px + number * self.small.line_px)
            self.small.draw(sheet, corner, self.inner_px, line, PALE)
        for number, (cell, of_cell) in enumerate(zip(self.cells, self.texts, strict=True)):
            row, column = divmod(number, COLUMNS)
            corner = (MARGIN_PX + column * (CELL_PX + MARGIN_PX), y + self.top_px + row * self.step_px)
            _draw_image(sheet, corner, cell.pixels, self.small)
            if cell is self.block.query:
                _draw_frame(sheet, corner)
            _draw_texts(sheet, (corner[0], corner[1] + CELL_PX), of_cell, self.small)


def _cells(block: Block) -> list[Cell]:
    return [*([] if block.query is None else [block.query]), *block.cells]


def _check_sizes(path: Path, kind: str, sizes: list[tuple[int, int]]) -> None:
    limit = MAX_SIDE_PX.get(kind)
    width, height = max(sizes, key=max)
    if limit is not None and max(width, height) > limit:
        rule, cure = f"{kind} takes {limit:,} px a side", "write a .png, or ask for fewer hits"
    elif sum(width * height for width, height in sizes) > MAX_PIXELS:
        rule, cure = f"all of a sheet may have {MAX_PIXELS:,} px", "ask for fewer hits, or for fewer queries at once"
    else:
        return
    raise ConfigError(f"contact sheet {path}: it would be {width:,} x {height:,} px; {rule}; {cure}")


def _draw_page(page: Sequence[_Layout], size: tuple[int, int]) -> Image.Image:
    sheet = Image.new("RGB", size, PAPER)
    y = 0
    for layout in page:
        layout.draw(sheet, y)
        y += layout.height_px
    return sheet


def _write(pages: list[Image.Image], kind: str, file: BinaryIO) -> None:
    """Write a sheet with a mark, so that one saved among images isn't taken for an item; a PDF needs none."""
    first, *others = pages
    if kind == "PDF":
        first.save(file, kind, save_all=True, append_images=others, resolution=PDF_DPI, quality=QUALITY)
    elif kind == "PNG":
        info = PngInfo()
        info.add_text("Software", SHEET_MARK)
        first.save(file, kind, pnginfo=info)
    else:
        exif = Image.Exif()
        exif[ExifTags.Base.Software] = SHEET_MARK
        encoded = BytesIO()
        first.save(encoded, kind, exif=exif, quality=QUALITY)
        file.write(_exif_first(encoded.getvalue()) if kind == "WEBP" else encoded.getvalue())


def _exif_first(webp: bytes) -> bytes:
    """Move a WebP file's EXIF chunk from the end to the front, where `sniff` reads the mark.

    Source: RFC 9649, 2.7: the header chunk is the first, and metadata may come in any order.
    """
    chunks: list[bytes] = []
    start = 12
    while start < len(webp):
        size = int.from_bytes(webp[start + 4 : start + 8], "little")
        stop = start + 8 + size + size % 2
        chunks.append(webp[start:stop])
        start = stop
    header, *rest = chunks
    return webp[:12] + b"".join([header, *sorted(rest, key=lambda chunk: chunk[:4] != b"EXIF")])


def _draw_image(sheet: Image.Image, corner: tuple[int, int], pixels: Pixels | None, small: Lettering) -> None:
    if pixels is not None:
        sheet.paste(Image.fromarray(pixels).resize((CELL_PX, CELL_PX)), corner)
        return
    x, y = corner
    ImageDraw.Draw(sheet).rectangle((x, y, x + CELL_PX - 1, y + CELL_PX - 1), fill=MISSING)
    (line,) = small.lines("not readable", CELL_PX, 1)
    indent = round(CELL_PX - sum(letter.width_px for letter in line.letters)) // 2
    small.draw(sheet, (x + indent, y + (CELL_PX - small.line_px) // 2), CELL_PX - indent, line, PALE)


def _draw_frame(sheet: Image.Image, corner: tuple[int, int]) -> None:
    x, y = corner
    box = (x - FRAME_PX, y - FRAME_PX, x + CELL_PX + FRAME_PX - 1, y + CELL_PX + FRAME_PX - 1)
    ImageDraw.Draw(sheet).rectangle(box, outline=INK, width=FRAME_PX)


def _draw_texts(sheet: Image.Image, corner: tuple[int, int], texts: list[list[Line]], small: Lettering) -> None:
    x, y = corner
    for number, lines in enumerate(texts):
        for line in lines:
            small.draw(sheet, (x, y), CELL_PX, line, INK if number == 0 else PALE)
            y += small.line_px


def encode_png(pixels: Pixels) -> bytes:
    """Encode one image as a PNG file."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def encode_webp(pixels: Pixels, quality: int) -> bytes:
    """Encode one image as a WebP file; quality from 0 to 100."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", quality=quality, method=3)
    return file.getvalue()
