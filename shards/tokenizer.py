"""Checks of a tokenizer.json: whether it fits a text tower, and which words of a text it knows."""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shards.model_config import CONFIG_FILE, TOKENIZER_FILE
from shards.model_errors import ModelError
from shards.towers.tower_kinds import TextTower

END_MARKS = ".!?,;:\u2026\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
"""Marks that end a sentence or a part of one, including Chinese and Japanese ones."""
RARE = math.log(1e-4)
"""Log probability below which a Unigram's piece hardly occurred in its training captions. In the shipped model, `.` has
-9.6 and `cat` -6.5; a model trained on sentences gives the full stop more than -5.
"""
WORD_MARKS = "\u2581\u0120#"
"""Marks of tokens that begin a word (SentencePiece, byte-level BPE) or continue one (WordPiece)."""

FEWEST_LETTERS = {"Latin": 0.9, "Cjk": 0.8, "Hiragana": 0.8, "Katakana": 0.8, "Hangul": 0.8}
"""Letters of a token, by script, up to which a tokeniser only spells a text out. CLIP's has 0.4 in Chinese, 0.5 in
Japanese and Korean, 2.4 in German; a tokeniser of the text's own language has 1 and more in Chinese.
"""
FEWEST_IN_OTHERS = 1.2
"""The same of all other scripts. CLIP's has 0.5 in Greek, 0.8 in Russian, 1.1 in Arabic; a tokeniser of the text's own
language has 2 to 5.
"""
SCRIPT_NAMES = {"Cjk": "Chinese characters", "Latin": "accented Latin letters"}
"""Names of scripts where Unicode's own are not those that people use."""


def read_tokenizer(path: Path) -> str:
    """Read the content of a tokenizer.json; raises a ModelError if that can't be read, or is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "this is not UTF-8"
        raise ModelError(f"{path}: {reason}; give a {TOKENIZER_FILE}") from None


def parse_tokenizer(content: str, where: str) -> Any:
    """Parse the content of a tokenizer.json; raises a ModelError if it isn't one."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(content)
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        found = "no JSON object" if not content.lstrip().startswith("{") else f"none that can be read ({error!s:.200})"
        raise ModelError(f"{where}: the tokeniser is {found}; give the content of a {TOKENIZER_FILE}") from None


def check_tokenizer(tokenizer: Any, text: TextTower, where: str) -> None:
    """Raise a ModelError unless the tokeniser's ids fit the text tower and it begins captions with [CLS]."""
    # Ids may have gaps, so their number is not enough; a table with more rows than tokens is padded, and fine.
    num_tokens = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
    if num_tokens > text.num_vocabulary:
        raise ModelError(
            f"{where}: the tokeniser has {num_tokens} tokens, the text tower knows {text.num_vocabulary}; "
            "bring the tokeniser that this tower was trained with"
        )
    ids = tokenizer.encode("").ids
    if text.end_id is not None and text.end_id not in ids:
        added = tokenizer.id_to_token(text.end_id) if ids and ids[-1] < text.end_id else None
        cure = "bring the tokeniser that this tower was trained with"
        if added:
            cure += f"; if {added!r} was added behind the end token, write eos_token_id = {ids[-1]} into {CONFIG_FILE}"
        raise ModelError(
            f"{where}: the tokeniser gives an empty caption the ids {ids}, without the end token {text.end_id} where "
            f"the text tower pools; {cure}"
        )
    if text.has_fixed_length and (tokenizer.padding or {}).get("length") is None:
        raise ModelError(
            f"{where}: the tokeniser doesn't pad, and a {text.label} tower takes captions padded to one length; "
            f'give its {TOKENIZER_FILE} a padding of the strategy "Fixed"'
        )
    if not ids and text.needs_special_tokens:
        raise ModelError(
            f"{where}: the tokeniser adds no [CLS] to a caption; give its {TOKENIZER_FILE} a post-processor that does"
        )


class QueryText(NamedTuple):
    """A query's `text` to embed: without completely `unknown` words, unless all are; `partly_known` ones stay."""

    text: str
    unknown: tuple[str, ...]
    partly_known: tuple[str, ...]


