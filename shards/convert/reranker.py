"""Import of a re-ranker of Qwen3-VL-Reranker's form: a decoder with eyes that answers a pair with yes or no.

The score of a query with a document is the sigmoid of the difference between the logits of "yes" and "no" at the last
token. A model folder holds that difference as a projection to two values, the second of which is always 1: of length 1,
their ratio is what it was. Source: the script of Qwen3-VL-Reranker (`Qwen3VLReranker`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shards.convert.known_files import describe_import, write_record
from shards.convert.one_tower import import_one_tower
from shards.convert.preprocessing import load_fast_tokenizer
from shards.model_config import ModelConfig, find_model_folder
from shards.model_errors import ModelError
from shards.preprocess import QUERY_PLACE

if TYPE_CHECKING:
    import torch

RULE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
FRONT = f"<Instruct>: {INSTRUCTION}<Query>:{QUERY_PLACE}\n<Document>:"
_TABLES = ("lm_head.weight", "model.language_model.embed_tokens.weight", "language_model.embed_tokens.weight")
"""Names of the table of logits: its own, else that of the tokens, where both are one."""


def import_reranker(src: str | Path, out: str | Path, *, name: str | None = None) -> ModelConfig:
    """Convert a re-ranker's checkpoint with its processor into a model folder for `embedder.YesNoReranker`.

    `out` must be missing or empty; `name` defaults to the name of the folder `src`. Raises a ModelError if the
    checkpoint has something that can't be mapped, or lacks something.
    """
    folder = find_model_folder(src)
    vocabulary = load_fast_tokenizer(folder).get_vocab()
    answers = [vocabulary.get(word) for word in ("yes", "no")]
    if None in answers:
        raise ModelError(
            f"{folder}: its tokeniser has no token for yes or no; give a re-ranker of Qwen3-VL-Reranker's form"
        )

    def heads(files: Mapping[str, Path], width: int, num_tokens: int) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        from shards.loading import read_tensor

        table = next((each for each in _TABLES if each in files), _TABLES[0])
        rows = read_tensor(files, table, (num_tokens, width))[answers].float()
        weight = torch.stack([rows[0] - rows[1], torch.zeros(width)])
        for side in ("vision", "text"):
            yield f"{side}_head.projection.weight", weight.clone()
            yield f"{side}_head.projection.bias", torch.tensor([0.0, 1.0])

    config = import_one_tower(folder, Path(out), name or Path(src).name, pair=(RULE, FRONT), heads=heads)
    write_record(Path(out), describe_import(folder, "transformers", config, None))
    return config
