"""A folder of files as items: each file is one, and its same-name `.txt` or `.json` is its caption."""

import os
from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain, groupby

from embedder.config import SourceConfig
from embedder.sources.globbing import GlobMatches, find_one
from embedder.sources.listing_schema import Listing, Row, tables_of_rows
from embedder.sources.local_listing import SIDECAR_SUFFIXES, Entry, stem_of
from embedder.sources.selection import MEDIA, Selection, find_selected
from embedder.storage.printable import is_text, readable


def list_files(source: SourceConfig, path: str, selection: Selection) -> Listing:
    """List a folder, a pattern, or a single file with its sidecar.

    `item_id` is the path relative to the root, suffix included. A caption belongs to every file of its stem in its
    folder; `.txt` comes before `.json`. A caption without such a file is an item of its own: its `uri` is the
    caption file, and `caption_uri` is null. A single file is an item, whatever its name says.

    Args:
        source: its patterns are in the selection; nothing else of it counts.
        path: as `normalise_source` gives it.
        selection: of the files below it.

    Raises:
        SourceError: the path is missing, or a folder below it can't be read.
    """
    found, selection = find_selected(path, selection)
    entries = found.entries if found.is_folder else _with_sidecars(found)
    groups = (list(group) for _, group in groupby(entries, key=lambda entry: stem_of(entry.name)))
    if found.is_named:
        rows = chain.from_iterable(pair_captions(group, found) for group in groups)
    else:
        rows = chain.from_iterable(_selected(group, found, selection) for group in groups)
    return Listing(tables_of_rows(rows), unique_ids=True)


def _selected(group: list[Entry], found: GlobMatches, selection: Selection) -> Iterator[Row]:
    """Make the rows of those files of one stem that are items; a caption is kept or left out with its image."""
    if len(group) == 1 and selection.judge(group[0].name) is MEDIA:
        yield _row(group[0], found, None)
        return
    judged = {entry.name: selection.judge(entry.name) for entry in group}
    files = [entry for entry in group if not _is_sidecar(entry.name)]
    has_items = any(judged[entry.name].verdict == "item" for entry in files)
    has_excluded = any(judged[entry.name].verdict == "excluded" for entry in files)
    kept = []
    for entry in group:
        verdict = judged[entry.name].verdict
        if _is_sidecar(entry.name):
            if has_items:
                verdict = "item" if selection.may_caption(entry.name) else verdict
            elif has_excluded:
                verdict = "excluded"
        if verdict == "item":
            kept.append(entry)
        else:
            selection.left_out.count(verdict, entry.name)
    for row in pair_captions(kept, found):
        judgement = judged.get(row.item_id)
        yield row if judgement is None or judgement.is_media else row._replace(is_media=False)


def _with_sidecars(found: GlobMatches) -> Iterator[Entry]:
    """Add to files that were named one by one the captions beside them, and bring each stem together."""
    entries = {entry.name: entry for entry in found.entries}
    for name in [name for name in entries if not _is_sidecar(name)]:
        for suffix in SIDECAR_SUFFIXES:
            sidecar = stem_of(name) + suffix
            if sidecar not in entries and (entry := find_one(found.root, sidecar)):
                entries[sidecar] = entry
    return iter(sorted(entries.values(), key=lambda entry: (stem_of(entry.name), entry.name)))


def pair_captions(entries: list[Entry], found: GlobMatches) -> Iterator[Row]:
    """Make the rows of all files of one stem; nothing among them is lost.

    A caption that must not be opened (a pipe, a link out of the root) is a reject of its own.
    """
    if len(entries) == 1:
        yield _row(entries[0], found, None)
        return
    sidecars = [entry for entry in entries if _is_sidecar(entry.name)]
    captions = sorted((entry for entry in sidecars if not entry.error_type), key=_caption_order)
    items = [entry for entry in entries if not _is_sidecar(entry.name)]
    for item in items:
        yield _row(item, found, captions[0] if captions else None)
    for entry in sidecars:
        if not items or entry.error_type:
            yield _row(entry, found, None)


def _row(entry: Entry, found: GlobMatches, caption: Entry | None) -> Row:
    uri = found.uri(entry)
    if not is_text(uri):
        return _bad_name_row(entry, uri)
    modified = entry.modified
    if caption:
        modified = f"{modified}|{caption.modified}"  # a changed caption changes the item
    caption_uri = found.uri(caption) if caption and not entry.error_type else None
    return Row(entry.name, uri, entry.size_bytes, modified, None, caption_uri, entry.error_type, entry.error)


def _bad_name_row(entry: Entry, uri: str) -> Row:
    # The hash keeps the id apart from that of any other name that reads the same.
    digest = blake2b(os.fsencode(entry.name), digest_size=4).hexdigest()
    return Row(
        f"{readable(entry.name)}#name-not-utf8-{digest}",
        readable(uri),
        entry.size_bytes,
        entry.modified,
        error_type="NameNotUtf8",
        error="the file's name or folder is not valid UTF-8; rename it",
    )


def _is_sidecar(name: str) -> bool:
    # The first test spares a million names the second.
    return name[-5:].lower().endswith(SIDECAR_SUFFIXES) and name[len(stem_of(name)) :].lower() in SIDECAR_SUFFIXES


def _caption_order(entry: Entry) -> tuple[bool, str]:
    """Order `.txt` before `.json`, and lower case first where a file system holds both."""
    return not entry.name.lower().endswith(".txt"), "".join(reversed(entry.name.swapcase()))