def read_query(tokenizer: Any, text: str, scores: Callable[[], Mapping[str, float]]) -> QueryText:
    """Sort a query's words by whether a tokeniser knows them, and drop meaningless marks at its end.

    An unknown token, or a mark that hardly occurred in training, moves the vector as much as a word does. Marks that
    captions had (CLIP's, BERT's), and punctuation elsewhere, stay. `scores` returns the log probabilities of a
    Unigram's pieces, and nothing for other tokenisers; it is only called if the text ends in a mark.
    """
    sorted_words: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    kept = []
    for word in text.split():
        known = _knows_word(tokenizer, word)
        sorted_words[known].append(word)
        if known is not False:
            kept.append(word)
    unknown, partly_known = (tuple(dict.fromkeys(sorted_words[each])) for each in (False, None))
    is_plain = not unknown or not any(_is_content(character) for word in kept for character in word)
    return QueryText(_without_end_marks(tokenizer, text if is_plain else " ".join(kept), scores), unknown, partly_known)


def _knows_word(tokenizer: Any, word: str) -> bool | None:
    """Whether a tokeniser knows a word, as pieces or if it has only marks; None if it knows only some letters."""
    found = _tokens(tokenizer, word)
    contents = [
        is_known
        for piece, (start, stop), is_known in found
        if piece.strip(WORD_MARKS) and any(map(_is_content, word[start:stop]))
    ]
    return None if any(contents) and not all(contents) else any(contents) or not contents


def _without_end_marks(tokenizer: Any, text: str, scores: Callable[[], Mapping[str, float]]) -> str:
    """Strip end marks that the tokeniser doesn't know, or that are rare pieces of a Unigram."""
    kept = text.rstrip()
    if kept[-1:] not in END_MARKS:
        return text
    found = _tokens(tokenizer, kept)
    while found:
        piece, (start, stop), is_known = found.pop()
        marks = kept[start:stop].strip()
        is_rare = not is_known or scores().get(piece, 0.0) < RARE
        if piece.strip(WORD_MARKS) and not (marks and set(marks) <= set(END_MARKS) and is_rare):
            return kept[:stop].rstrip() or text
    return text  # it consists only of marks


def _tokens(tokenizer: Any, text: str) -> list[tuple[str, tuple[int, int], bool]]:
    """Return all but the special tokens: the piece, its characters in the text, and whether it is known."""
    found = tokenizer.encode(text, add_special_tokens=False)
    name = getattr(tokenizer.model, "unk_token", None)
    unknown_id = tokenizer.token_to_id(name) if name is not None else None
    # For unknown text, Unigrams return the text itself instead of a token for it.
    return [
        (token, offsets, number != unknown_id and tokenizer.id_to_token(number) == token)
        for number, token, offsets, is_used in zip(
            found.ids, found.tokens, found.offsets, found.attention_mask, strict=True
        )
        if is_used
    ]


def knows_a_word(tokenizer: Any, text: str) -> bool:
    """Whether a tokeniser knows any word of a text, or a piece of one (a letter, digit or symbol; not punctuation).

    A tokeniser that knows all bytes, such as CLIP's, knows every word.
    """
    tokens = _tokens(tokenizer, text)
    known = [token for token, _, is_known in tokens if is_known]
    if len(known) == len(tokens):
        return bool(tokens)
    return any(_is_content(character) for token in known for character in token.strip(WORD_MARKS))


def find_unread_script(tokenizer: Any, text: str) -> str | None:
    """Name the script of a text most of whose letters a tokeniser doesn't know, or spells out by letters or bytes.

    None if it reads half of them as pieces of words. Plain English letters are always read.
    """
    num_letters, unread = 0, Counter[str]()
    for word in text.split():
        letters = [character for character in word if _is_letter(character)]
        num_letters += len(letters)
        plain = [character for character in unicodedata.normalize("NFKC", word) if _is_letter(character)]
        if any(unicodedata.category(each)[0] == "L" for each in plain) and not "".join(plain).isascii():
            script = Counter(map(_script_of, plain)).most_common(1)[0][0]
            if len(letters) <= _num_pieces(tokenizer, word) * FEWEST_LETTERS.get(script, FEWEST_IN_OTHERS):
                unread[script] += len(letters)
    if 2 * unread.total() <= num_letters:
        return None
    script = unread.most_common(1)[0][0]
    return SCRIPT_NAMES.get(script, script)


def _num_pieces(tokenizer: Any, word: str) -> float:
    """Count the tokens of a word's letters; infinite with one that isn't known."""
    found = [
        is_known
        for piece, (start, stop), is_known in _tokens(tokenizer, word)
        if piece.strip(WORD_MARKS) and any(map(_is_letter, word[start:stop]))
    ]
    return len(found) if all(found) else math.inf


def _is_letter(character: str) -> bool:
    return unicodedata.category(character)[0] in "LM"


def _script_of(letter: str) -> str:
    return unicodedata.name(letter, "unknown").split()[0].capitalize()


def _is_content(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] in "LN" or category == "So"
