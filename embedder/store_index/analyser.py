"""Analysis of captions and queries into terms, which two texts share if they are about the same thing.

Captions are cut into tokens by Unicode's character categories, in Arrow (RE2). The rest is a function of one token, so
over all captions each distinct token is processed once:

- `unicode`: ignores case, accents, vowel signs of Arabic and Hebrew, and forms of characters (NFKD, case folding,
NFKC, variants, soft hyphens). Emoji and other symbols are terms. Scripts without spaces between words (Chinese,
Japanese, Korean, Thai, Lao, Khmer, Burmese) give each character and each pair of neighbours; a query uses the pairs.
- a language, such as `english`: the same, and words are compared by their stems (Snowball stemmers of PyStemmer).

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
RULES = 2
"""Version of these rules; an index made by other rules is rebuilt."""

Terms = np.ndarray[Any, np.dtype[np.uint64]]
"""Hashes of terms; among ten million terms, the probability that any two collide is 3 in a million."""

_BETWEEN = r"[^\p{L}\p{M}\p{N}\p{So}\x{ad}]+"
_UNSEEN = re.compile("[\u00ad\ufe00-\ufe0f\U000e0100-\U000e01ef]+")  # soft hyphens, and selectors of a variant
_ASCII_TOKEN = re.compile("[A-Za-z0-9]+")  # the ASCII that this leaves
# Accents, enclosing marks; Hebrew points, Arabic vowels and the elongation line.
_MARKS = re.compile("[\u0300-\u036f\u20d0-\u20ff\u0591-\u05bd\u05bf-\u05c7\u0640\u064b-\u065f\u0670]+")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3040-\u318f"
    "\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff"
    "\U0001f1e6-\U0001f1ff]"  # the last: the letters of flags
)


class Analyser:
    """Cuts captions and queries into terms; thread-safe."""

    def __init__(self, name: str = UNICODE) -> None:
        self.name = name

    def query_terms(self, text: str) -> list[str]:
        """Return the terms of a query in order, including repeats."""
        # The expression takes 5 ms to compile, each time.
        tokens = _ASCII_TOKEN.findall(text) if text.isascii() else split(pa.array([text])).to_pylist()[0]
        stem = self._stemmer()
        return [term for token in tokens for term in _terms(token, stem, is_query=True)]

    def index_terms(self, tokens: Sequence[str]) -> tuple[np.ndarray[Any, np.dtype[np.int64]], Terms]:
        """Return the number of terms per token of `split`, int64 (T,), and their hashes, token by token."""
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
        # English borrows its accents; stems of other languages depend on them.
        return (lambda word: stem(_fold(word))) if self.name == "english" else (lambda word: _fold(stem(word)))


def split(captions: pa.Array) -> pa.ListArray:
    """Return each caption's tokens: runs of letters, marks, digits and symbols, as written; some may be empty."""
    return pc.split_pattern_regex(captions.cast(pa.string()), pattern=_BETWEEN)


def hash_term(term: str) -> int:
    """Return a 64-bit hash of a term, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(term.encode(errors="replace"), digest_size=8).digest(), "little")


def _terms(token: str, stem: Callable[[str], str], *, is_query: bool) -> list[str]:
    if token.isascii():
        return [stem(token.lower())] if token else []
    token = _UNSEEN.sub("", token)
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
    """Return a word without accents; empty if nothing else is left."""
    if word.isascii():
        return word
    return unicodedata.normalize("NFKC", _MARKS.sub("", unicodedata.normalize("NFKD", word)))


def _kind(character: str) -> str:
    if _UNSPACED.match(character):
        return "unspaced"
    category = unicodedata.category(character)
    return "word" if category[0] in "LMN" else "symbols" if category == "So" else ""
