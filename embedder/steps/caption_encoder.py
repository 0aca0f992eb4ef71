"""Tokenises captions: text in, token ids out."""

from typing import Any

import numpy as np

from embedder.compat.locked_property import locked_cached_property
from shards.file_schema import parse_json
from shards.model_config import TOKENIZER_FILE
from shards.tokenizer import QueryText, knows_a_word, parse_tokenizer, read_query

# The tokeniser truncates only after tokenising everything, and takes seconds for a word of a megabyte. A token has at
# most about 16 characters, and no tower takes more than a few hundred tokens.
MAX_CHARACTERS = 1 << 16

Array = np.ndarray[Any, np.dtype[np.int32]]


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
        self._json, self._end_id, self._prompt = tokenizer_json, end_id, prompt
        padding = self._tokenizer.padding
        if padding is not None and padding["length"] is not None:
            self._tokenizer.enable_padding(**(padding | {"length": max_tokens, "pad_to_multiple_of": None}))
        else:
            self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)

    def encode(self, caption: str) -> Array:
        """Return token ids with the special tokens; int32 (T,)."""
        ids = np.array(self._tokenizer.encode(self._prompt + caption[:MAX_CHARACTERS]).ids, np.int32)
        if self._end_id is None:
            return ids
        (ends,) = np.nonzero(ids == self._end_id)
        return ids[: ends[0] + 1] if len(ends) else ids

    def read_part(self, caption: str) -> str | None:
        """Return the beginning of a caption that fits the model's limit; None if all of it does."""
        found = self._tokenizer.encode(self._prompt + caption[:MAX_CHARACTERS])
        if not found.overflowing and len(caption) <= MAX_CHARACTERS:
            return None
        return caption[: max(max((stop for _, stop in found.offsets), default=0) - len(self._prompt), 0)]

    def knows(self, caption: str) -> bool:
        """Return whether the tokeniser knows a word of a caption, or part of one."""
        return knows_a_word(self._tokenizer, caption[:MAX_CHARACTERS])

    def query(self, text: str) -> QueryText:
        """Return a query's text in the words that the tokeniser knows, without meaningless marks at its end."""
        return read_query(self._tokenizer, text[:MAX_CHARACTERS], lambda: self._scores)

    @locked_cached_property
    def _scores(self) -> dict[str, float]:
        """Return the log probabilities of a Unigram's pieces; empty for any other tokeniser."""
        model = parse_json(self._json)["model"]
        return dict(model["vocab"]) if model.get("type") == "Unigram" else {}
