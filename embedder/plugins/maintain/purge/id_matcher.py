"""Exact matching of items' names in texts, so that a purge neither misses an item nor matches another one."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any

from embedder.storage.printable import printable
from shards.file_schema import parse_json

GONE = "[purged]"
MIN_TEXT_LENGTH = 4
MIN_NUMBER_LENGTH = 6
MAX_NESTED = 40
"""Nesting depth of groups in a pattern; only maliciously made names need more."""

# A name ends where no letter, digit, dot or dash follows: `a.jpg` is neither in `aa.jpg` nor in `a.jpg.png`, but it is
# in `/pictures/a.jpg: broken` and at the end of a sentence.
_BEFORE, _AFTER = r"(?<![\w.\-])", r"(?![\w/\-]|\.\w)"


class ItemNames:
    """Ids and URIs of some items, with a search for them in texts."""

    def __init__(self, ids: Collection[str], uris: Collection[str] = ()) -> None:
        """Prepare the search for ids, and for the URIs of the items, which error messages may have instead."""
        self.ids = frozenset(ids)
        self.exact = self.ids | frozenset(uris)
        self._names = {printable(name): name for name in self.exact} | {name: name for name in self.exact}  # as in logs
        loose = set(filter(_is_telling, self._names))
        quoted = {f"{quote}{name}{quote}" for name in self._names.keys() - loose for quote in "'\"`"}
        self._pattern = re.compile(f"{_BEFORE}{any_of(sorted(loose))}{_AFTER}|{any_of(sorted(quoted))}")

    def found_in(self, value: Any) -> frozenset[str]:
        """Return the ids and URIs in a text, or in any text in nested lists and objects.

        Short names and numbers (`7`, `red`) count only if they are the whole text or quoted; elsewhere they mostly mean
        something else.
        """
        found = set()
        for text in texts_in(value):
            if text in self.exact:
                found.add(text)
            for match in self._pattern.finditer(text):
                found.add(self._names[match[0] if match[0] in self._names else match[0][1:-1]])  # else it is quoted
        return frozenset(found)

    def removed_from(self, value: Any) -> Any:
        """Copy the value with `[purged]` in place of each name."""
        return map_texts(value, lambda text: GONE if text in self.exact else self._pattern.sub(GONE, text))


def _is_telling(name: str) -> bool:
    return len(name) >= (MIN_NUMBER_LENGTH if name.isdigit() else MIN_TEXT_LENGTH)


def any_of(names: Sequence[str], depth: int = 0) -> str:
    """Return a pattern for the longest of some sorted, unique names, in which each common prefix occurs once.

    With plain alternatives, thousands of names would all be tried at each position of a text. `depth` is the number of
    groups around the pattern.
    """
    if not names:
        return r"(?!)"
    if depth == MAX_NESTED:
        return f"(?:{'|'.join(re.escape(name) for name in sorted(names, key=len, reverse=True))})"
    pairs = zip(names[0], names[-1], strict=False)
    shared = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    rest = [name[len(shared) :] for name in names]
    ends_here = rest[0] == ""
    branches = [any_of([*group], depth + 1) for _, group in groupby(rest[ends_here:], key=lambda each: each[0])]
    return (
        re.escape(shared) + (f"(?:{'|'.join(branches)})" if branches else "") + ("?" if ends_here and branches else "")
    )


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, including keys; a text that is itself JSON is parsed."""
    if isinstance(value, str):
        yield value
        yield from texts_in(_parse(value))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield str(key)
            yield from texts_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Copy the value with each text changed; one that is itself JSON stays JSON."""
    if isinstance(value, str):
        inner = _parse(value)
        changed = change(value)
        return changed if inner is None or changed == GONE else json.dumps(map_texts(inner, change))
    if isinstance(value, dict):
        return {change(key): map_texts(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(each, change) for each in value]
    return value


def _parse(text: str) -> Any:
    if not text.startswith(("{", "[")):
        return None
    try:
        return parse_json(text)
    except ValueError:
        return None
