"""Analysis of captions and queries: the terms that two texts share where they are about the same.

Captions are cut into tokens by Unicode's categories of characters, in Arrow (RE2); the rest is a function of one token,
so of all captions it sees each different token once:

- `unicode`: case, accents, vowel signs of Arabic and Hebrew, and forms of characters make no difference (NFKD, case
  folding, NFKC). Emoji and other symbols are terms. Scripts without spaces between words (Chinese, Japanese, Korean,
  Thai, Lao, Khmer, Burmese) give each character and each pair of neighbours; a query asks for the pairs.
- a language, as `english`: the same, and words are compared by their stems, by the Snowball stemmers of PyStemmer.

Source: the bigrams are those of Lucene's CJKBigramFilter.
"""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

UNICODE = "unicode"
RULES = 1
"""Version of these rules; an index by others is built anew."""

Terms = np.ndarray[Any, np.dtype[np.uint64]]
"""Hashes of terms; of ten million different ones, two are equal with a probability of 3 in a million."""

_BETWEEN = r"[^\p{L}\p{M}\p{N}\p{So}]+"
_ASCII_TOKEN = re.compile("[A-Za-z0-9]+")  # what that leaves of ASCII
# Accents, enclosing marks, variation selectors; points of Hebrew, vowels of Arabic and the line that lengthens it.
_MARKS = re.compile("[\u0300-\u036f\u20d0-\u20ff\ufe00-\ufe0f\u0591-\u05bd\u05bf-\u05c7\u0640\u064b-\u065f\u0670]+")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3040-\u318f"
    "\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff"
    "\U0001f1e6-\U0001f1ff]"  # the last: the letters of flags
)


class Analyser:
    """Terms of captions and of queries; safe for several threads."""

    def __init__(self, name: str = UNICODE) -> None:
        self.name = name

    def query_terms(self, text: str) -> list[str]:
        """Terms of a query, in its order; one that stands there twice is there twice."""
        # The expression takes 5 ms to compile, each time.
        tokens = _ASCII_TOKEN.findall(text) if text.isascii() else split(pa.array([text])).to_pylist()[0]
        stem = self._stemmer()
        return [term for token in tokens for term in _terms(token, stem, is_query=True)]

    def index_terms(self, tokens: Sequence[str]) -> tuple[np.ndarray[Any, np.dtype[np.int64]], Terms]:
        """Terms by which captions with some tokens are found.

        Args:
            tokens: T of them, of `split`.

        Returns:
            The number of terms of each token, int64 (T,), and the hashes of all of them, token after token.
        """
        stem, known = self._stemmer(), dict[str, int]()
        numbers, hashes = np.empty(len(tokens), np.int64), list[int]()
        for place, token in enumerate(tokens):
            terms = _terms(token, stem, is_query=False)
            numbers[place] = len(terms)
            for term in terms:
                if term not in known:
                    known[term] = hash_term(term)
                hashes.append(known[term])
        return numbers, np.array(hashes, np.uint64)

    def _stemmer(self) -> Callable[[str], str]:
        if self.name == UNICODE:
            return _fold
        import Stemmer  # type: ignore[import-not-found]

        stem = Stemmer.Stemmer(self.name, 0).stemWord  # one for each call: it has a state
        # English borrows its accents; other languages' stems depend on them.
        return (lambda word: stem(_fold(word))) if self.name == "english" else (lambda word: _fold(stem(word)))


def split(captions: pa.Array) -> pa.ListArray:
    """Tokens of each caption: runs of letters, marks, digits and symbols, as they are written; some may be empty."""
    return pc.split_pattern_regex(captions.cast(pa.string()), pattern=_BETWEEN)


def hash_term(term: str) -> int:
    """Hash of a term, 64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(term.encode(errors="replace"), digest_size=8).digest(), "little")


def _terms(token: str, stem: Callable[[str], str], *, is_query: bool) -> list[str]:
    """Terms of one token."""
    if token.isascii():
        return [stem(token.lower())] if token else []
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", token).casefold())
    found: list[str] = []
    for kind, characters in groupby(text, _kind):
        run = "".join(characters)
        if kind == "word":
            found.append(stem(run))
        elif kind == "symbols":
            found += run
        elif kind == "unspaced":
            pairs = [run[start : start + 2] for start in range(len(run) - 1)]
            found += pairs if is_query and pairs else [*run, *pairs]
    return [term for term in found if term]


def _fold(word: str) -> str:
    """Word without accents; empty where there is nothing else."""
    if word.isascii():
        return word
    return unicodedata.normalize("NFKC", _MARKS.sub("", unicodedata.normalize("NFKD", word)))


def _kind(character: str) -> str:
    if _UNSPACED.match(character):
        return "unspaced"
    category = unicodedata.category(character)
    return "word" if category[0] in "LMN" else "symbols" if category == "So" else ""
