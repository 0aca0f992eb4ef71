"""Names that are equal to people and differ in bytes: composed (NFC) and decomposed (NFD, as Macs write them)."""

import os
import unicodedata

import pyarrow as pa
import pyarrow.compute as pc


def compose(names: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return names in NFC."""
    return pc.utf8_normalize(names, "NFC")


def find_unicode_twin(path: str) -> str | None:
    """Return the one path that exists and differs from a missing one in its Unicode form alone, else None."""
    if path.isascii():
        return None
    forms = {unicodedata.normalize("NFC", path), unicodedata.normalize("NFD", path)} - {path}
    found = [form for form in sorted(forms) if os.path.lexists(form)]
    return found[0] if len(found) == 1 else None


def compose_stem(stem: str) -> str:
    """Return a path with its last part in NFC: equal for the stems in one folder that people can't tell apart."""
    if stem.isascii():
        return stem
    folder, slash, name = stem.rpartition("/")
    return f"{folder}{slash}{unicodedata.normalize('NFC', name)}"
