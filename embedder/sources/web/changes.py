"""States of listed addresses, which are compared to see whether a web item has changed."""

from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import CARRIED
from embedder.config_toml.run_sections import WebConfig
from embedder.sources.listing_schema import HASHED
from embedder.sources.source_errors import FetchError
from embedder.storage.web_address import is_web
from embedder.store.tables.arrow_lookup import replace_column

COMPARED = ("uri", "caption")
UNANSWERED = "unanswered"  # it differs from any answer, so the item is fetched and the reason reported


def with_states(listing: pa.Table, settings: WebConfig) -> pa.Table:
    """Fill in `modified` of items that are web addresses; others, and hashed ones, stay as they are.

    The state covers the row: address, caption and carried columns. With `revalidate`, each server is also asked (HEAD:
    ETag, else time and size); if it gives none of these, only the row is compared. `listing` has `uri`, `modified`,
    `caption`, `error_type` and carried columns.
    """
    if not pc.any(pc.match_substring_regex(listing["uri"].cast(pa.string()), "^https?://", ignore_case=True)).as_py():
        return listing
    uris, errors, modified = (listing[name].to_pylist() for name in ("uri", "error_type", "modified"))
    is_asked = (
        error is None and not (version or "").startswith(HASHED)
        for error, version in zip(errors, modified, strict=True)
    )
    numbers = [number for number, is_it in enumerate(is_asked) if is_it and is_web(uris[number])]
    if not numbers:
        return listing
    names = [*COMPARED, *(name for name in listing.schema.names if name.startswith(CARRIED))]
    rows = listing.select(names).take(pa.array(numbers)).to_pylist()
    states = [_digest(tuple(row.values())) for row in rows]
    if settings.revalidate:
        validators = _validators([row["uri"] for row in rows], settings)
        states = [f"{state}|{found}" if found else state for state, found in zip(states, validators, strict=True)]
    for number, state in zip(numbers, states, strict=True):
        modified[number] = state
    return replace_column(listing, "modified", pa.array(modified, pa.string()))


def _digest(values: tuple[object, ...]) -> str:
    return "row:" + blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _validators(addresses: list[str], settings: WebConfig) -> list[str]:
    from embedder.sources.web.client import WebClient

    client = WebClient(settings)

    def ask(address: str) -> str:
        try:
            return client.validator(address)
        except FetchError:
            return UNANSWERED

    try:
        with ThreadPoolExecutor(settings.parallel, "ask") as pool:
            return list(pool.map(ask, addresses))
    finally:
        client.close()
