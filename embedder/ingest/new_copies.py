"""Items of one run with the same bytes: the first is embedded, and the others take its vectors over.

Candidates have one size, and the same few bytes in the middle; in a bucket, one ETag that is a hash. The first of each
group is read, for the content that decode compares with the others' (`embedder.steps.decode`). Once the engine has
ended, those whose content is equal get its rows (`embedder.ingest.takeover.find_finished_copies`).
"""

import json
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embedder.ingest.diff import CHECKED, CONTENT_CHANGED, REJECTED_BEFORE, ROWS_DAMAGED
from embedder.media.sandbox import SandboxedDecoder
from embedder.quantities import plural
from embedder.sources.file_names import suffix_of
from embedder.sources.item_ranges import open_item
from embedder.sources.source_errors import FetchError
from embedder.sources.uris import name_in, split_uri
from embedder.steps.content_reader import ContentReader
from embedder.steps.item_decoder import DecodeSpec
from embedder.storage.object_stores import is_remote
from index.vectors import Rows

LOG = logging.getLogger(__name__)

Hashes = NDArray[np.uint64]

NEW_COPIES = pa.schema({"item_id": pa.string(), "copy_of": pa.string(), "content_version": pa.string()})
NOT_MEANT = (CHECKED, CONTENT_CHANGED, REJECTED_BEFORE, ROWS_DAMAGED)  # a changed one that is rejected keeps its rows
SEEN_BYTES = 4096  # read of each file that is as large as another; the middle differs where pixels do
NUM_READERS, NUM_HASHING, ITEMS_AT_ONCE = 16, 8, 512
_HASH = re.compile(r"[0-9a-f]{32}(-\d+)?")  # as S3 has it, in parts, too; other ETags say nothing of the content


def count_new_copies(to_embed: pa.Table) -> int:
    """Count the items that look like copies of others to embed, by size and a few bytes of those of one size."""
    _, groups = _find_groups(to_embed)
    return len(groups) - len(np.unique(groups))


def find_new_copies(to_embed: pa.Table, spec: DecodeSpec, stop_at_s: float) -> pa.Table:
    """Return items that look like copies of others to embed, each with the content of the other: `NEW_COPIES`.

    One of each such group is read, and what lies next to all of them, as their captions and times have to agree. After
    the monotonic time `stop_at_s` no group is begun; their items are embedded one by one.
    """
    rows, groups = _find_groups(to_embed)
    if not len(rows):
        return NEW_COPIES.empty_table()
    LOG.info(f"{plural(len(rows), 'item')} with the size and some bytes of another new one: one of each kind is read")
    carried = spec.steps.carried if spec.steps is not None else ()
    names = ["item_id", "uri", "caption", "caption_uri", "is_media", "described_by", *carried]
    alike = to_embed.select(names).take(pa.array(rows)).append_column("group", pa.array(groups))
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    starts = starts[np.flatnonzero(np.diff(starts // ITEMS_AT_ONCE, prepend=-1))]  # pieces of whole groups
    pieces = [alike.slice(start, stop - start) for start, stop in pairwise([*starts.tolist(), len(rows)])]

    def find(piece: pa.Table) -> pa.Table:
        if time.monotonic() >= stop_at_s:
            return NEW_COPIES.empty_table()
        with SandboxedDecoder(spec.limits) as sandbox, closing(ContentReader(spec, sandbox)) as reader:
            return _find_in(piece, reader, stop_at_s)

    with ThreadPoolExecutor(NUM_HASHING, "read copies") as pool:
        found = pa.concat_tables(pool.map(find, pieces))
    if time.monotonic() >= stop_at_s:
        LOG.warning("the time to look for copies is over: those that were not found are computed like all others")
    return found


def _find_in(piece: pa.Table, reader: ContentReader, stop_at_s: float) -> pa.Table:
    first: dict[str, dict[str, Any]] = {}
    last_group = -1
    found: dict[str, list[str]] = {name: [] for name in NEW_COPIES.names}
    for item in piece.to_pylist():
        if item["group"] != last_group:
            first, last_group = {}, item["group"]
            if time.monotonic() >= stop_at_s:
                break
        caption = reader.captions.read(item, None)
        if caption.problem is not None:
            continue
        suffix = suffix_of(name_in(item["uri"]))  # by which a file that can't be read is a reject, or left out
        key = json.dumps([suffix, caption.caption, caption.beside], sort_keys=True, default=str)
        original = first.setdefault(key, item)
        if original is item:
            continue
        if "version" not in original:
            original["version"] = reader.version_of(original)
        if original["version"] is None:
            first[key] = item
            continue
        for name, value in zip(found, (item["item_id"], original["item_id"], original["version"]), strict=True):
            found[name].append(value)
    return pa.table(found, NEW_COPIES)


def _find_groups(to_embed: pa.Table) -> tuple[Rows, Rows]:
    """Return the rows of items that look like others, group by group in their order, and the group of each."""
    is_meant = pc.and_(pc.is_null(to_embed["error_type"]), pc.greater(pc.fill_null(to_embed["size_bytes"], 0), 0))
    is_meant = pc.and_not(is_meant, pc.is_in(to_embed["reason"], pa.array(NOT_MEANT)))
    rows = np.flatnonzero(is_meant.to_numpy())
    rows, _ = _find_repeated(rows, to_embed["size_bytes"].take(pa.array(rows)).to_numpy())
    looks = _looks_of(to_embed.select(["uri", "size_bytes", "modified"]).take(pa.array(rows)))
    return _find_repeated(rows[looks != 0], looks[looks != 0])


def _find_repeated(rows: Rows, keys: NDArray[Any]) -> tuple[Rows, Rows]:
    """Return the rows whose key others have, sorted by key, then row, and the number of the key of each."""
    _, numbers, counts = np.unique(keys, return_inverse=True, return_counts=True)
    order = np.argsort(numbers, kind="stable")
    order = order[counts[numbers[order]] > 1]
    return rows[order], numbers[order]


def _looks_of(items: pa.Table) -> Hashes:
    """Return a hash of each item's size with its ETag or a few bytes: uint64 (N,); 0 where these are not to be had."""
    pieces = items.to_batches(max_chunksize=ITEMS_AT_ONCE)
    with ThreadPoolExecutor(NUM_READERS, "compare") as pool:
        found = list(pool.map(lambda piece: [_look(**item) for item in piece.to_pylist()], pieces))
    return np.array([look for piece in found for look in piece], np.uint64)


def _look(uri: str, size_bytes: int, modified: str | None) -> int:
    path, part = split_uri(uri)
    if is_remote(path):
        tag = (modified or "").partition("|")[0]
        seen = tag.encode() if part is None and _HASH.fullmatch(tag) else b""
    else:
        try:
            with closing(open_item(uri, max_bytes=0)) as ranges:
                is_whole = ranges.size == size_bytes
                seen = ranges.read_at(max(0, size_bytes - SEEN_BYTES) // 2, SEEN_BYTES) if is_whole else b""
        except FetchError:  # the run says why when it reads the item
            seen = b""
    return int.from_bytes(blake2b(b"%d %b" % (size_bytes, seen), digest_size=8).digest()) if seen else 0
