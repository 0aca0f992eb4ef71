"""Tokenises captions: text in, token ids out."""

from copy import copy
from typing import Any, NamedTuple, Self

import numpy as np

from embedder.compat.locked_property import locked_cached_property
from embedder.quantities import plural
from shards.file_schema import parse_json
from shards.model_config import TOKENIZER_FILE
from shards.tokenizer import QueryText, find_unread_script, knows_a_word, parse_tokenizer, read_query

# The tokeniser truncates only after tokenising everything, and takes seconds for a word of a megabyte. A token has at
# most about 16 characters, and no tower takes more than a few hundred tokens.
MAX_CHARACTERS = 1 << 16

NUM_UNREAD = "num_unread"
"""Value of a row, only for the measurement: characters of its caption that are beyond a model's limit."""

Array = np.ndarray[Any, np.dtype[np.int32]]


class ReadCaption(NamedTuple):
    """What a text tower gets of a caption: token ids, int32 (T,), of its first `num_read` characters."""

    ids: Array
    num_read: int


class CaptionEncoder:
    """Tokeniser of a model folder, which truncates at the model's caption limit.

    A tokenizer.json that pads to a fixed length, as SigLIP's does, pads to that limit; any other doesn't pad.
    """

    def __init__(self, tokenizer_json: str, max_tokens: int, end_id: int | None = None, prompt: str = "") -> None:
        """Read the tokeniser from the content of tokenizer.json; a ModelError if it is invalid.

        Longer captions are cut at `max_tokens`, including special tokens. `end_id` is the token that ends a caption
        (`TextTower.end_id`); everything after the first one is cut, even if the caption's text contains it. None cuts
        nothing. `prompt` is put before each caption.
        """
        self._tokenizer = parse_tokenizer(tokenizer_json, f"the model's {TOKENIZER_FILE}")
        self._json, self._end_id, self.max_tokens, self._prompt = tokenizer_json, end_id, max_tokens, prompt
        padding = self._tokenizer.padding
        if padding is not None and padding["length"] is not None:
            self._tokenizer.enable_padding(**(padding | {"length": max_tokens, "pad_to_multiple_of": None}))
        else:
            self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)

    def with_prompt(self, prompt: str) -> Self:
        """Return an encoder that shares the tokeniser and puts another prompt before captions."""
        other = copy(self)
        other._prompt = prompt
        return other

    @property
    def room(self) -> int:
        """Number of tokens that the model's limit leaves to a caption behind the prompt."""
        num_prompt = len(self._tokenizer.encode(self._prompt, add_special_tokens=False).ids)
        return self.max_tokens - int(self._tokenizer.num_special_tokens_to_add(False)) - num_prompt

    def encode(self, caption: str) -> Array:
        """Return token ids with the special tokens; int32 (T,)."""
        return self.read(caption).ids

    def read(self, caption: str) -> ReadCaption:
        """Return token ids with the special tokens, and how much of the caption they are of."""
        found = self._tokenizer.encode(self._prompt + caption[:MAX_CHARACTERS])
        # A tokeniser without special tokens gives none for what it drops, and a tower takes one at least.
        ids = np.array(found.ids or [0], np.int32)
        ends: Any = () if self._end_id is None else np.flatnonzero(ids == self._end_id)
        num_kept = int(ends[0]) + 1 if len(ends) else len(ids)
        is_whole = not found.overflowing and len(caption) <= MAX_CHARACTERS
        if is_whole and not any(stop for _, stop in found.offsets[num_kept:]):  # what only pads has no place
            return ReadCaption(ids[:num_kept], len(caption))
        num_read = max(max((stop for _, stop in found.offsets[:num_kept]), default=0) - len(self._prompt), 0)
        return ReadCaption(ids[:num_kept], num_read if caption[num_read:].strip() else len(caption))

    def read_part(self, caption: str) -> str | None:
        """Return the beginning of a caption that fits the model's limit; None if all of it does."""
        num_read = self.read(caption).num_read
        return caption[:num_read] if num_read < len(caption) else None

    def describe_cut(self, text: str) -> str | None:
        """Return a line on what is cut of a text; None if all of it is read."""
        read = self.read_part(text)
        if read is None:
            return None
        return (
            f"the model reads {self.max_tokens:,} tokens: of the text's {plural(len(text.split()), 'word')} the first "
            f"{len(read.split()):,}, and the rest is cut"
        )

    def knows(self, caption: str) -> bool:
        """Return whether the tokeniser knows a word of a caption, or part of one."""
        return knows_a_word(self._tokenizer, caption[:MAX_CHARACTERS])

    def find_unread_script(self, text: str) -> str | None:
        """Name the script of a text that the tokeniser doesn't know or only spells out; None if it reads the text."""
        return find_unread_script(self._tokenizer, text[:MAX_CHARACTERS])

    def query(self, text: str) -> QueryText:
        """Return a query's text in the words that the tokeniser knows, without meaningless marks at its end."""
        return read_query(self._tokenizer, text[:MAX_CHARACTERS], lambda: self._scores)

    @locked_cached_property
    def _scores(self) -> dict[str, float]:
        """Return the log probabilities of a Unigram's pieces; empty for any other tokeniser."""
        model = parse_json(self._json)["model"]
        return dict(model["vocab"]) if model.get("type") == "Unigram" else {}


def note_cut(values: dict[str, Any], caption: str, num_read: int) -> None:
    """Note in a row's values how many characters of its caption a model doesn't read; of several, the most."""
    if num_read < len(caption):
        values[NUM_UNREAD] = max(len(caption) - num_read, values.get(NUM_UNREAD, 0))
