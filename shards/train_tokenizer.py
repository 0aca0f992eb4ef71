"""Make a Unigram tokeniser with [CLS] and [SEP] from captions; the same captions give the same bytes.

The trainer of the `tokenizers` library sums in the order of a hash table, so its scores, and which of equal pieces it
keeps, change from run to run. This is the same algorithm in a fixed order; `tokenizers` only runs the result.

Source: Kudo 2018, "Subword Regularization", section 3.2, and SentencePiece 0.2 `unigram_model_trainer.cc`.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

SPECIAL_TOKENS = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = 1000
MAX_PIECE_CHARS = 16
MAX_WORD_CHARS = 48  # longer ones are addresses and noise; their characters are still learnt
MAX_WORDS = 100_000  # the most frequent; each takes 100 us per pass
SEEDS_PER_PIECE = 10  # candidates in the first pass for each wanted piece
NUM_EM_PASSES = 2  # between two prunings, as in SentencePiece
KEPT_BY_PRUNING = 0.75
# A piece with a lower expected count in the corpus is dropped. Source: SentencePiece, `RunMStep`.
MIN_EXPECTED_COUNT = 0.5

Scores = dict[str, float]


def train_tokenizer(captions: Iterable[str], vocab_size: int = VOCABULARY) -> str:
    """Train a tokeniser on captions, in any order; returns the content of a tokenizer.json.

    `vocab_size` limits the tokens, including special ones; all characters are kept, so a corpus of very many characters
    may exceed it.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    scores = learn_pieces(count_words(tokenizer, captions), max(vocab_size - len(SPECIAL_TOKENS), 1))
    pieces = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    vocabulary = [*((token, 0.0) for token in SPECIAL_TOKENS), *pieces]
    tokenizer.model = models.Unigram(vocabulary, SPECIAL_TOKENS.index("<unk>"), False)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(name, SPECIAL_TOKENS.index(name)) for name in ("[CLS]", "[SEP]")],
    )
    return str(tokenizer.to_str())


def count_words(tokenizer: Any, captions: Iterable[str]) -> dict[str, int]:
    """Count the captions' words as the tokeniser cuts them, each with its leading space mark, most frequent first."""
    counts: Counter[str] = Counter()
    for caption in captions:
        normal = tokenizer.normalizer.normalize_str(caption)
        counts.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_WORDS])


def learn_pieces(words: Mapping[str, int], num_pieces: int) -> Scores:
    """Choose pieces and their log probabilities: start with too many, drop those that are missed least."""
    characters = {character for word in words for character in word}
    words = {word: count for word, count in words.items() if len(word) <= MAX_WORD_CHARS}
    scores = seed_pieces(words, characters, SEEDS_PER_PIECE * num_pieces)
    wanted = max(num_pieces, len(characters))
    while True:
        for _ in range(NUM_EM_PASSES):
            scores = _reestimate(scores, expected_counts(words, scores), characters)
        if len(scores) <= wanted:
            return scores
        scores = _prune(scores, expected_counts(words, scores), characters, wanted)


def seed_pieces(words: Mapping[str, int], characters: set[str], num_seeds: int) -> Scores:
    """Return the initial pieces: all characters, and the substrings seen at least twice that cover most text."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for start in range(len(word)):
            for stop in range(start + 1, min(start + MAX_PIECE_CHARS, len(word)) + 1):
                counts[word[start:stop]] += count
    longer = ((count * len(piece), piece) for piece, count in counts.items() if count > 1 and len(piece) > 1)
    chosen = [piece for _, piece in heapq.nsmallest(num_seeds, ((-cover, piece) for cover, piece in longer))]
    pieces = [*sorted(characters), *chosen]
    total = sum(counts[piece] * len(piece) or 1 for piece in pieces)
    return {piece: math.log((counts[piece] * len(piece) or 1) / total) for piece in pieces}


def expected_counts(words: Mapping[str, int], scores: Scores) -> dict[str, float]:
    """Return each piece's expected uses over all segmentations of all words, by probability (forward-backward)."""
    probabilities = {piece: math.exp(score) for piece, score in scores.items()}
    expected = dict.fromkeys(scores, 0.0)
    for word, count in words.items():
        _add_expected(word, count, probabilities, expected)
    return expected


def _add_expected(word: str, count: int, probabilities: Mapping[str, float], expected: dict[str, float]) -> None:
    size = len(word)
    spans = [
        (start, stop, piece, probability)
        for start in range(size)
        for stop in range(start + 1, min(start + MAX_PIECE_CHARS, size) + 1)
        if (probability := probabilities.get(piece := word[start:stop])) is not None
    ]
    forward, backward = [1.0] + [0.0] * size, [0.0] * size + [1.0]
    for start, stop, _, probability in spans:
        forward[stop] += forward[start] * probability
    for start, stop, _, probability in reversed(spans):
        backward[start] += backward[stop] * probability
    if forward[size] > 0:  # otherwise its probability underflows
        for start, stop, piece, probability in spans:
            expected[piece] += count * forward[start] * probability * backward[stop] / forward[size]


def _reestimate(scores: Scores, expected: Mapping[str, float], characters: set[str]) -> Scores:
    """Return new scores; the digamma of a count, instead of its logarithm, favours frequent pieces over rare ones."""
    counts = {
        piece: max(expected[piece], MIN_EXPECTED_COUNT)
        for piece in scores
        if expected[piece] >= MIN_EXPECTED_COUNT or piece in characters
    }
    total = _digamma(math.fsum(counts.values()))
    return {piece: _digamma(count) - total for piece, count in counts.items()}


def _prune(scores: Scores, expected: Mapping[str, float], characters: set[str], wanted: int) -> Scores:
    """Drop up to a quarter of the pieces: those that the others can replace at the least loss."""
    removable = [piece for piece in scores if piece not in characters]
    num_kept = max(wanted, int(len(scores) * KEPT_BY_PRUNING)) - (len(scores) - len(removable))
    losses = ((-expected[piece] * (scores[piece] - _best_without(piece, scores)), piece) for piece in removable)
    kept = {piece for _, piece in heapq.nsmallest(num_kept, losses)}
    return {piece: score for piece, score in scores.items() if piece in kept or piece in characters}


def _best_without(piece: str, scores: Scores) -> float:
    """Return the log probability of the best way to write a piece with the others (Viterbi)."""
    size = len(piece)
    best = [0.0] + [-math.inf] * size
    for start in range(size):
        for stop in range(start + 1, size + 1):
            score = scores.get(piece[start:stop])
            if score is not None and stop - start < size:
                best[stop] = max(best[stop], best[start] + score)
    return best[size]


def _digamma(x: float) -> float:
    """Compute the derivative of log gamma: recurrence up to 7, then the asymptotic series (error below 1e-9)."""
    result = 0.0
    while x < 7:
        result -= 1 / x
        x += 1
    square = 1 / (x * x)
    return result + math.log(x) - 0.5 / x - square * (1 / 12 - square * (1 / 120 - square / 252))
