"""Unknown keys: the key that was probably meant, or the table that it belongs into."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from embedder.config_toml.hints import close_to
from embedder.config_toml.key_types import KeyType, key_type, tables_below, unit_of_field
from embedder.config_toml.units import SHARE, number_in, stem_of
from embedder.config_toml.values import Path, dotted_key, heading, toml

MAX_LISTED = 12  # keys of a table that a message names
MAX_OWNERS = 3  # tables that have a key of one name
KEY_WORDS = {"type": "kind", "uri": "path", "url": "path", "folder": "path"}
"""Other words for keys, within a table that has the key."""
REFERENCE = "`embedder config --reference` lists all"


def unknown_key(root: type[BaseModel], kind: type[BaseModel], path: Path, value: Any) -> str:
    """Say that a table has no such key, and which one was probably meant.

    Args:
        root: class of the whole configuration.
        kind: class of the table.
        path: of the key.
        value: as found; it isn't shown, as nobody knows whether it is a secret.
    """
    key, table = str(path[-1]), path[:-1]
    if cure := _find_own_table(root, table, key):
        return cure
    entries = value if isinstance(value, list) else [value]
    is_table = bool(entries) and all(isinstance(each, Mapping) for each in entries)
    found = f"there is no table {heading(path)}" if is_table else f"there is no key {key}{_within(table)}"
    cure = (
        _by_another_word(kind, table, key, value) or _with_unit(kind, key, value) or _misspelt(root, kind, table, key)
    )
    return f"{found}; {cure or _list_keys(kind, table)}"


def _by_another_word(kind: type[BaseModel], table: Path, key: str, value: Any) -> str:
    """Cure of a key that the table has by another word; empty for none."""
    known = KEY_WORDS.get(key.lower())
    if not table or known not in kind.model_fields:
        return ""
    is_word = known == "kind" and isinstance(value, str) and value.isalnum()
    return f"the key is {known}: write {known} = {toml(value.lower()) if is_word else '...'}"


def keys_of_another_kind(root: type[BaseModel], tree: Mapping[str, Any]) -> dict[str, list[str]]:
    """Unknown keys at the top that another kind of configuration has, by what is said of them.

    Args:
        root: class of the whole configuration; its `elsewhere` says it of each key.
        tree: values of the whole configuration.
    """
    elsewhere: Mapping[str, str] = getattr(root, "elsewhere", {})
    found: dict[str, list[str]] = {}
    for key in tree:
        if key in elsewhere and key not in root.model_fields:
            found.setdefault(elsewhere[key], []).append(key)
    return found


def _within(table: Path) -> str:
    return f" in {heading(table)}" if table else ""


def _format_key(path: Path, taken: KeyType) -> str:
    """A key as a file has it: the header of a table, or the key alone."""
    if taken.is_list_of_tables and not taken.scalars:
        return f"[[{dotted_key(path)}]]"
    return f"[{dotted_key(path)}]" if taken.is_table and not taken.values else str(path[-1])


def _with_unit(kind: type[BaseModel], key: str, value: Any) -> str:
    """Cure of a key whose name has another unit than the one that exists, as `memory_gb`; empty for none."""
    stem, end = stem_of(key)
    for known in kind.model_fields:
        known_stem, known_end = stem_of(known)
        if known_stem != stem or not (known_end or end) or not (unit := unit_of_field(kind, known)):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_told = end or not is_number or unit == "seconds"
        number = number_in(f"{value}{end}" if is_number else str(value), unit) if is_told else None
        measured = "a share" if unit == SHARE else f"in {unit}"
        return f"{known} is {measured}: write {known} = {'...' if number is None else toml(number)}"
    return ""


def _find_own_table(root: type[BaseModel], table: Path, key: str) -> str:
    """Cure of a key that stands in another table than its own; empty for none."""
    owners = dict.fromkeys(each.heading for each in tables_below(root) if key in each.kind.model_fields)
    if "" in owners:
        return f"{key} stands in {heading(table)} and is a key of the top: move it above the first [table]"
    if not 0 < len(owners) <= MAX_OWNERS:
        return ""
    where = f"stands in {heading(table)}" if table else "stands at the top"
    return f"{key} {where} and belongs into {' or '.join(owners)}: move it there"


def _misspelt(root: type[BaseModel], kind: type[BaseModel], table: Path, key: str) -> str:
    """Cure of a misspelt key, which may stand in another table than its own, too; empty for none."""
    if meant := close_to(key, kind.model_fields):
        return f"did you mean {_format_key((*table, meant), key_type(kind.model_fields[meant].annotation))}?"
    owners = {each: owner for owner in tables_below(root) for each in owner.kind.model_fields}
    if (meant := close_to(key, owners)) is None:
        return ""
    where = owners[meant].heading
    return f"did you mean {meant} {f'in {where}' if where else 'at the top, above the first [table]'}?"


def _list_keys(kind: type[BaseModel], table: Path) -> str:
    """Keys that there are, where they are few."""
    keys = list(kind.model_fields)
    return f"its keys are {', '.join(keys)}" if table and len(keys) <= MAX_LISTED else REFERENCE
