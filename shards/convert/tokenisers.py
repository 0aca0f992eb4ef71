"""Tokenisers of checkpoints, as one tokenizer.json that the `tokenizers` library reads."""

import json
from pathlib import Path
from typing import Any

from shards.config import TOKENIZER_FILE, TextConfig, read_json
from shards.errors import ModelError
from shards.tokenizer import check_tokenizer, parse_tokenizer

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def import_tokenizer(folder: Path, text: TextConfig) -> str:
    """Read a checkpoint's tokeniser as transformers would, without truncation and padding.

    Returns:
        The content of tokenizer.json.

    Raises:
        ModelError: the folder has no tokeniser, it has no fast form, or its ids don't fit the text tower.
    """
    if (folder / TOKENIZER_FILE).is_file() and not (folder / TOKENIZER_CONFIG_FILE).is_file():
        tokenizer = parse_tokenizer((folder / TOKENIZER_FILE).read_text(encoding="utf-8"), str(folder))
    else:
        tokenizer = _load_through_transformers(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    check_tokenizer(tokenizer, text, str(folder))
    content: str = tokenizer.to_str()
    return content


def max_caption_tokens(folder: Path, text: TextConfig) -> int:
    """Find the longest caption: the tokeniser's limit where it has one, else that of the position table."""
    path = folder / TOKENIZER_CONFIG_FILE
    limit = read_json(path, "").get("model_max_length") if path.is_file() else None
    if not isinstance(limit, int | float):
        return text.max_position_embeddings
    return min(int(limit), text.max_position_embeddings)  # where no limit was set, transformers writes 1e30


def export_tokenizer_config(tokenizer_json: str, text: TextConfig, max_tokens: int) -> str:
    """Make the tokenizer_config.json with which transformers loads our tokenizer.json.

    Args:
        tokenizer_json: content of tokenizer.json.
        text: configuration of the text tower.
        max_tokens: longest caption.
    """
    tokenizer = parse_tokenizer(tokenizer_json, TOKENIZER_FILE)
    empty = tokenizer.encode("").tokens
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "cls_token": empty[0],
        "sep_token": empty[-1],
        "pad_token": tokenizer.id_to_token(text.pad_token_id),
    }
    return json.dumps(settings, indent=2) + "\n"


def _load_through_transformers(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{folder}: no tokeniser could be loaded ({reason}); save one beside the model ({TOKENIZER_FILE})"
        ) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{folder}: {type(tokenizer).__name__} has no fast form; convert it to {TOKENIZER_FILE} first")
    return backend
