"""Checks of a tokenizer.json: that it fits a text tower, and which texts it knows a word of."""

import unicodedata
from typing import Any

from shards.config import TOKENIZER_FILE
from shards.errors import ModelError
from shards.towers.kinds import TextTower

WORD_MARKS = "\u2581\u0120#"
"""Marks by which tokens tell that a word begins (SentencePiece, byte-level BPE) or goes on (WordPiece)."""


def parse_tokenizer(content: str, where: str) -> Any:
    """Read the content of a tokenizer.json.

    Raises:
        ModelError: it is no JSON object, or one of something else.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(content)
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        found = "no JSON object" if not content.lstrip().startswith("{") else f"none that can be read ({error!s:.200})"
        raise ModelError(f"{where}: the tokeniser is {found}; give the content of a {TOKENIZER_FILE}") from None


def check_tokenizer(tokenizer: Any, text: TextTower, where: str) -> None:
    """Check that a tokeniser's ids fit the text tower, and that it begins captions with [CLS].

    Args:
        tokenizer: as `parse_tokenizer` gives it.
        text: configuration of the text tower.
        where: file or folder, for the message.

    Raises:
        ModelError: they don't, or it doesn't.
    """
    # Ids may have gaps, so their number is not enough; a table of more rows than tokens is padded, and fine.
    num_tokens = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
    if num_tokens > text.num_vocabulary:
        raise ModelError(
            f"{where}: the tokeniser has {num_tokens} tokens, the text tower knows {text.num_vocabulary}; "
            "bring the tokeniser that this tower was trained with"
        )
    ids = tokenizer.encode("").ids
    if text.end_id is not None and text.end_id not in ids:
        raise ModelError(
            f"{where}: the tokeniser gives an empty caption the ids {ids}, without the end token {text.end_id} where "
            "the text tower pools; bring the tokeniser that this tower was trained with"
        )
    if text.has_fixed_length and (tokenizer.padding or {}).get("length") is None:
        raise ModelError(
            f"{where}: the tokeniser doesn't pad, and a {text.label} tower takes captions padded to one length; "
            f'give its {TOKENIZER_FILE} a padding of the strategy "Fixed"'
        )
    if not ids:
        raise ModelError(
            f"{where}: the tokeniser adds no [CLS] to a caption; give its {TOKENIZER_FILE} a post-processor that does"
        )


def knows_a_word(tokenizer: Any, text: str) -> bool:
    """Whether a tokeniser knows a word of a text, or a piece of one: a letter, a digit or a symbol.

    Signs of punctuation are none. One that knows all bytes, as CLIP's, knows every word.

    Args:
        tokenizer: as `parse_tokenizer` gives it.
        text: anything.
    """
    found = tokenizer.encode(text)
    columns = zip(found.ids, found.tokens, found.attention_mask, found.special_tokens_mask, strict=True)
    tokens = [(number, token) for number, token, is_used, is_added in columns if is_used and not is_added]
    name = getattr(tokenizer.model, "unk_token", None)
    unknown_id = tokenizer.token_to_id(name) if name is not None else None
    # Unigrams tell the text itself where they know nothing of it, and have no name for it.
    known = [token for number, token in tokens if number != unknown_id and tokenizer.id_to_token(number) == token]
    if len(known) == len(tokens):
        return bool(tokens)
    return any(_is_content(character) for token in known for character in token.strip(WORD_MARKS))


def _is_content(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] in "LN" or category == "So"
