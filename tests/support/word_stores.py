"""Stores with captions, the order that BM25 gives them by its formula, and nights that change some of them."""

import math
from collections import Counter
from functools import cache

import numpy as np
from index_stores import indexed_run, item

from embedder.retrieval.hybrid import K1, B, CaptionWords
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.tables.tables import RecordTable
from embedder.store_index.analyser import Analyser
from embedder.store_index.keep_words import open_words

WORDS = ["sea", "sun", "sand", "boat", "car", "red", "blue", "東京都", "京都", "🐱", "café", "the"]


def captions(number: int, seed: int = 0) -> list[str | None]:
    """Captions of few words, common ones and rare ones; some are empty or missing."""
    rng = np.random.default_rng(seed)
    shares = 1 / np.arange(1, len(WORDS) + 1)
    made: list[str | None] = []
    for each in range(number):
        chosen = rng.choice(WORDS, rng.integers(0, 9), p=shares / shares.sum())
        made.append(None if each % 11 == 5 else " ".join(chosen))
    return made


def night(files: StoreFiles, texts: dict[int, str | None], number: int = 0, retired=(), **options):
    """One run that brings items with these captions."""
    rows = (item(each, number, caption=text) for each, text in texts.items())
    return indexed_run(files, *rows, retired=[f"{each:04d}.jpg" for each in retired], **options)


def published_captions(files: StoreFiles) -> list[str | None]:
    """Captions of what is published, row by row."""
    return RecordTable(files, "embeddings", read_current(files).embeddings).read(["caption"])["caption"].to_pylist()


def published_words(files: StoreFiles) -> CaptionWords:
    """Words of what is published."""
    return CaptionWords(open_words(files, read_current(files).embeddings))


def by_formula(texts: list[str | None], query: str, among=None, analyser: str = "unicode") -> list[int]:
    """Rows of captions that share a term with a query, by their BM25, then by row."""
    asked = Analyser(analyser).query_terms(query)
    documents = {row: terms_of(text, analyser) for row, text in enumerate(texts) if text is not None}
    mean = sum(map(len, documents.values())) / len(documents)
    scores = {}
    for row, terms in documents.items():
        counts, score = Counter(terms), 0.0
        for term in asked:
            num_with = sum(term in other for other in documents.values())
            idf = math.log(1 + (len(documents) - num_with + 0.5) / (num_with + 0.5))
            score += idf * counts[term] / (counts[term] + K1 * (1 - B + B * len(terms) / mean))
        if score > 0 and (among is None or among[row]):
            scores[row] = score
    return sorted(scores, key=lambda row: (-round(scores[row], 9), row))


@cache
def terms_of(text: str, analyser: str) -> list[str]:
    """Terms by which a caption of `WORDS`, or of other words in Latin letters, is found."""
    asked = Analyser(analyser).query_terms(text)
    return [*asked, *"".join(word for word in text.split() if "京" in word)]


QUERIES = [
    "sea",
    "the",
    "the café",
    "red boat",
    "京都",
    "都",
    "🐱 🐱 sun",
    "sea sun sand boat car red blue the",
    "zebra",
    "",
]
