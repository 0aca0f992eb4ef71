"""A folder of files as items: each file is one, and the `.txt` or `.json` of the same name is its caption."""

import json
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import chain, groupby, islice
from typing import Any, NamedTuple

from embedder.config_toml.run_sections import SourceConfig
from embedder.errors import SourceError
from embedder.media.sniff import HEAD_BYTES, extra_kind, other_kind, sniff, unreadable_kind
from embedder.sources.captions import SIDECAR_ALONE, read_values
from embedder.sources.descriptions import DESCRIBING, attach_descriptions
from embedder.sources.file_names import sort_of
from embedder.sources.globbing import GlobMatches, find_entries, find_one
from embedder.sources.listing_schema import Listing, Row, list_with_values, tables_of_rows
from embedder.sources.local_listing import SIDECAR_SUFFIXES, Entry, stem_of
from embedder.sources.selection import MEDIA, Selection, find_selected
from embedder.sources.source_errors import FetchError
from embedder.sources.unicode_forms import stem_to_nfc
from embedder.storage.object_stores import is_remote
from embedder.storage.printable import is_text, printable, readable

NUM_READERS, READ_AT_ONCE = 16, 512  # of `.json` files whose values are columns
MAX_LOOKED_UP = 100  # objects that are asked for one by one


class Values(NamedTuple):
    """A `.json` that belongs to an item, with its modification time."""

    uri: str
    modified: str


Pair = tuple[Row, Values | None]


def list_files(source: SourceConfig, path: str, selection: Selection) -> Listing:
    """List a folder, a pattern, or a single file with its sidecar.

    `item_id` is the path relative to the root, with its suffix. A caption belongs to every file of its stem in its
    folder; `.txt` takes precedence over `.json`. A caption without such a file is its own item if the selection's rules
    say so: its `uri` is the caption file, and `caption_uri` is null. A single file is an item regardless of its name.
    Only the patterns of `source` matter, and `selection` has them; `path` comes from `normalise_source`. Raises a
    SourceError if the path is missing, or a folder below it can't be read.
    """
    found, selection = find_selected(path, selection)
    entries = found.entries if found.is_folder else _with_sidecars(found)
    places = selection.captions.places
    if found.is_folder and not DESCRIBING.isdisjoint(places):
        entries = attach_descriptions(found, selection)
    if found.is_named and not is_remote(path):
        _check_named(path)
    groups = _group_by_stem(entries)
    is_asked = found.is_named or (not found.is_folder and path.lower().endswith(SIDECAR_SUFFIXES))
    if found.is_named:
        pairs = chain.from_iterable(pair_captions(group, found, places) for group in groups)
    else:
        pairs = chain.from_iterable(_select(group, found, selection, is_asked) for group in groups)
    if not selection.captions.columns:
        return Listing(tables_of_rows(row for row, _ in pairs), unique_ids=True)
    rows = _with_values(pairs, selection.captions.columns)
    return list_with_values(rows, selection.captions.columns, unique_ids=True)


