"""Error for ids that are not in a store, with suggestions."""

import difflib
from collections.abc import Mapping, Sequence

from embedder.errors import StoreError
from embedder.quantities import agree, plural
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.tables.tables import RecordTable

MAX_LISTED = 10
MAX_COMPARED = 3
"""Unknown ids for which similar ones are searched: a file of thousands is no misspelling."""
MAX_KNOWN = 20_000
"""Number of items that they are compared with, which takes a second."""


def refuse_unknown(files: StoreFiles, unknown: Mapping[str, Sequence[str]], num_asked: int) -> None:
    """Refuse a purge if some items are not in the store; otherwise it would look like success.

    `unknown` maps ids that are not in the store to texts in which they occur as words. Raises StoreError if it isn't
    empty.
    """
    if not unknown:
        return
    known = _known_items(files)
    listed = sorted(unknown)[:MAX_LISTED]
    texts = [
        repr(each) + _hint(near_ids(each, known) if place < MAX_COMPARED else [], unknown[each])
        for place, each in enumerate(listed)
    ]
    more = f" and {len(unknown) - len(listed):,} more" if len(unknown) > len(listed) else ""
    raise StoreError(
        f"purge: {len(unknown):,} of {plural(num_asked, 'id')} {agree(len(unknown), 'is', 'are')} unknown to store "
        f"{files.address}, in every version, and not purged before: {', '.join(texts)}{more}; nothing was purged: "
        "correct what is unknown, or leave it out"
    )


def _hint(near: Sequence[str], texts: Sequence[str]) -> str:
    if near:
        return f" (did you mean {' or '.join(map(repr, near))}?)"
    return f" (a word of {texts[0]}, no item)" if texts else ""


def near_ids(item_id: str, known: Mapping[str, str]) -> list[str]:
    """Return up to two items that may be meant by an unknown id.

    The id may be misspelt, a URI or path of the item, or a path below or above its own. `known` maps item ids to URIs.
    """
    by_path = [
        each
        for each, uri in known.items()
        if item_id == uri or each.endswith(f"/{item_id}") or item_id.endswith(f"/{each}")
    ]
    return by_path[:2] or difflib.get_close_matches(item_id, known, n=2, cutoff=0.8)


def _known_items(files: StoreFiles) -> dict[str, str]:
    known: dict[str, str] = {}
    current = read_current(files)
    if current is None:
        return known
    table = RecordTable(files, "items", current.items)
    for path in table.paths():
        rows = table.read(["item_id", "uri"], [path]).slice(0, MAX_KNOWN - len(known))
        known.update(zip(rows["item_id"].to_pylist(), rows["uri"].to_pylist(), strict=True))
        if len(known) >= MAX_KNOWN:
            break
    return known
