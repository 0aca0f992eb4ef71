"""WebDataset tars as items: members of one key are one item, found by its byte range in the tar."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from embedder.config import SourceConfig
from embedder.errors import SourceError
from embedder.sources.byte_ranges import open_ranges
from embedder.sources.errors import FetchError
from embedder.sources.file_names import sort_of
from embedder.sources.globbing import GlobMatches, listing_error
from embedder.sources.listing_schema import ROWS_PER_TABLE, Listing, Row, table_of_rows
from embedder.sources.local_listing import Entry
from embedder.sources.selection import LeftOut, Selects, find_selected
from embedder.sources.tar_scan import PACKED_TAR_SUFFIXES, BrokenTarError, compression_of, scan_members
from embedder.sources.type_inference import SAMPLE_ROWS, arrow_columns, infer_json_type, json_value
from embedder.sources.uris import member_uri, row_uri
from embedder.sources.webdataset_samples import MemberProblem, Samples, TarSample
from embedder.storage.file_adapter import ByteRanges
from embedder.storage.printable import is_text, readable

RowWithMetadata = tuple[Row, dict[str, Any]]


@dataclass(frozen=True)
class Tar:
    """One tar while its rows are made; `prefix` stands before its keys."""

    uri: str
    prefix: str
    entry: Entry

    def reject(self, item_id: str, error_type: str, error: str, uri: str | None = None) -> Row:
        """Make a row that is not fetched.

        Args:
            item_id: of the row.
            error_type: short name that rejects are counted by.
            error: one line for people.
            uri: of the member; by default the tar's.
        """
        return Row(item_id, uri or self.uri, None, self.entry.modified, error_type=error_type, error=error)

    def member_reject(self, problem: MemberProblem) -> Row:
        """Make the row of a member that can't be used, named by its whole name."""
        member, error_type, error = problem
        name = readable(member.name)
        return self.reject(
            f"{self.prefix}/{name}", error_type, error, member_uri(self.uri, name, member.offset, member.size)
        )


def list_tars(source: SourceConfig, path: str, selects: Selects) -> Listing:
    """List the items of the tars that a path means: one, a folder of them, or a pattern with braces or wildcards.

    `item_id` is the tar's path relative to the source, without `.tar`, then `/` and the key. `.txt` is the caption,
    else the `caption` or `text` of `.json`, from which carryover columns come, too.

    Args:
        source: its `carryover` counts.
        path: as `normalise_source` gives it.
        selects: makes the selection. Files among the tars that are no media are left out, images there are rejects.

    Raises:
        SourceError: nothing is there, or a tar is compressed or may not be read.
    """
    found, selection = find_selected(path, selects)
    listed = selection.without_junk(found)
    entries = (entry for entry in listed if found.is_named or _may_be_tar(entry.name, selection.left_out))
    rows = chain.from_iterable(_rows_of_entry(entry, found, source.carryover) for entry in entries)
    if not source.carryover:
        return Listing(_tables(rows, pa.schema([])))
    first = list(islice(rows, SAMPLE_ROWS))
    carryover = pa.schema(
        pa.field(name, infer_json_type([metadata.get(name) for _, metadata in first])) for name in source.carryover
    )
    return Listing(_tables(chain(first, rows), carryover), carryover)


def _tables(rows: Iterator[RowWithMetadata], carryover: pa.Schema) -> Iterator[pa.Table]:
    while chunk := list(islice(rows, ROWS_PER_TABLE)):
        converted = [_with_carryover(row, metadata, carryover) for row, metadata in chunk]
        columns = arrow_columns([values for _, values in converted], carryover)
        yield table_of_rows([row for row, _ in converted], columns)


def _with_carryover(row: Row, metadata: dict[str, Any], carryover: pa.Schema) -> RowWithMetadata:
    """Convert what is carried over; a value of another type rejects its item alone."""
    try:
        return row, {column.name: json_value(metadata.get(column.name), column.type) for column in carryover}
    except ValueError as error:
        return row._replace(error_type="CarryoverType", error=f"carryover from .json: {error}"), {}