def _group_by_stem(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    """Group files with their captions.

    A caption whose stem is a file's but for its Unicode form (NFC, NFD) belongs to it, where exactly one is meant: the
    file has no caption of that form, and there is no third spelling.
    """
    for _, each in groupby(entries, key=lambda entry: stem_to_nfc(stem_of(entry.name))):
        group = list(each)
        forms = [list(same) for _, same in groupby(group, key=lambda entry: stem_of(entry.name))]
        are_captions = [{_is_sidecar(entry.name) for entry in form} for form in forms]
        if len(forms) == 2 and {False} in are_captions and {True} in are_captions:
            forms = [group]
        yield from forms


def _check_named(path: str) -> None:
    """Raise a SourceError if a file named on its own is no image, video or caption: most often that is a typo."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            head = file.read(HEAD_BYTES)
    except OSError:  # reported when it is read
        return
    kind = sniff(head)
    is_known = kind in ("image", "video") or extra_kind(head) or unreadable_kind(head)
    if not head or is_known or (kind == "text" and path.lower().endswith(SIDECAR_SUFFIXES)):
        return
    if sort_of(path.rpartition("/")[2]) == "media":  # a damaged one becomes a reject that says why
        return
    raise SourceError(
        f"{readable(path)}: found {other_kind(head)}; a source is an image, a video, a folder of these, a table or "
        "tars: check the path"
    )


def _select(group: list[Entry], found: GlobMatches, selection: Selection, is_asked: bool) -> Iterator[Pair]:
    """Make the rows of one stem's files that are items; a caption is kept or left out with its image."""
    if len(group) == 1 and selection.judge(group[0].name) is MEDIA:
        yield _row(group[0], found, None), None
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
    if not (is_asked or any(not _is_sidecar(entry.name) for entry in kept)):
        kept = [
            entry
            for entry in kept
            if entry.error_type or _holds_media(found.uri(entry)) or selection.takes_orphan(entry.name)
        ]
    for row, values in pair_captions(kept, found, selection.captions.places):
        judgement = judged.get(row.item_id)
        yield (row if judgement is None or judgement.is_media else row._replace(is_media=False)), values


def _holds_media(path: str) -> bool:
    """Return whether a local file is an image or video by its first bytes, whatever its name; False for an object."""
    if is_remote(path):
        return False
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (takes names that are no UTF-8)
            return sniff(file.read(HEAD_BYTES)) in ("image", "video")
    except OSError:  # reported when it is read
        return False


def _with_sidecars(found: GlobMatches) -> Iterator[Entry]:
    """Add the captions next to the files of a pattern, or a single one; of many objects by one more listing."""
    entries = {entry.name: entry for entry in found.entries}
    stems = {stem_of(name) for name in entries if not _is_sidecar(name)}
    suffixes = (*SIDECAR_SUFFIXES, *map(str.upper, SIDECAR_SUFFIXES))  # as cameras and Windows write them
    wanted = {stem + suffix for stem in stems for suffix in suffixes} - entries.keys()
    if is_remote(found.root) and len(wanted) > MAX_LOOKED_UP:
        listed = find_entries(found.root, lambda _: False).entries
        entries |= {entry.name: entry for entry in listed if entry.name in wanted}
    else:
        entries |= {name: entry for name in wanted if (entry := find_one(found.root, name))}
    return iter(sorted(entries.values(), key=lambda entry: (stem_of(entry.name), entry.name)))


def pair_captions(entries: list[Entry], found: GlobMatches, places: Collection[str] = SIDECAR_ALONE) -> Iterator[Pair]:
    """Make the rows of all files of one stem, each with its `.json`; every file is accounted for.

    Captions next to them count if `places` has `sidecar`. One that must not be opened (a pipe, or a link out of the
    root) becomes its own reject.
    """
    if len(entries) == 1:
        yield _row(entries[0], found, None), None
        return
    if not entries:
        return
    sidecars = [entry for entry in entries if _is_sidecar(entry.name)]
    captions = sorted((entry for entry in sidecars if not entry.error_type), key=_caption_order)
    items = [entry for entry in entries if not _is_sidecar(entry.name)]
    values = next((entry for entry in captions if entry.name.lower().endswith(".json")), None)
    caption = captions[0] if captions and "sidecar" in places else None
    for item in items:
        yield (_row(item, found, caption), values and Values(found.uri(values), values.modified))
    for entry in sidecars:
        if not items or entry.error_type:
            yield _row(entry, found, None), None


def _with_values(pairs: Iterator[Pair], columns: Sequence[str]) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Read the items' `.json` files, several at once because a bucket is slow to answer."""
    with ThreadPoolExecutor(NUM_READERS, "captions") as pool:
        while chunk := list(islice(pairs, READ_AT_ONCE)):
            yield from pool.map(lambda pair: _read_values(pair[0], pair[1], columns), chunk)


def _read_values(row: Row, values: "Values | None", columns: Sequence[str]) -> tuple[Row, dict[str, Any]]:
    if values is None or row.error_type is not None:
        return row, {}
    if row.caption_uri != values.uri:  # changing it changes the item, too
        row = row._replace(modified=f"{row.modified}|{values.modified}")
    try:
        return row, read_values(values.uri, columns)
    except FetchError as error:
        return row._replace(error_type=error.error_type, error=error.message), {}


def _row(entry: Entry, found: GlobMatches, caption: Entry | None) -> Row:
    uri = found.uri(entry)
    if not is_text(uri):
        return _bad_name_row(entry, uri)
    described_by = dict(entry.described_by)
    # A changed caption, or another description, changes the item.
    versions = [each.modified if isinstance(each, Entry) else _digest(each) for each in described_by.values()]
    modified = "|".join([entry.modified, *([caption.modified] if caption else []), *versions])
    caption_uri = found.uri(caption) if caption and not entry.error_type else None
    item_id = entry.name
    if entry.error_type == "OddKey" and (item_id := printable(entry.name)) != entry.name:
        item_id, uri = f"{item_id}#key-{_digest(entry.name)}", printable(uri)
    places = {place: found.uri(each) if isinstance(each, Entry) else each for place, each in described_by.items()}
    return Row(
        item_id,
        uri,
        entry.size_bytes,
        modified,
        caption_uri=caption_uri,
        error_type=entry.error_type,
        error=entry.error,
        described_by=json.dumps(places) if places else None,
    )


def _bad_name_row(entry: Entry, uri: str) -> Row:
    return Row(
        f"{readable(entry.name)}#name-not-utf8-{_digest(entry.name)}",
        readable(uri),
        entry.size_bytes,
        entry.modified,
        error_type="NameNotUtf8",
        error="the file's name or folder is not valid UTF-8; rename it",
    )


def _digest(name: str) -> str:
    """Return a hash that separates an escaped name from any other that reads the same, or a text from another."""
    return blake2b(os.fsencode(name), digest_size=4).hexdigest()


def _is_sidecar(name: str) -> bool:
    # The first test is cheap and spares most names the second.
    return name[-5:].lower().endswith(SIDECAR_SUFFIXES) and name[len(stem_of(name)) :].lower() in SIDECAR_SUFFIXES


def _caption_order(entry: Entry) -> tuple[bool, str]:
    """Order `.txt` before `.json`, and lower case first if a file system holds both."""
    return not entry.name.lower().endswith(".txt"), "".join(reversed(entry.name.swapcase()))
