"""How well a text and an image are searched with together, and what examples to stay away from change.

    python scripts/measure_combined.py runs/demo/store
    python scripts/measure_combined.py runs/demo/store --text-weight 0.4 --not-weight 0.7

The store needs captions; `scripts/demo` makes one. Together: for each two captions that differ in one word of `SWAPS`,
as "person running" and "woman running", the image of the first and the word of the second are searched with, and the
second's image is looked for; the query's own image is left out. Beside it stand the image alone and the text alone.
Away: for each word that stands in `MIN_CAPTIONS` captions or more and another that stands in 15 to 60 % of these, the
first is searched with, away from the second; told is the share of the ten best whose captions have either word, with
and without. All vectors are compared, so no index takes part. The last line is one JSON document.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

import embedder
from embedder.retrieval.search import combine
from embedder.store.arrow_tensors import unpack_vectors
from index.vectors import Floats

SWAPS = (("person", "woman"), ("person", "man"), ("man", "woman"), ("woman", "man"), ("face", "cat"))
MIN_CAPTIONS = 15
SHARES = (0.15, 0.6)
LITTLE_WORDS = {"with", "and", "the", "facing", "right", "left", "without", "button"}
SAMPLE_ROWS = 1000  # as searches have it

Encode = Callable[[Sequence[str]], Floats]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="folder or address of a store with captions")
    parser.add_argument("--text-weight", type=float, default=0.5, help="share of the text beside the image")
    parser.add_argument("--not-weight", type=float, default=0.5, help="weight of the word to stay away from")
    given = parser.parse_args()
    store = embedder.open_store(given.store)
    rows = store.to_arrow(["caption", "image_embedding"]).drop_null()
    captions, vectors = rows["caption"].to_pylist(), unpack_vectors(rows.combine_chunks()["image_embedding"])
    found = {
        "together": measure_together(captions, vectors, store.encode_text, given.text_weight),
        "away": measure_away(captions, vectors, store.encode_text, given.not_weight),
    }
    for name, figures in found.items():
        print(name, *(f"{key} {value:.3g}" for key, value in figures.items()), sep="\n  ")
    print(json.dumps(found))


def measure_together(captions: Sequence[str], vectors: Floats, encode: Encode, text_weight: float) -> dict[str, float]:
    """Shares of queries whose image is first (`r1`) and among ten (`r10`), by each part and by both."""
    place = {caption: number for number, caption in enumerate(captions)}
    pairs = [
        (place[caption], new, place[swapped])
        for caption in place
        for old, new in SWAPS
        if old in caption.split() and (swapped := _swapped(caption, old, new)) in place
    ]
    figures: dict[str, float] = {"num_queries": len(pairs)}
    if not pairs:
        return figures
    sample = _sample(vectors)
    texts = dict(zip((words := sorted({new for _, new, _ in pairs})), encode(words), strict=True))
    for name, weight in (("image", 0.0), ("text", 1.0), ("both", text_weight)):
        ranks = []
        for image, new, target in pairs:
            parts = [(weight, texts[new][None]), (1 - weight, vectors[image][None])]
            scores = vectors @ combine(parts, None, 0.0, sample)[0]
            scores[image] = -np.inf
            ranks.append(1 + int((scores > scores[target]).sum()))
        figures |= {f"{name}_r1": np.mean(np.equal(ranks, 1)), f"{name}_r10": np.mean(np.less_equal(ranks, 10))}
    return {key: float(value) for key, value in figures.items()}


def measure_away(captions: Sequence[str], vectors: Floats, encode: Encode, not_weight: float) -> dict[str, float]:
    """Shares of the ten best hits that have the wanted word and the unwanted one, without and with the latter."""
    words = [set(re.findall(r"\w+", caption.lower())) - LITTLE_WORDS for caption in captions]
    counts = Counter(word for each in words for word in each if len(word) > 2)
    beside = Counter((one, two) for each in words for one in each for two in each if one != two)
    pairs = [
        (one, two)
        for (one, two), count in sorted(beside.items())
        if counts[one] >= MIN_CAPTIONS and counts[two] and SHARES[0] <= count / counts[one] <= SHARES[1]
    ]
    figures: dict[str, float] = {"num_queries": len(pairs)}
    if not pairs:
        return figures
    sample = _sample(vectors)
    texts = dict(zip((known := sorted({word for pair in pairs for word in pair})), encode(known), strict=True))
    for name, weight in (("without", 0.0), ("with", not_weight)):
        shares = []
        for one, two in pairs:
            (query,) = combine([(1.0, texts[one][None])], texts[two][None], weight, sample)
            best = np.argsort(-(vectors @ query), kind="stable")[:10]
            shares.append([np.mean([word in words[number] for number in best]) for word in (one, two)])
        wanted, unwanted = np.mean(shares, axis=0)
        figures |= {f"wanted_{name}": wanted, f"unwanted_{name}": unwanted}
    return {key: float(value) for key, value in figures.items()}


def _swapped(caption: str, old: str, new: str) -> str:
    return " ".join(new if word == old else word for word in caption.split())


def _sample(vectors: Floats) -> Floats:
    return vectors[np.linspace(0, len(vectors) - 1, min(len(vectors), SAMPLE_ROWS)).round().astype(np.int64)]


if __name__ == "__main__":
    main()
