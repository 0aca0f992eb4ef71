"""Where a text names an item: exactly, so that one item's purge neither misses it nor takes another's name for it."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any

from embedder.storage.printable import printable

GONE = "[purged]"
MIN_TEXT_LENGTH = 4
MIN_NUMBER_LENGTH = 6
MAX_NESTED = 40
"""Groups of a pattern that stand in each other; more is for names made to break it."""

# A name ends where no letter, digit, dot or dash goes on: `a.jpg` is neither in `aa.jpg` nor in `a.jpg.png`, but it is
# in `/pictures/a.jpg: broken` and at the end of a sentence.
_BEFORE, _AFTER = r"(?<![\w.\-])", r"(?![\w/\-]|\.\w)"


class ItemNames:
    """Ids and URIs of some items, to be found in other texts."""

    def __init__(self, ids: Collection[str], uris: Collection[str] = ()) -> None:
        """Prepare the search.

        Args:
            ids: of the items.
            uris: under which they were read; an error message may say these instead.
        """
        self.ids = frozenset(ids)
        self.exact = self.ids | frozenset(uris)
        self._names = {printable(name): name for name in self.exact} | {name: name for name in self.exact}  # as in logs
        loose = set(filter(_is_telling, self._names))
        quoted = {f"{quote}{name}{quote}" for name in self._names.keys() - loose for quote in "'\"`"}
        self._pattern = re.compile(f"{_BEFORE}{any_of(sorted(loose))}{_AFTER}|{any_of(sorted(quoted))}")

    def are_in(self, value: Any) -> bool:
        """Whether a text, or any text in nested lists and objects, names one of the items.

        Short names and numbers (`7`, `red`) count only where they are the whole text or stand in quotes: elsewhere
        they are mostly somebody else's.
        """
        return any(True for _ in self._found(value))

    def found_in(self, value: Any) -> frozenset[str]:
        """Which ids and URIs a text names, or any text in nested lists and objects."""
        return frozenset(self._found(value))

    def _found(self, value: Any) -> Iterator[str]:
        for text in texts_in(value):
            if text in self.exact:
                yield text
            for match in self._pattern.finditer(text):
                yield self._names[match[0] if match[0] in self._names else match[0][1:-1]]  # else it stands in quotes

    def removed_from(self, value: Any) -> Any:
        """The value with `[purged]` in the place of each name."""
        return map_texts(value, lambda text: GONE if text in self.exact else self._pattern.sub(GONE, text))


def _is_telling(name: str) -> bool:
    return len(name) >= (MIN_NUMBER_LENGTH if name.isdigit() else MIN_TEXT_LENGTH)


def any_of(names: Sequence[str], depth: int = 0) -> str:
    """A pattern for the longest of some names, in which each beginning that they share stands once.

    Side by side, thousands of names would all be tried at each place of a text.

    Args:
        names: sorted, each once.
        depth: of what is nested around the pattern.
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
    """All texts in a value as JSON has them, keys included; a text that is JSON itself is opened."""
    if isinstance(value, str):
        yield value
        yield from texts_in(_opened(value))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield str(key)
            yield from texts_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with each text changed; one that is JSON itself stays JSON."""
    if isinstance(value, str):
        inner = _opened(value)
        changed = change(value)
        return changed if inner is None or changed == GONE else json.dumps(map_texts(inner, change))
    if isinstance(value, dict):
        return {change(key): map_texts(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(each, change) for each in value]
    return value


def _opened(text: str) -> Any:
    """What a text holds that is a JSON object or list."""
    if not text.startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None