def _may_be_tar(name: str, left_out: LeftOut) -> bool:
    """Whether a file is a tar, or one that should not be among tars; other files are counted and passed over."""
    if name.lower().endswith((".tar", *PACKED_TAR_SUFFIXES)):
        return True
    is_other = sort_of(name) == "other"
    if is_other:
        left_out.count("other", name)
    return not is_other


def _rows_of_entry(entry: Entry, found: GlobMatches, wanted: tuple[str, ...]) -> Iterator[RowWithMetadata]:
    """Sort out what is no plain tar; every file below the source ends in a row, or in an error."""
    uri = found.uri(entry)
    name, lower = readable(entry.name), entry.name.lower()
    tar = Tar(readable(uri), name[: -len(".tar")] if lower.endswith(".tar") else name, entry)
    if lower.endswith(PACKED_TAR_SUFFIXES):
        raise SourceError(f"{tar.uri}: a compressed tar has no byte ranges; unpack it to a plain .tar")
    if entry.error_type:
        yield tar.reject(name, entry.error_type, entry.error or ""), {}
    elif not is_text(uri):
        yield tar.reject(name, "NameNotUtf8", "the tar's name is not valid UTF-8; rename it"), {}
    elif not lower.endswith(".tar"):
        yield tar.reject(name, "NotATar", "a file among tars; a webdataset source reads only .tar files"), {}
    else:
        yield from _rows_of_tar(tar, wanted)


def _rows_of_tar(tar: Tar, wanted: tuple[str, ...]) -> Iterator[RowWithMetadata]:
    """Read all headers of one tar, then make its rows; memory is bounded by the members of one tar."""
    samples = Samples(wanted)
    broken = _gather(tar, samples)
    for number, (key, sample) in enumerate(samples.by_key.items()):
        yield _item_row(tar, key, sample, number), sample.metadata
        yield from ((row, {}) for row in _leftover_rows(tar, sample, wanted))
    yield from ((tar.member_reject(problem), {}) for problem in samples.problems)
    if broken:
        yield tar.reject(tar.entry.name, "BrokenTar", f"{broken}; the {len(samples.by_key)} items before are kept"), {}


def _gather(tar: Tar, samples: Samples) -> str | None:
    """Scan a tar into samples; return where it breaks, if it does.

    A tar that may not be read ends the listing: it would look as if all its items had been deleted.
    """
    try:
        ranges = open_ranges(tar.uri)
        try:
            return _scan(tar, samples, ranges)
        finally:
            ranges.close()
    except FetchError as error:
        raise listing_error(error) from None


def _scan(tar: Tar, samples: Samples, ranges: ByteRanges) -> str | None:
    if compression := compression_of(ranges):
        raise SourceError(f"{tar.uri}: a {compression} file has no byte ranges; unpack it to a plain .tar")
    try:
        for member in scan_members(ranges):
            samples.take(member, ranges)
    except BrokenTarError as error:
        return str(error)
    return None


def _item_row(tar: Tar, key: str, sample: TarSample, number: int) -> Row:
    """Make the item of a key; one that is only a caption has it in its row, so its uri needs no fetch."""
    item_id, modified = f"{tar.prefix}/{key}", tar.entry.modified
    if media := sample.ranked_media():
        name, offset, size, _ = media[0]
        uri = member_uri(tar.uri, name, offset, size)
        return Row(item_id, uri, size, modified, sample.caption, is_media=sort_of(name) == "media")
    if sample.caption:
        return Row(item_id, row_uri(tar.uri, number), None, modified, sample.caption)
    return tar.reject(item_id, "Empty", "neither an image, a video nor a caption under this key")


def _leftover_rows(tar: Tar, sample: TarSample, wanted: tuple[str, ...]) -> Iterator[Row]:
    """Make a reject of each member of a key that its item does not use."""
    media = sample.ranked_media()
    for extra in media[1:]:
        error = f"a second image or video under one key; the item is {media[0].name!r}"
        yield tar.member_reject(MemberProblem(extra, "ExtraMember", error))
    if sample.json_problem and (wanted or not sample.text):
        yield tar.member_reject(sample.json_problem)
