"""Syntax of TOML: where a file breaks it, and the common cause in that line."""

import re
from collections.abc import Callable, Collection

from embedder.config_toml.positions import statements
from embedder.config_toml.units import MEASURES, SHARE, number_in, unit_of
from embedder.config_toml.values import toml, without_secrets
from embedder.redaction import SECRET_NAME

_BRACKETS = (('"""', '"""', "text"), ("'''", "'''", "text"), ("[", "]", "list"), ("{", "}", "table"))
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_ASSIGNMENT = re.compile(r"""^\s*(?P<key>[\w.\-"']+)\s*=\s*(?P<value>.*?)\s*$""")
_HEADER = re.compile(r"^\s*\[\[?\s*([^\[\]]*?)\s*\]")
_YAML = re.compile(r"^\s*(- .*|[\w.-]+:(\s.*)?|---)$")
_QUOTES = re.compile("[\u201c\u201d\u201e\u2018\u2019\u00ab\u00bb]")
_WORDS = {"True": "true", "False": "false", "TRUE": "true", "FALSE": "false", "yes": "true", "no": "false"}
_WORDS |= {"on": "true", "off": "false", "Yes": "true", "No": "false"}
_NOTHING = {"None", "null", "nil", "~", "undefined"}
_COMMENT = re.compile(r"(?:^|\s)(//|;|--|/\*)")
_NUMBER_WITH_UNIT = re.compile(r"[+-]?\d[\d_]*(?:\.\d+)?\s*(?:[A-Za-z]+|%)(?:\s*\d+\s*[A-Za-z]+)*")
_INNER = re.compile(r"([\w-]+)\s*=\s*([^,{}\[\]]*[^,{}\[\]\s])")
_UNQUOTED = re.compile(r"[A-Za-z/~.\\][^\"']*")


def explain_syntax(text: str, message: str, lists: Collection[str] = ()) -> str:
    """Say in one line where a text is no TOML, and what to write.

    Args:
        text: of the file.
        message: of Python's parser, which ends with the line and the column.
        lists: names of tables that are written in double brackets.

    Returns:
        What follows the name of the file.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    place = _PLACE.search(message)
    said = message[: place.start()] if place else message
    if place is None or place[1] is None:
        number = max((count for count, each in enumerate(lines, 1) if _is_content(each)), default=1)
        where = f", line {number}"
    else:
        number = int(place[1])
        where = f", line {number}, column {place[2]}"
    begin = _begin_of_statement(text)
    line = lines[number - 1]
    for find in _CAUSES:
        if cause := find(line, said, lists):
            return f"{where}: {cause}"
    if begin is not None and begin < number and (opened := _find_unclosed(lines[begin - 1])):
        return f", line {begin}: {opened}"
    if cause := _of_rest(line, said, None if place is None or place[1] is None else int(place[2])):
        return f"{where}: {cause}"
    return f"{where}: this is no TOML ({said[:1].lower()}{said[1:]}); correct this line"


def other_format(text: str) -> str | None:
    """Name the format of a text that is no TOML; None where it may be meant as TOML."""
    stripped = text.lstrip()
    lines = [line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    if stripped.startswith("{") or re.match(r'\[\s*[{"\d\[]?\s*["{]', stripped):
        return "JSON"
    if stripped.startswith("<"):
        return "XML or HTML"
    if lines and (lines[0].startswith("---") or sum(bool(_YAML.match(line)) for line in lines) > len(lines) / 2):
        return "YAML"
    return None


def _begin_of_statement(text: str) -> int | None:
    """Line on which the first statement begins that is never valid; None where there is none."""
    end = 0
    for line, statement in statements(text):
        end = line + statement.count("\n")
    lines = text.replace("\r\n", "\n").split("\n")
    return next((number for number in range(end + 1, len(lines) + 1) if _is_content(lines[number - 1])), None)


def _is_content(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _find_unclosed(line: str) -> str | None:
    found = _ASSIGNMENT.match(line)
    if found is None:
        return None
    for opening, closing, name in _BRACKETS:
        if found["value"].startswith(opening):
            return f"the {name} of {found['key']}, which begins here, is not closed; write {closing} at its end"
    return None


def _of_twice(line: str, said: str, lists: Collection[str]) -> str | None:
    """A table or a key that stands twice."""
    if header := _HEADER.match(line):
        if not said.startswith("Cannot"):
            return None
        name = header[1]
        if name in lists:
            return f"[{name}] is a list; write [[{name}]], in double brackets, everywhere: each is one entry"
        if line.lstrip().startswith("[["):
            return f"[[{name}]] stands beside [{name}]; write it one way: in double brackets where there may be several"
        return f"[{name}] stands twice, or as a key, too; keep one table, with the keys of both"
    if said.startswith("Cannot") and (found := _ASSIGNMENT.match(line)):
        return f"{found['key']} stands twice; keep one of the two"
    return None


def _of_header(line: str, said: str, _: Collection[str]) -> str | None:
    """A header that isn't closed, or whose name needs quotes."""
    if not line.lstrip().startswith("[") or "declaration" not in said:
        return None
    name = line.strip().strip("[]").partition("#")[0].strip()
    if " " in name:
        return f"a table's name is one word; write [{name.split()[0]}], and comments behind #"
    brackets = 2 if line.lstrip().startswith("[[") else 1
    return f"a bracket is missing; write {'[' * brackets}{name}{']' * brackets}"


def _of_quotes(line: str, _said: str, _: Collection[str]) -> str | None:
    """Quotes of a word processor."""
    if found := _QUOTES.search(line.partition("#")[0]):
        return f'{found[0]} is a typographic quote; write straight ones: "..."'
    return None


