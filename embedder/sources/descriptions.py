"""Files of a folder that describe its pictures: Takeout's `.json`, `.xmp` sidecars, and the table of an imagefolder.

Source of the last: Hugging Face's `datasets`, ImageFolder: `metadata.jsonl`, `.csv` or `.parquet` with `file_name`,
relative to its own folder, and here `text` or `caption`.
"""

import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from unicodedata import normalize

import pyarrow as pa

from embedder.media.caption_text import unescape_text
from embedder.sources.columns import is_text
from embedder.sources.file_names import MEDIA_SUFFIXES, suffix_of
from embedder.sources.globbing import GlobMatches, find_one
from embedder.sources.local_listing import SIDECAR_SUFFIXES, Entry, stem_of
from embedder.sources.selection import Selection
from embedder.sources.table_files import find_table
from embedder.sources.takeout import find_root, match_names
from embedder.sources.unicode_forms import FORMS, stem_to_nfc
from embedder.storage.object_stores import is_remote

TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
FILE_NAME, CAPTIONS = "file_name", ("text", "caption")
XMP_SUFFIX = ".xmp"
BLOCK_ENTRIES = 1000


def match_xmp(names: Iterable[str]) -> dict[str, str]:
    """Match the names of one folder: the `.xmp` of each file, `a.jpg.xmp`, else `a.xmp`."""
    names = list(names)
    sidecars = {name[: -len(XMP_SUFFIX)]: name for name in names if suffix_of(name) == XMP_SUFFIX}
    others = (name for name in names if sidecars and suffix_of(name) not in (XMP_SUFFIX, *SIDECAR_SUFFIXES))
    return {name: found for name in others if (found := sidecars.get(name) or sidecars.get(stem_of(name)))}


MATCHES = {"takeout": match_names, "xmp": match_xmp}
DESCRIBING = frozenset((*MATCHES, "imagefolder"))
"""Places of `[captions] from` that are found by the names in a folder."""


def attach_descriptions(found: GlobMatches, selection: Selection) -> Iterator[Entry]:
    """Attach to each entry what describes it in the selection's places, and leave out the files that describe others.

    The entries of a folder must follow each other, by their stems in NFC, those of an outer one before those of an
    inner one. Excluded files describe none. Raises a SourceError if the table of an imagefolder can't be read.
    """
    captions: dict[str, dict[str, str]] = {}
    has_tables = "imagefolder" in selection.captions.places
    for folder, each in groupby(found.entries, key=lambda entry: entry.name.rpartition("/")[0]):
        prefix = f"{folder}/" if folder else ""
        own, used = iter(each), set[str]()
        tables, own = _list_tables(found, prefix, own) if has_tables else ([], own)
        for table in tables:
            if folder not in captions and _is_usable(table, selection) and (read := read_captions(found.uri(table))):
                captions[folder] = read
                used.add(table.name)
        for block in _cut_blocks(own, len(prefix)):
            yield from _attach_in_block(block, len(prefix), selection, captions, used)


def _list_tables(found: GlobMatches, prefix: str, entries: Iterator[Entry]) -> tuple[list[Entry], Iterator[Entry]]:
    """Return a folder's tables in their order, and its entries."""
    if not is_remote(found.root):
        return [entry for name in TABLES if (entry := find_one(found.root, prefix + name)) is not None], entries
    held = list(entries)  # a request for each name would cost more
    named = {entry.name: entry for entry in held}
    return [named[prefix + name] for name in TABLES if prefix + name in named], iter(held)


def _cut_blocks(entries: Iterable[Entry], start: int) -> Iterator[list[Entry]]:
    """Cut a folder's entries, after a thousand or more, where no name belongs to one before.

    Their names begin at `start`.
    """
    block: list[Entry] = []
    root: str | None = None
    for entry in entries:
        stem, own = stem_to_nfc(stem_of(entry.name))[start:], find_root(entry.name[start:])
        if root is None or not stem.startswith(root):
            root = own
            if len(block) >= BLOCK_ENTRIES:
                yield block
                block = []
        root = min(root, own, key=len)  # what begins with a longer one begins with it, too
        block.append(entry)
    if block:
        yield block


