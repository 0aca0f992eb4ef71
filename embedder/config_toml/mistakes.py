"""Mistakes in a configuration, each in one line of TOML's words: the place, what was found, the rule, the fix.

pydantic finds them; one table rephrases the common ones. Others keep pydantic's words, with key and value.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from difflib import get_close_matches
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from embedder.config_toml.fields import (
    Place,
    bounds_of,
    choices,
    entry_type,
    extra_of,
    family_of,
    find_place,
    listed_tables,
    members,
    tables_below,
    tables_in,
    takes,
    unit_of_field,
    value_at,
)
from embedder.config_toml.units import MEASURES, SHARE, number_in, stem_of
from embedder.config_toml.values import Path, dotted_key, format_value, heading, toml, type_name, without_secrets
from embedder.errors import ConfigError

MAX_LINES = 10
MAX_LISTED = 12  # keys of a table that a message names
MAX_OWNERS = 3  # tables that have a key of one name
MIN_CHARACTERS = 3  # shorter words are close to anything
GIB = 1 << 30
REFERENCE = "`embedder config --reference` lists all"
OTHER_WORDS = {
    "fp32": ["float32"],
    "float": ["float32"],
    "fp16": ["float16"],
    "half": ["float16"],
    "bf16": ["bfloat16"],
    "gpu": ["cuda"],
    "folder": ["files", "path"],
    "parquet": ["table"],
    "csv": ["table"],
    "tar": ["webdataset"],
    "none": ["auto"],
    "type": ["kind"],
    "uri": ["path"],
    "url": ["path"],
}
"""Frequently confused values and keys, with the right ones."""

_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), "true") | dict.fromkeys(("false", "no", "off", "0"), "false")


class ConfigMistakesError(ConfigError):
    """Mistakes of one configuration, each in one of the `lines`."""

    def __init__(self, lines: Sequence[str]) -> None:
        more = len(lines) - MAX_LINES
        self.lines = [*lines[:MAX_LINES], *([f"and {more} more mistake{'s' * (more > 1)}"] if more > 0 else [])]
        super().__init__("\n".join(self.lines))


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        path: its place; empty if it concerns the whole, such as a combination of keys.
        text: what was found, the rule, the fix.
        instead: replacement for the value, as TOML, if that is the fix.
    """

    path: Path
    text: str
    instead: str | None = None


@dataclass(frozen=True)
class _Found:
    """What pydantic found at one place."""

    root: type[BaseModel]
    tree: Mapping[str, Any]
    path: Path
    place: Place
    value: Any
    detail: ErrorDetails

    @property
    def name(self) -> str:
        return dotted_key(self.path)

    @property
    def unit(self) -> str:
        return unit_of_field(self.place.kind, self.place.key)

    def make_mistake(self, rule: str, instead: str | None = None) -> Mistake:
        """Return the mistake of a value, which is shown."""
        return Mistake(self.path, f"{self.name} = {format_value(self.path, self.value)}: {rule}", instead)


def mistakes_of(kind: type[BaseModel], tree: Mapping[str, Any], error: ValidationError) -> list[Mistake]:
    """Find all mistakes of a configuration, each place only once."""
    found: dict[Path, ErrorDetails] = {}
    for detail in error.errors():
        path = path_of(tree, detail)
        # A value that fits no member of a union breaks each one's rule; the intended member's rule is reported.
        is_less = path in found and (_is_of_type(detail) or not _is_of_type(found[path]))
        if detail["type"] != "default_factory_not_called" and not is_less:
            found[path] = detail
    parents = {path[:depth] for path in found for depth in range(1, len(path))}
    foreign = _keys_of_another_kind(kind, tree)
    mistakes = [
        _explain(_Found(kind, tree, path, find_place(kind, tree, path), value_at(tree, path), detail))
        for path, detail in found.items()
        if path not in parents and not any(path[0] in keys for keys in foreign.values() if path)
    ]
    for said, keys in foreign.items():
        are = f"{keys[0]} is a key" if len(keys) == 1 else f"{', '.join(keys)} are keys"
        mistakes.append(Mistake((keys[0],), f"{are} {said}"))
    return mistakes


def path_of(tree: Any, detail: ErrorDetails) -> Path:
    """Return the keys from the top to what pydantic found, whose locations also name the members of unions."""
    path: list[str | int] = []
    for part in detail["loc"]:
        is_list = isinstance(tree, list | tuple)
        if (isinstance(part, int) and part < len(tree)) if is_list else (isinstance(tree, Mapping) and part in tree):
            path.append(part)
            tree = value_at(tree, (part,))
    if detail["type"] == "missing" and not isinstance(detail["loc"][-1], int):
        path.append(detail["loc"][-1])
    return (*path, "family") if detail["type"] == "union_tag_invalid" else tuple(path)


def _is_of_type(detail: ErrorDetails) -> bool:
    """Return whether a value has another type than its key takes; or is none of the permitted values."""
    error = detail["type"]
    is_item = error == "missing" and isinstance(detail["loc"][-1], int)  # entry of a list that is too short
    return is_item or error.endswith(("_type", "_parsing")) or error in _OF_TYPE