def _of_backslash(line: str, said: str, _: Collection[str]) -> str | None:
    """Backslash in double quotes, as in paths of Windows."""
    if "\\" not in line or not ("Unescaped" in said or "hex value" in said or "Unterminated" in said):
        return None
    return (
        "in double quotes a backslash begins an escape; write the text in single quotes ('C:\\photos'), or with / "
        "in place of it"
    )


def _of_missing_sign(line: str, said: str, _: Collection[str]) -> str | None:
    """A line without an equals sign, or with another sign in its place."""
    if found := re.match(r"^\s*([\w.-]+)\s*(==|:=|=>|:)\s*\S", line):
        return f"write {found[1]} = ..., with one equals sign in place of {found[2]}"
    if re.match(r"^\s*(//|;|/\*|--)", line):
        return "a comment begins with #"
    if not said.startswith("Expected '=' after a key"):
        return None
    if found := re.match(r"^\s*([\w.-]+(?: +[\w.-]+)+)\s*=", line):
        return f"a key is one word; write {'_'.join(found[1].split())} = ..., or the key in quotes"
    return f"no = after the key {line.split(maxsplit=1)[0]}; write key = value"


def _of_value(line: str, _said: str, _: Collection[str]) -> str | None:
    """A value that is missing, or of a form that TOML doesn't have."""
    found = _ASSIGNMENT.match(line)
    if found is None:
        return None
    key, value = found["key"], re.sub(r"\s#.*$", "", found["value"]).strip()
    if not value or value.startswith("#"):
        return f"{key} has no value; write {key} = value, or leave the key out"
    if value in _NOTHING:
        return f"TOML has no {value}; leave {key} out"
    if value in _WORDS:
        return f"{value} is no value of TOML; write {key} = {_WORDS[value]}"
    if comment := _COMMENT.search(value):
        return f"a comment begins with #, not with {comment[1]}"
    return _of_number(key, value) or _of_text(key, value) or _of_list(key, value)


def _of_number(key: str, value: str) -> str | None:
    """A number with a comma, a unit, or zeros at its begin."""
    if re.fullmatch(r"\d{1,3}(?:[, ]\d{3})+", value):
        digits = re.sub(r"\D", "", value)
        return f"a number has neither commas nor spaces; write {key} = {toml(int(digits))}"
    if re.fullmatch(r"\d+,\d+", value):
        return f"a number has a point, and no comma; write {key} = {value.replace(',', '.')}"
    if re.fullmatch(r"[+-]?0\d+", value):
        return f"a number doesn't begin with 0; write {key} = {int(value)}"
    if re.fullmatch(r"[+-]?(\.\d+|\d+\.)", value):
        return f"a number has digits on both sides of its point; write {key} = {float(value)}"
    if _NUMBER_WITH_UNIT.fullmatch(value):
        unit = unit_of(key)
        number = number_in(value, unit)
        cure = f"; {key} is a share" if unit == SHARE else f"; {key} is in {unit}" if unit in MEASURES else ""
        return f"a number stands without a unit{cure}: write {key} = {'...' if number is None else toml(number)}"
    return None


def _of_text(key: str, value: str) -> str | None:
    """A text without quotes, or whose quotes don't close."""
    if _UNQUOTED.fullmatch(value):
        is_secret = SECRET_NAME.search(key)
        written = '"..."' if is_secret or len(value) > 80 else _quote(without_secrets((key.rpartition(".")[2],), value))
        return f"a text stands in quotes; write {key} = {written}"
    for quote in ('"""', "'''", '"', "'"):
        if value.startswith(quote) and value.count(quote) - value.count("\\" + quote) == 1:
            return f"the text of {key} has no closing quote; write {quote} at its end"
    if value.startswith("'") and value.count("'") > 2:
        return f'the text of {key} holds the quote that it stands in; write it in double quotes: {key} = "..."'
    return None


def _of_list(key: str, value: str) -> str | None:
    """A list or a table in braces: wrong commas or quotes, or a value within it that is none."""
    if re.search(r",\s*,", value):
        return f"a comma of {key} stands twice"
    if value.startswith("[") and re.search(r"""["'\d]\s+["'\d]""", value):
        return f"a comma is missing between two items of {key}"
    if value.startswith("{") and re.search(r",\s*}", value):
        return f"a table in braces has no comma at its end; take the last one of {key} away"
    if value.startswith("{") and "}" not in value:
        return f"a table in braces stands on one line; write [{key}], and its keys below it"
    inner = _INNER.findall(value) if value.startswith("{") else ()
    return next((cause for name, each in inner if (cause := _of_number(name, each) or _of_text(name, each))), None)


def _of_rest(line: str, said: str, column: int | None) -> str | None:
    """Something that follows a value, or a character that can't be seen."""
    if column is not None and column <= len(line) and not (line[column - 1].isprintable() or line[column - 1] == "\t"):
        return f"the character U+{ord(line[column - 1]):04X}, which can't be seen, stands here; take it away"
    if said.startswith("Unterminated"):
        return "a closing quote is missing"
    if not said.startswith("Expected newline") or column is None:
        return None
    if re.match(r"[,;\s]*[\w.-]+\s*=", line[column - 1 :]):
        return "each key stands on a line of its own; begin a new one here"
    return "the value ends before this column; take away what follows, or write all of it in quotes"


def _quote(text: str) -> str:
    return f"'{text}'" if "\\" in text else toml(text)


_CAUSES: tuple[Callable[[str, str, Collection[str]], str | None], ...] = (
    _of_twice,
    _of_header,
    _of_quotes,
    _of_backslash,
    _of_missing_sign,
    _of_value,
)
