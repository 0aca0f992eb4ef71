"""Draws lines of text in any script into an image; a letter that no font has is drawn as its code point."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple
from unicodedata import category, east_asian_width, normalize

from PIL import Image, ImageDraw, features

from embedder.media.bidi import base_direction, levels, visual_order
from embedder.media.fonts import Face, Fonts, all_fonts
from embedder.storage.printable import printable

MAX_CHARACTERS = 1_000  # more than any image shows
LABEL_SHARE = 0.75  # size of a code point relative to letters
LABEL_GAP_PX = 3
ELLIPSIS = "…"
BREAK_AFTER = frozenset(" -/_.,;")  # the latter let long paths and ids break
Colour = tuple[int, int, int]

_INVISIBLE = re.compile(r"[\u200c\u200d\ufe00-\ufe0f\U000e0020-\U000e01ef]")
_SKIN_TONES = range(0x1F3FB, 0x1F400)
_BRACKETS = "()[]{}<>«»"
_MIRRORED = str.maketrans(_BRACKETS, "".join(b + a for a, b in zip(_BRACKETS[::2], _BRACKETS[1::2], strict=True)))


class Letter(NamedTuple):
    """One letter with its marks, and a font that has it; without a font, its code point is drawn."""

    text: str
    face: Face | None
    width_px: float


class Line(NamedTuple):
    """A line that fits, in reading order."""

    letters: tuple[Letter, ...]
    direction: str


class Lettering:
    """Layout and drawing of text of one size."""

    def __init__(self, size_px: int, fonts: Fonts | None = None) -> None:
        self.fonts = fonts or all_fonts()
        self.size_px, self.label_px = size_px, max(6, round(LABEL_SHARE * size_px))
        self.line_px, self.baseline_px = round(1.5 * size_px), round(1.15 * size_px)
        # Pillow's own font, the plain one if there is no other, is not shaped.
        self._shapes = features.check("raqm") and self.fonts.plain.path is not None

    def lines(self, text: str, width_px: int, max_lines: int) -> list[Line]:
        """Break a text into lines; one that is too long ends in an ellipsis."""
        cut = text[:MAX_CHARACTERS] + (ELLIPSIS if len(text) > MAX_CHARACTERS else "")
        text = normalize("NFC", printable(cut))
        direction = base_direction(text)
        rest = [letter for cluster in clusters(text) for letter in self._letters(cluster)]
        lines: list[Line] = []
        while rest and len(lines) < max_lines:
            stop = _fitting(rest, width_px)
            if stop < len(rest) and len(lines) == max_lines - 1:
                (ellipsis,) = self._letters(ELLIPSIS)
                rest = [*rest[: _fitting(rest, width_px - ellipsis.width_px, whole_words=False)], ellipsis]
                stop = len(rest)
            lines.append(Line(tuple(rest[:stop]), direction))
            rest = rest[stop:]
        return lines

    def draw(self, image: Image.Image, corner: tuple[int, int], width_px: int, line: Line, colour: Colour) -> None:
        """Draw a line from `lines` into a box of `width_px` x `line_px`; nothing is drawn outside.

        `corner` is the box's upper left; a right-to-left line starts on the right. Code points are drawn paler than
        `colour`.
        """
        mask = Image.new("L", (width_px, self.line_px))
        draw = ImageDraw.Draw(mask)
        runs = [(text, face, is_rtl, self._width(text, face, is_rtl)) for text, face, is_rtl in self._runs(line)]
        x = max(0.0, width_px - sum(run[3] for run in runs)) if line.direction == "R" else 0.0
        for text, face, is_rtl, run_px in runs:
            font = (face or self.fonts.plain).at(self.size_px if face else self.label_px)
            where = (x if face else x + LABEL_GAP_PX / 2, self.baseline_px)
            draw.text(where, text, 255 if face else 170, font, anchor="ls", direction=self._direction(is_rtl))
            x += run_px
        image.paste(colour, corner, mask)

    def _letters(self, cluster: str) -> Iterator[Letter]:
        """Yield a letter in one font, or its parts if no font has all of it."""
        seen = _INVISIBLE.sub("", cluster)
        face = self.fonts.find(seen)
        if face is None and len(seen) > 1:
            for part in seen:
                yield from self._letters(part)
        elif seen:
            text = (cluster if self._shapes else seen) if face else f"U+{ord(seen):04X}"
            yield Letter(cluster, face, self._width(text, face, is_rtl=False))

    def _runs(self, line: Line) -> Iterator[tuple[str, Face | None, bool]]:
        """Yield stretches of one font and direction, from left to right; each in the order that Pillow needs."""
        depths = levels([letter.text for letter in line.letters], line.direction)
        placed = [(line.letters[place], depths[place] % 2 == 1, place) for place in visual_order(depths)]
        for (face, is_rtl, _), run in groupby(
            placed, key=lambda each: (each[0].face, each[1], each[0].face or each[2])
        ):
            texts = [letter.text for letter, _, _ in run]
            if face is None:
                yield f"U+{ord(_INVISIBLE.sub('', texts[0])):04X}", None, False
            elif self._shapes:
                yield "".join(reversed(texts) if is_rtl else texts), face, is_rtl
            else:
                text = _INVISIBLE.sub("", "".join(texts))
                yield text.translate(_MIRRORED) if is_rtl else text, face, False

    def _width(self, text: str, face: Face | None, is_rtl: bool) -> float:
        font = (face or self.fonts.plain).at(self.size_px if face else self.label_px)
        return font.getlength(text, direction=self._direction(is_rtl)) + (0 if face else LABEL_GAP_PX)

    def _direction(self, is_rtl: bool) -> str | None:
        """Return the direction argument if Pillow can shape text; otherwise it draws from left to right."""
        return ("rtl" if is_rtl else "ltr") if self._shapes else None


def clusters(text: str) -> list[str]:
    """Split a text into letters, each with its marks; joined emoji stay together."""
    found: list[str] = []
    for character in text:
        is_joined = found and (
            category(character)[0] == "M"
            or _INVISIBLE.match(character)
            or ord(character) in _SKIN_TONES
            or (found[-1].endswith("\u200d") and category(character) == "So")
        )
        if is_joined:
            found[-1] += character
        else:
            found.append(character)
    return found


def _fitting(letters: Sequence[Letter], width_px: float, *, whole_words: bool = True) -> int:
    """Return how many letters fit on one line: up to the last whole word, or part of a word longer than a line."""
    used_px, last_break = 0.0, 0
    for number, letter in enumerate(letters):
        used_px += letter.width_px
        if used_px > width_px and letter.text != " ":
            return last_break if whole_words and last_break else max(1, number)
        follows = letters[number + 1 : number + 2]
        if letter.text in BREAK_AFTER or _is_wide(letter) or (follows and _is_wide(follows[0])):
            last_break = number + 1
    return len(letters)


def _is_wide(letter: Letter) -> bool:
    """Return whether a line may break around it: Chinese, Japanese and Korean, and code points."""
    return letter.face is None or east_asian_width(letter.text[0]) in "WF"
