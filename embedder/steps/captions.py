"""Tokenisation of captions: text in, token ids out."""

from typing import Any

import numpy as np
from tokenizers import Tokenizer

# The tokeniser truncates after it has tokenised everything, and a word of a megabyte takes it seconds. A token has at
# most about 16 characters, and no tower takes more than a few hundred tokens.
MAX_CHARACTERS = 1 << 16

Array = np.ndarray[Any, np.dtype[np.int32]]


class CaptionEncoder:
    """Tokeniser of a model folder, which truncates at the model's caption limit."""

    def __init__(self, tokenizer_json: str, max_tokens: int) -> None:
        """Read the tokeniser.

        Args:
            tokenizer_json: content of the model folder's tokenizer.json.
            max_tokens: longer captions are cut there, [CLS] and [SEP] included.
        """
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)

    def encode(self, caption: str) -> Array:
        """Token ids with the special tokens, unpadded; int32 (T,)."""
        return np.array(self._tokenizer.encode(caption[:MAX_CHARACTERS]).ids, np.int32)
