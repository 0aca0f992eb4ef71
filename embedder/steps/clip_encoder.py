"""Token ids of all that the frames of a clip are in, for a model that takes a segment's frames as one sequence."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shards.clip_sequence import ClipForm
from shards.model_config import TOKENIZER_FILE
from shards.model_errors import ModelError
from shards.tokenizer import parse_tokenizer


class ClipEncoder:
    """Tokeniser of a model folder, which writes a clip's conversation whole."""

    def __init__(self, form: ClipForm, tokenizer_json: str, prompt: str) -> None:
        """Read the tokeniser from the content of tokenizer.json; a ModelError if it is invalid."""
        self._form, self._prompt = form, prompt
        self._tokenizer = parse_tokenizer(tokenizer_json, f"the model's {TOKENIZER_FILE}")
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._place = self._tokenizer.token_to_id(form.place)

    def encode(self, times_s: Sequence[float], length_s: float) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return token ids, int32 (T,), with -1 - t in the place of frames at position t in time.

        `times_s` are those of the frames from the segment's start, `length_s` is its length, in seconds. Raises a
        ModelError if the tokeniser doesn't know the places.
        """
        ids = np.array(self._tokenizer.encode(self._form.write(self._prompt, times_s)).ids, np.int32)
        positions = self._form.positions(len(times_s), length_s)
        places = np.flatnonzero(ids == self._place)[-len(positions) :]  # a prompt may have the token, too
        if len(places) != len(positions):
            raise ModelError(
                f"{TOKENIZER_FILE}: a clip of {len(times_s)} frames has {len(places)} tokens {self._form.place!r}, and "
                f"{len(positions)} are expected; import the model again"
            )
        ids[places] = -1 - positions
        return ids
