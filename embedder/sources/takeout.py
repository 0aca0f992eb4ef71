"""Google Takeout's `.json` files: matched with the pictures of their folder by name, and what they say. Pure.

Takeout cuts the name of a `.json` at 46 characters, and that of a picture before its suffix at 47. The number of a copy
stands before a picture's suffix, and at the end of the `.json`: `a(1).jpg`, `a.jpg(1).json`. Edited copies and the
clips of live pictures share the `.json` of the original.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from unicodedata import normalize

from embedder.sources.file_names import MEDIA_SUFFIXES, TAKEOUT, suffix_of

MAX_JSON_STEM, MAX_MEDIA_STEM = 46, 47
EDITED = (
    *("-edited", "-effects", "-smile", "-mix", "-bearbeitet", "-bewerkt", "-modifié", "-modificato", "-ha editado"),
    *("-editado", "-editat", "-edytowane", "-redigerad", "-redigeret", "-redigert", "-muokattu", "-upraveno"),
    *("-изменено", "-編集済み", "-已修改", "-편집됨"),
)
"""Ends of the stems of edited copies, by the language of the account."""
MIN_ORIGINAL = MAX_MEDIA_STEM - max(map(len, EDITED))
"""Characters that each name keeps of a longer original, whatever was cut."""
DESCRIBING_SUFFIXES = 3
"""Most suffixes at the end of a `.json` or `.xmp`: `a.jpg.supplemental-metadata.json`."""
CLIPS = frozenset((".mp4", ".mov", ".mp"))
_NUMBER = re.compile(r"^(.*)\((\d+)\)$", re.DOTALL)

Key = tuple[str, str | None]
"""A name without its copy number, and that number."""


def match_names(names: Iterable[str]) -> dict[str, str]:
    """Match the names of one folder: the `.json` of each picture or clip; those without one, or with two, are missing.

    A `.json` whose name was cut belongs only to pictures of one stem; where others begin alike, to none.
    """
    whole: dict[Key, str] = {}
    cut: dict[Key, str] = {}
    pictures = []
    for name in names:
        if suffix_of(name) == ".json":
            _note_json(name, whole, cut)
        elif suffix_of(name) in MEDIA_SUFFIXES | CLIPS:
            pictures.append(name)
    of_stem: dict[Key, list[str]] = {}
    for title, number in whole:
        of_stem.setdefault((_stem(title), number), []).append(title)
    found, by_cut = {}, dict[str, set[str]]()
    for name in pictures:
        key = next((key for key in _list_keys(name, of_stem) if key in whole), None)
        if key is not None:
            found[name] = whole[key]
        elif (json := next((cut[key] for key in _list_cut_keys(name) if key in cut), None)) is not None:
            by_cut.setdefault(json, set()).add(_find_original(name)[0])
            found[name] = json
    return {name: json for name, json in found.items() if len(by_cut.get(json, ())) < 2}


def _note_json(name: str, whole: dict[Key, str], cut: dict[Key, str]) -> None:
    stem = name[: -len(".json")]
    if suffix_of(stem) in MEDIA_SUFFIXES:  # `a(1).jpg.json` is that of `a(1).jpg`
        whole[stem, None] = name
        return
    title, number = _split_number(stem)
    head, dot, tail = title.rpartition(".")
    if suffix_of(title) in MEDIA_SUFFIXES:
        whole[title, number] = name
    elif dot and suffix_of(head) in MEDIA_SUFFIXES and TAKEOUT.startswith(tail.lower()):
        whole[head, number] = name
    elif len(title) == MAX_JSON_STEM:
        cut[title, number] = name


def _list_keys(name: str, of_stem: dict[Key, list[str]]) -> Iterator[Key]:
    """Yield what a picture's `.json` may be for, the surest first."""
    yield name, None
    stem, number = _split_number(_stem(name))
    suffix = name[len(_stem(name)) :]
    yield stem + suffix, number
    original, number = _find_original(name)
    yield original + suffix, number
    is_clip = suffix.lower() in CLIPS
    if not is_clip and original == stem:
        return
    others = [title for title in of_stem.get((original, number), ()) if suffix_of(title) not in CLIPS]
    heic = [title for title in others if suffix_of(title) in (".heic", ".heif")]
    for titles in (heic, others):
        if len(titles) == 1:
            yield titles[0], number


def _find_original(name: str) -> Key:
    """Return the stem of the picture that a name is an edited copy of, or its own, and the copy number."""
    stem, number = _split_number(_stem(name))
    for word in EDITED:
        if stem.lower().endswith(word):
            original, inner = _split_number(stem[: -len(word)])
            return original, number or inner
    if len(stem) == MAX_MEDIA_STEM and (dash := stem.rfind("-")) > 0:  # the word was cut with the name
        end = stem[dash:].lower()
        if any(word.startswith(end) for word in EDITED):
            return stem[:dash], number
    return stem, number


def _list_cut_keys(name: str) -> Iterator[Key]:
    stem, number = _split_number(_stem(name))
    suffix = name[len(_stem(name)) :]
    yield (stem + suffix)[:MAX_JSON_STEM], number
    original, number = _find_original(name)
    if original != stem or suffix.lower() in CLIPS:
        for each in (suffix, ".HEIC", ".heic", ".JPG", ".jpg"):
            yield (original + each)[:MAX_JSON_STEM], number


def find_root(name: str) -> str:
    """Return how all names begin, in NFC, that may describe a name or be described by it, as an `.xmp` does, too."""
    head, *suffixes = name.split(".")
    num_suffixes = DESCRIBING_SUFFIXES if suffixes and suffixes[-1].lower() in ("json", "xmp") else 1
    if head and name.isascii() and len(suffixes) <= num_suffixes and "-" not in head and "(" not in head:
        return head[:MIN_ORIGINAL]
    root = normalize("NFC", name)
    for _ in range(num_suffixes):
        root = _find_original(root)[0]
    return root[: MIN_ORIGINAL if name.isascii() else MIN_ORIGINAL // 3]  # three characters may be one in NFC


def _split_number(stem: str) -> Key:
    found = _NUMBER.match(stem)
    return (found[1], found[2]) if found else (stem, None)


def _stem(name: str) -> str:
    return name.rpartition(".")[0] or name


def medium_values(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the medium's columns in a `.json`: the time in UTC, and a place that isn't (0, 0)."""
    values: dict[str, Any] = {}
    with suppress(AttributeError, LookupError, TypeError, ValueError, OverflowError, OSError):
        taken = datetime.fromtimestamp(int(tree["photoTakenTime"].get("timestamp")), UTC)
        values |= {"taken_at": taken.replace(tzinfo=None).isoformat(), "taken_offset_min": 0}
    for name in ("geoData", "geoDataExif"):
        latitude, longitude, altitude = (_number(tree.get(name), key) for key in ("latitude", "longitude", "altitude"))
        if (latitude or longitude) and abs(latitude) <= 90 and abs(longitude) <= 180:
            place = {"latitude": latitude, "longitude": longitude}
            return values | place | ({"altitude_m": altitude} if 0 < abs(altitude) < 1e7 else {})
    return values


def _number(found: Any, key: str) -> float:
    """Return the number that an object of JSON has under a key; NaN if there is none."""
    value = found.get(key) if isinstance(found, Mapping) else None
    return float(value) if isinstance(value, int | float) and abs(value) < 1e9 else math.nan
