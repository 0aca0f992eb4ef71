"""Names that are equal to people and differ in bytes: composed (NFC) and decomposed (NFD, as Macs write them)."""

import os
from pathlib import Path
from typing import Literal
from unicodedata import normalize

import pyarrow as pa
import pyarrow.compute as pc

FORMS: tuple[Literal["NFC", "NFD"], ...] = ("NFC", "NFD")


def to_nfc(names: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return names in NFC."""
    return pc.utf8_normalize(names, "NFC")


def find_unicode_twin(path: str) -> str | None:
    """Return the one path that exists and differs from a missing one in its Unicode form only, else None."""
    if path.isascii():
        return None
    twin = Path()
    for part in Path(path).parts:
        forms = {part} if os.path.lexists(twin / part) else {normalize(form, part) for form in FORMS}
        found = [form for form in forms if os.path.lexists(twin / form)]
        if len(found) != 1:
            return None
        twin /= found[0]
    return str(twin)


def stem_to_nfc(stem: str) -> str:
    """Return a path with its last part in NFC: equal for the stems in one folder that people can't tell apart."""
    if stem.isascii():
        return stem
    folder, slash, name = stem.rpartition("/")
    return f"{folder}{slash}{normalize('NFC', name)}"
