"""Parts that importers of transformers' towers share."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from shards.file_schema import ModelSection, describe
from shards.model_errors import ModelError

T = TypeVar("T", bound=ModelSection)


def mlp_ratio(width: int, mlp_width: int) -> float:
    """Compute the ratio that timm rounds to this hidden width; half a unit more if it would round below it."""
    ratio = mlp_width / width
    return ratio if int(width * ratio) == mlp_width else (mlp_width + 0.5) / width


@contextmanager
def without_token_id_warnings() -> Iterator[None]:
    """Suppress transformers' warnings about ids of special tokens outside the vocabulary.

    They are about its own defaults, which no tower uses; the ids that a tower uses are checked as its fields.
    """
    logger = logging.getLogger("transformers.configuration_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Model config:")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def parse_config(config_class: str, tree: Mapping[str, Any], where: Path) -> Any:
    """Parse a config.json; missing keys get transformers' defaults, a value of a wrong type raises a ModelError."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        with without_token_id_warnings():
            return getattr(transformers, config_class).from_dict(dict(tree))
    except (StrictDataclassError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"{where}: {' '.join(str(error).split())[:200]}") from None


QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
QKV_ROWS = {f"{part}.{leaf}": (n, n + 1, 3) for n, part in enumerate(QKV) for leaf in ("weight", "bias")}
"""Projections of queries, keys and values; their rows in a matrix of all three, as `TowerImport.rows` has them."""


def check_settings(family: type[T], where: Path, theirs: Any, expected: Mapping[str, object], **fields: Any) -> T:
    """Make a tower from its fields; raises a ModelError for them, or for settings that aren't as expected."""
    for key, value in expected.items():
        found = getattr(theirs, key, value)  # older versions of transformers lack some fields
        if found != value:
            raise ModelError(f"{where}: {theirs.model_type}: {key} = {found!r}; only {value!r} can be imported")
    try:
        return family(**fields)
    except ValidationError as error:
        raise ModelError(f"{where}: {theirs.model_type}: {describe(error)}") from None


def read_settings(family: type[T], where: Path, theirs: Any, expected: Mapping[str, object], **given: Any) -> T:
    """Make a tower of the fields given, and of the settings that have the others' names; may raise a ModelError."""
    same = {key: getattr(theirs, key) for key in family.model_fields if key not in {"family", "pool", *given}}
    return check_settings(family, where, theirs, expected, **same, **given)


def vision_fields(theirs: Any, where: Path, mlp_width: int | None = None) -> dict[str, Any]:
    """Read a vision tower's common fields; `mlp_width` if there is no `intermediate_size`; may raise a ModelError."""
    fields = {
        "patch_size": one_side(theirs.patch_size, "vision_config.patch_size", where),
        "width": theirs.hidden_size,
        "depth": theirs.num_hidden_layers,
        "num_heads": theirs.num_attention_heads,
        "mlp_ratio": mlp_ratio(theirs.hidden_size, theirs.intermediate_size if mlp_width is None else mlp_width),
        "norm_eps": theirs.rms_norm_eps if hasattr(theirs, "rms_norm_eps") else theirs.layer_norm_eps,
    }
    if hasattr(theirs, "image_size"):
        fields["image_size"] = one_side(theirs.image_size, "vision_config.image_size", where)
    return fields


def one_side(value: Any, key: str, where: Path) -> int:
    """Return the side of a square written as one number or two equal ones; raises a ModelError if they differ."""
    sides = set(value) if isinstance(value, list | tuple) else {value}
    if len(sides) != 1:
        raise ModelError(f"{where}: {key} = {value!r}; only squares can be imported")
    return int(sides.pop())


def own_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' name of a tensor, which is the same."""
    del names
    return (name,)
