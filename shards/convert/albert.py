"""Import of transformers' ALBERT, configuration and tensor names, as our text tower."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shards.config import TextConfig, describe
from shards.errors import ModelError

# Heads of transformers' ALBERT classes, which an encoder doesn't need, and tables that follow from the shapes.
_NOT_ENCODER = (
    "predictions.",
    "sop_classifier.",
    "classifier.",
    "qa_outputs.",
    "embeddings.position_ids",
    "embeddings.token_type_ids",
)


def import_text_config(tree: Mapping[str, Any], where: Path, *, has_pooler: bool) -> TextConfig:
    """Read an ALBERT's configuration; missing keys have transformers' defaults.

    Args:
        tree: content of config.json.
        where: its path, for messages.
        has_pooler: whether the checkpoint has a pooler; without one, tokens are averaged.

    Raises:
        ModelError: it is no ALBERT, or has something that we can't build.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AlbertConfig

    if tree.get("model_type") != "albert":
        raise ModelError(f"{where}: the text tower is {tree.get('model_type')!r}; only 'albert' can be imported")
    if tree.get("position_embedding_type", "absolute") != "absolute":
        found = tree["position_embedding_type"]
        raise ModelError(f"{where}: position_embedding_type = {found!r}; only 'absolute' can be imported")
    try:
        theirs = AlbertConfig.from_dict(dict(tree))
        fields = {key: getattr(theirs, key) for key in TextConfig.model_fields if key != "pool"}
        # Only padding has this id, and it is masked.
        fields["pad_token_id"] = fields["pad_token_id"] or 0
        return TextConfig(**fields, pool="pooler" if has_pooler else "mean")
    except StrictDataclassError as error:
        raise ModelError(f"{where}: {' '.join(str(error).split())[:200]}") from None
    except ValidationError as error:
        raise ModelError(f"{where}: text tower: {describe(error)}") from None


def rename_albert(files: Mapping[str, Path]) -> dict[str, str]:
    """Map our names to a checkpoint's, whether it is of AlbertModel or of a class with heads around it.

    Raises:
        ModelError: a tensor belongs neither to the encoder nor to a known head.
    """
    renamed: dict[str, str] = {}
    for name, path in files.items():
        inner = name.removeprefix("albert.")
        if inner.startswith(("embeddings.", "encoder.", "pooler.")) and not inner.startswith(_NOT_ENCODER):
            renamed[f"text.{inner}"] = name
        elif not inner.startswith(_NOT_ENCODER):
            raise ModelError(f"{path}: found the tensor {name}, which no ALBERT of transformers has")
    return renamed