def _keys_of_another_kind(root: type[BaseModel], tree: Mapping[str, Any]) -> dict[str, list[str]]:
    elsewhere: Mapping[str, str] = getattr(root, "elsewhere", {})
    found: dict[str, list[str]] = {}
    for key in tree.keys() & elsewhere.keys() - root.model_fields.keys():
        found.setdefault(elsewhere[key], []).append(key)
    return {said: sorted(keys, key=list(tree).index) for said, keys in found.items()}


def _explain(found: _Found) -> Mistake:
    error = found.detail["type"]
    if _is_of_type(found.detail):
        return _wrong_type(found)
    if error in _EXPLAINED:
        return _EXPLAINED[error](found)
    message = found.detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if not found.path or isinstance(found.value, Mapping | list | tuple | BaseModel):
        return Mistake(found.path, f"{found.name}: {message}" if found.path else message)
    return found.make_mistake(message)


def _missing(found: _Found) -> Mistake:
    table, field = found.path[:-1], found.place.field
    where = f"{heading(table)} has no {found.path[-1]}" if table else f"{found.path[-1]} is missing"
    example = "[...]" if entry_type(field.annotation) else '"..."' if str in members(field.annotation) else "..."
    meaning = f": {field.description}" if field.description else ""
    return Mistake(found.path, f"{where}; write {found.path[-1]} = {example}{meaning}")


def _out_of_bounds(found: _Found) -> Mistake:
    bounds = [(words, bound) for _, words, bound in bounds_of(found.place.field)]
    said = " and ".join(f"{words} {toml(bound) if isinstance(bound, int) else f'{bound:g}'}" for words, bound in bounds)
    text = f"must be {said}{f' {found.unit}' if found.unit in MEASURES else ''}"
    low = next((bound for words, bound in bounds if words in ("at least", "more than")), 0)
    if found.unit == "bytes" and 0 < found.value < low <= (meant := found.value * GIB):
        return found.make_mistake(f"{text}; {found.value:g} GiB are {toml(int(meant))}", toml(int(meant)))
    if found.unit == SHARE and 1 < found.value <= 100:
        return found.make_mistake(
            f"{text}, a share; {found.value:g} % is {found.value / 100:g}", f"{found.value / 100:g}"
        )
    return found.make_mistake(text)


def _broken_pattern(found: _Found) -> Mistake:
    rule = extra_of(found.place.field, "rule")
    return found.make_mistake(f"must be {rule}" if rule else found.detail["msg"])


def _wrong_family(found: _Found) -> Mistake:
    families = [family_of(each) for each in find_place(found.root, {}, found.path[:-1]).tables]
    return _wrong_choice(found, " or ".join(sorted(map(toml, families))), families)


def _wrong_choice(found: _Found, taken: str, known: Collection[str]) -> Mistake:
    meant = close_to(found.value, known) if isinstance(found.value, str) else None
    return found.make_mistake(f"takes {taken}{f'; did you mean {toml(meant)}?' if meant else ''}")


def _wrong_type(found: _Found) -> Mistake:
    path, value, annotation = found.path, found.value, found.place.annotation
    kinds, listed, tables = members(annotation), listed_tables(annotation), tables_in(annotation)
    if listed and isinstance(value, Mapping):
        return Mistake(
            path, f"{heading(path)}: each is an entry of a list: write [{heading(path)}], in double brackets"
        )
    if tables and isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        return Mistake(path, f"[{heading(path)}]: there is one, no list: write {heading(path)}, in single brackets")
    instead = _instead(found)
    texts = [each for each in choices(annotation) if isinstance(each, str)]
    if isinstance(value, str) and texts and not instead:
        return _wrong_choice(found, takes(annotation), texts)
    said = f"found {type_name(value)}{' in the list' if isinstance(path[-1], int) else ''}"
    if str not in kinds and (listed or tables or any(get_origin(kind) is dict for kind in kinds)):
        name = f"[{heading(path)}]" if listed else heading(path)
        keys = list((listed or tables)[0].model_fields) if listed or tables else []
        some = f" ({', '.join(keys[:4])}{', ...' if len(keys) > 4 else ''})" if keys else ""
        return found.make_mistake(f"{said}; takes {takes(annotation)}: write {name}, and its keys below it{some}")
    measured = ", a share (5 % is 0.05)" if found.unit == SHARE else f", in {found.unit}" * (found.unit in MEASURES)
    rule = f"takes {takes(annotation)}{measured if {int, float} & _plain(kinds) else ''}"
    if isinstance(path[-1], int):  # it has no key of its own
        return found.make_mistake(f"{said}; each item {rule}{f': write {instead}' if instead else ''}")
    if path[-1] == "path" and isinstance(value, list | tuple) and len(path) > 1:
        rule += f": write one {heading(path[:-1])} for each"
    return found.make_mistake(f"{said}; {path[-1]} {rule}", instead)


def _plain(kinds: Collection[Any]) -> set[Any]:
    return {kind for kind in (str, bool, int, float) if kind in kinds}


