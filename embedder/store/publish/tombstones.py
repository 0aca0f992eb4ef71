"""Record of purged items as keyed hashes, so that later runs leave them out without the store naming them."""

import hashlib
import secrets
from collections.abc import Collection, Iterable
from datetime import datetime

import pyarrow as pa
from pydantic import Field

from embedder.errors import StoreError
from embedder.quantities import plural
from embedder.storage.hashed_rows import DUPLICATE
from embedder.store.files import StoreFiles
from embedder.store.layout import Record, read_record, swap_record

PURGED_FILE = "purged.json"


class PurgedIds(Record):
    """`purged.json`: hashes under a key of this store, so that the lists of two stores can't be compared."""

    key: str = Field(description="32 random bytes, in hex")
    hashes: dict[str, datetime] = Field(description="hash of an item_id -> when it was purged")
    unfinished: tuple[str, ...] = Field((), description="hashes of items whose purge was begun and has not ended")

    def hash_of(self, item_id: str) -> str:
        """Return BLAKE2b-128 of the id under the store's key, in hex."""
        return hashlib.blake2b(item_id.encode(), key=bytes.fromhex(self.key), digest_size=16).hexdigest()


def read_purged(files: StoreFiles) -> PurgedIds:
    """Read the record; before the first purge it is empty, with a fresh key."""
    return read_record(files, PURGED_FILE, PurgedIds) or PurgedIds(key=secrets.token_hex(32), hashes={})


def remember_purged(files: StoreFiles, item_ids: Collection[str]) -> None:
    """Record items as purged, so that later runs leave them out."""
    fresh, now = read_purged(files), files.environment.now()

    def with_items(record: PurgedIds | None) -> PurgedIds:
        known = record or fresh
        new = {known.hash_of(item_id): now for item_id in item_ids}
        unfinished = tuple(sorted({*known.unfinished, *new}))
        return known.model_copy(update={"hashes": new | known.hashes, "unfinished": unfinished})

    swap_record(files, PURGED_FILE, PurgedIds, with_items)


def finish_purge(files: StoreFiles, item_ids: Collection[str]) -> None:
    """Record that no version has anything of these items any more."""

    def without_items(record: PurgedIds | None) -> PurgedIds | None:
        if record is None:
            return None
        done = {record.hash_of(item_id) for item_id in item_ids}
        return record.model_copy(update={"unfinished": tuple(each for each in record.unfinished if each not in done)})

    swap_record(files, PURGED_FILE, PurgedIds, without_items)


def check_purges(files: StoreFiles) -> None:
    """Raise StoreError if a purge was interrupted: earlier versions may then hold data of a purged item."""
    if num_unfinished := len(read_purged(files).unfinished):
        raise StoreError(
            f"store {files.address}: a purge of {plural(num_unfinished, 'item')} was cut off, and earlier versions "
            "may hold some of it; run the same `embedder purge` again, then roll back"
        )


def purged_before(files: StoreFiles, item_ids: Iterable[str]) -> set[str]:
    """Return the items that were purged and not allowed again, or whose purge has not ended."""
    known = read_purged(files)
    hashes = {*known.hashes, *known.unfinished}
    return {item_id for item_id in item_ids if known.hash_of(item_id) in hashes}


def allow_again(files: StoreFiles, item_ids: Collection[str]) -> int:
    """Forget that these items were purged, so that the next run embeds them; return how many were."""
    known = read_purged(files)
    forgotten = {known.hash_of(item_id) for item_id in item_ids} & known.hashes.keys()

    def without_items(record: PurgedIds | None) -> PurgedIds | None:
        if record is None:
            return None
        rest = {digest: time for digest, time in record.hashes.items() if digest not in forgotten}
        return record.model_copy(update={"hashes": rest})

    if forgotten:
        swap_record(files, PURGED_FILE, PurgedIds, without_items)
    return len(forgotten)


def without_purged(listing: pa.Table, known: PurgedIds) -> pa.Table:
    """Return the listing (with `item_id`) without the items in a record."""
    if not known.hashes:
        return listing
    ids = ({item_id, item_id.partition(DUPLICATE)[0]} for item_id in listing["item_id"].to_pylist())
    stays = [known.hashes.keys().isdisjoint(map(known.hash_of, each)) for each in ids]
    return listing.filter(pa.array(stays, pa.bool_()))
