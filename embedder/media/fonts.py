"""Fonts for any text, chosen by the characters in them: first the one shipped with matplotlib, then the machine's."""

import os
import struct
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from PIL import ImageFont

from embedder.installation import missing
from embedder.storage.user_cache import home_folder

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

SHIPPED = "mpl-data/fonts/ttf/DejaVuSans.ttf"
SUFFIXES = (".ttf", ".otf", ".ttc", ".otc")
MAX_FILES = 500  # of the machine: reading one takes some 5 ms
MAX_GLYPHS = 0xFFFF  # a font with more characters draws one box for many: a "last resort"
BROAD = ("noto", "fallback", "unicode", "unifont", "cjk", "droid")  # in names of fonts for many scripts
STYLED = ("bold", "black", "italic", "oblique", "light", "thin", "condensed", "mono", "serif")
OUTLINES = {"glyf", "CFF ", "CFF2"}
COLOURS = {"CBDT", "sbix", "COLR", "SVG "}  # their outlines are missing or empty
DAMAGED = (OSError, struct.error, ValueError, LookupError, AssertionError, AttributeError, TypeError)
"""Exceptions of Pillow and fontTools for a damaged font, besides TTLibError."""


class Face(NamedTuple):
    """One font and its characters; without a path, Pillow's own, which has ASCII."""

    path: str | None
    characters: frozenset[int]

    def at(self, size_px: int) -> Font:
        """Open the font in a size."""
        return _open(self.path, size_px)


class Fonts:
    """Fonts by their characters; the machine's are read only if the first one lacks a character."""

    def __init__(self, *, system: bool = True) -> None:
        """Read the font that is always there; without `system`, all machines draw the same."""
        can_read = "fontTools" not in missing("embed")  # else non-ASCII letters are drawn as code points
        first = [face for face in [_read_face(path) for path in _shipped_files()] if face] if can_read else []
        self._faces = [*first, Face(None, frozenset(range(0x20, 0x7F)))]
        self._more = _system_faces() if system and can_read else iter(())

    @property
    def plain(self) -> Face:
        """Return the font for the characters that all fonts have."""
        return self._faces[0]

    def find(self, text: str) -> Face | None:
        """Return the first font that has all characters of a text, or None."""
        wanted = {ord(character) for character in text}
        for face in self._faces:
            if wanted <= face.characters:
                return face
        for face in self._more:
            self._faces.append(face)
            if wanted <= face.characters:
                return face
        return None


@lru_cache(maxsize=1)
def all_fonts() -> Fonts:
    """Return the fonts of this machine, read once per process."""
    return Fonts()


@lru_cache(maxsize=256)
def _open(path: str | None, size_px: int) -> Font:
    return ImageFont.load_default(size_px) if path is None else ImageFont.truetype(path, size_px)


def _shipped_files() -> list[Path]:
    found = find_spec("matplotlib")
    folders = (found.submodule_search_locations or []) if found else []
    return [path for path in (Path(folder) / SHIPPED for folder in folders) if path.is_file()]


def _system_faces() -> Iterator[Face]:
    for path in sorted(_font_files(), key=_preference)[:MAX_FILES]:
        face = _read_face(path)
        if face is not None:
            yield face


def _preference(path: Path) -> tuple[int, bool, str]:
    name = path.stem.lower()
    return sum(word in name for word in STYLED), not any(word in name for word in BROAD), str(path)


def _font_files() -> Iterator[Path]:
    for top in dict.fromkeys(_font_folders()):
        for folder, _, names in os.walk(top):
            yield from (Path(folder) / name for name in names if name.lower().endswith(SUFFIXES))


def _font_folders() -> list[Path]:
    home = home_folder()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    shared = (os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(os.pathsep)
    windows = [(os.environ.get("LOCALAPPDATA"), "Microsoft/Windows/Fonts"), (os.environ.get("WINDIR"), "Fonts")]
    return [
        data / "fonts",
        home / ".fonts",
        *(Path(folder) / "fonts" for folder in shared),
        home / "Library/Fonts",
        Path("/Library/Fonts"),
        Path("/System/Library/Fonts"),
        *(Path(folder) / place for folder, place in windows if folder),
    ]


def _read_face(path: Path) -> Face | None:
    """Read a font's characters; None if it is damaged or has no outlines."""
    from fontTools.ttLib import TTFont, TTLibError

    try:
        with TTFont(path, fontNumber=0, lazy=True) as font:
            tables = set(font.keys())
            if not tables & OUTLINES or tables & COLOURS:
                return None
            characters = frozenset(font.getBestCmap() or ())
        if len(characters) > MAX_GLYPHS:
            return None
        _open(str(path), 12)
    except (TTLibError, *DAMAGED):
        return None
    return Face(str(path), characters)