def _instead(found: _Found) -> str | None:
    """Return the replacement for a value of another type; None if there is no obvious one."""
    value, key = found.value, found.place.key
    kinds = _plain(members(found.place.annotation))
    if isinstance(value, str) and str in members(entry_type(found.place.annotation)):
        if value.startswith("[") or key != "command":  # a list without quotes, as --set may have it; or a pattern
            parts = [value] if set(value) & set("{*?") else value.strip("[] ").split(",")
        else:
            parts = value.split()
        is_plain = not set(value) & set("'\"")
        return toml(without_secrets((key,), [part.strip() for part in parts])) if is_plain else None
    if isinstance(value, str):
        number = number_in(value, found.unit, is_integer=float not in kinds) if {int, float} & kinds else None
        return _BOOLEANS.get(value.strip().lower()) if bool in kinds else None if number is None else toml(number)
    if bool in kinds and value in (0, 1):
        return toml(bool(value))
    if str in kinds and isinstance(value, int | float | date | time):
        return f'"{toml(value)}"'
    is_fraction = int in kinds and isinstance(value, float) and abs(value) < 2**53
    return f"{int(value)} or {int(value) + 1}" if is_fraction else None


def close_to(word: str, known: Collection[str]) -> str | None:
    """Return the known word that was probably meant; None if there is none."""
    lower = {each.lower(): each for each in known}
    if meant := next((each for each in OTHER_WORDS.get(word.lower(), ()) if each in known), None):
        return meant
    close = get_close_matches(word.lower(), lower, n=1, cutoff=0.6) if len(word) >= MIN_CHARACTERS else []
    return lower[close[0]] if close else None


def _unknown_key(found: _Found) -> Mistake:
    """Describe a key that a table doesn't have; its value isn't shown, as it may be a secret."""
    root, key, table, value = found.root, str(found.path[-1]), found.path[:-1], found.value
    kind = find_place(root, found.tree, table).tables[0]
    owners = {each: owner for owner in tables_below(root) for each in owner.kind.model_fields}
    own = list(dict.fromkeys(each.heading for each in tables_below(root) if key in each.kind.model_fields))
    if "" in own:
        return Mistake(
            found.path, f"{key} stands in {heading(table)} and is a key of the top: move it above the first [table]"
        )
    if 0 < len(own) <= MAX_OWNERS:
        where = f"in {heading(table)}" if table else "at the top"
        return Mistake(found.path, f"{key} stands {where} and belongs into {' or '.join(own)}: move it there")
    keys = list(kind.model_fields)
    entries = value if isinstance(value, list | tuple) else [value]
    is_table = bool(entries) and all(isinstance(each, Mapping) for each in entries)
    within = f" in {heading(table)}" if table else ""
    if cure := _with_unit(kind, key, value):
        pass
    elif meant := close_to(key, keys):
        is_word = meant == "kind" and isinstance(value, str) and value.isalnum()  # as no secret is
        known = _format_key((*table, meant), kind.model_fields[meant].annotation)
        cure = f"did you mean {known}{f' = {toml(value.lower())}' if is_word else ''}?"
    elif meant := close_to(key, owners):
        where = owners[meant].heading
        cure = f"did you mean {meant} {f'in {where}' if where else 'at the top, above the first [table]'}?"
    else:
        cure = f"its keys are {', '.join(keys)}" if table and len(keys) <= MAX_LISTED else REFERENCE
    return Mistake(
        found.path, f"there is no {f'table {heading(found.path)}' if is_table else f'key {key}{within}'}; {cure}"
    )


def _format_key(path: Path, annotation: Any) -> str:
    if str in members(annotation) or choices(annotation):
        return str(path[-1])
    is_table = tables_in(annotation) or any(get_origin(each) is dict for each in members(annotation))
    name = f"[{dotted_key(path)}]"
    return f"[{name}]" if listed_tables(annotation) else name if is_table else str(path[-1])


def _with_unit(kind: type[BaseModel], key: str, value: Any) -> str:
    """Return the fix for a key with another unit than the existing one, such as `memory_gb`; empty for none."""
    stem, end = stem_of(key)
    for known in kind.model_fields:
        known_stem, known_end = stem_of(known)
        if known_stem != stem or not (known_end or end) or not (unit := unit_of_field(kind, known)):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_clear = end or not is_number or unit == "seconds"
        number = number_in(f"{value}{end}" if is_number else str(value), unit) if is_clear else None
        measured = "a share" if unit == SHARE else f"in {unit}"
        return f"{known} is {measured}: write {known} = {'...' if number is None else toml(number)}"
    return ""


_EXPLAINED: dict[str, Callable[[_Found], Mistake]] = {
    "extra_forbidden": _unknown_key,
    "missing": _missing,
    "string_pattern_mismatch": _broken_pattern,
    "union_tag_invalid": _wrong_family,
    "finite_number": lambda found: found.make_mistake("must be a finite number; write one"),
    "string_too_short": lambda found: found.make_mistake("must not be empty; write a text, or leave the key out"),
    **dict.fromkeys(("greater_than_equal", "greater_than", "less_than_equal", "less_than"), _out_of_bounds),
}
_OF_TYPE = {"literal_error", "int_from_float", "too_short", "too_long", "model_attributes_type"}