def _attach_in_block(
    block: list[Entry], start: int, selection: Selection, captions: dict[str, dict[str, str]], tables: set[str]
) -> Iterator[Entry]:
    """Attach what describes the entries of a block, whose names begin at `start`; `tables` are left out."""
    usable = {entry.name[start:]: entry for entry in block if _is_usable(entry, selection)}
    matched = {
        place: _match_forms(match, usable) for place, match in MATCHES.items() if place in selection.captions.places
    }
    used = {file for files in matched.values() for file in files.values()}
    for entry in block:
        name = entry.name[start:]
        if name in used or entry.name in tables:
            continue
        found: list[tuple[str, Entry | str]] = [
            (place, usable[files[name]]) for place, files in matched.items() if name in files
        ]
        if captions and (text := _find_caption(captions, entry.name)):
            found.append(("imagefolder", text))
        selection.left_out.described.update(place for place, _ in found)
        yield entry._replace(described_by=tuple(found)) if found else entry


def _match_forms(match: Callable[[Iterable[str]], dict[str, str]], names: Iterable[str]) -> dict[str, str]:
    """Match names as they are, then in NFC those that have no match, where only one name has that form."""
    names = list(names)
    found = match(names)
    if all(name.isascii() for name in names):
        return found
    of_form: dict[str, list[str]] = {}
    for name in names:
        of_form.setdefault(normalize("NFC", name), []).append(name)
    for form, other in match(of_form).items():
        for name in of_form[form]:
            if name not in found and len(of_form[other]) == 1:
                found[name] = of_form[other][0]
    return found


def _is_usable(entry: Entry, selection: Selection) -> bool:
    """Return whether a file may describe or be described; excluded pictures still say whose a cut name is."""
    is_picture = suffix_of(entry.name) in MEDIA_SUFFIXES
    return not entry.error_type and (is_picture or not selection.excludes(entry.name))


def read_captions(uri: str) -> dict[str, str]:
    """Read an imagefolder's captions by file name, as `datasets` reads it: without `./`, and with Windows' names.

    Empty if the table is of another kind. May raise a SourceError.
    """
    table, texts = find_table(uri), frozenset((FILE_NAME, *CAPTIONS))
    columns = [field.name for field in table.read_schema(texts) if is_text(field.type)]
    caption = next((name for name in CAPTIONS if name in columns), None)
    if caption is None or FILE_NAME not in columns:
        return {}
    found: dict[str, str] = {}
    converted: dict[str, str] = {}
    for _, chunk in table.chunks(pa.schema({FILE_NAME: pa.string(), caption: pa.string()}), texts):
        names, captions = (chunk.columns[name].to_pylist() for name in (FILE_NAME, caption))
        for name, text in zip(names, captions, strict=True):
            if name and text:  # elsewhere, a backslash may be part of a name
                found[posixpath.normpath(name)] = unescape_text(text)
                if "\\" in name:
                    converted[posixpath.normpath(name.replace("\\", "/"))] = unescape_text(text)
    return converted | found


def _find_caption(captions: dict[str, dict[str, str]], name: str) -> str | None:
    folder = name
    while folder:
        folder = folder.rpartition("/")[0]
        if folder in captions:
            return _caption_of(captions[folder], name[len(folder) + 1 if folder else 0 :])
    return None


def _caption_of(captions: Mapping[str, str], name: str) -> str | None:
    """Return the caption of a name, else that of its other Unicode form, which Macs write."""
    if name in captions or name.isascii():
        return captions.get(name)
    found = [captions[form] for form in {normalize(form, name) for form in FORMS} if form in captions]
    return found[0] if len(found) == 1 else None
