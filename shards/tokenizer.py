"""Checks that a tokenizer.json fits a text tower."""

import json
from typing import Any

from shards.config import TOKENIZER_FILE
from shards.errors import ModelError
from shards.towers.kinds import TextTower


def parse_tokenizer(content: str, where: str) -> Any:
    """Read the content of a tokenizer.json.

    Raises:
        ModelError: it is no JSON object.
    """
    from tokenizers import Tokenizer

    try:
        is_object = isinstance(json.loads(content), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise ModelError(f"{where}: the tokeniser is no JSON object; give the content of a {TOKENIZER_FILE}")
    return Tokenizer.from_str(content)


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
