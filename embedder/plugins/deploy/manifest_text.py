"""Text of a manifest: plain data with comments in, YAML out, the same for the same data.

A comment is a key that begins with `# ` and has no value; it stands above the next key.
"""

import re
from collections.abc import Iterable
from typing import Any

import yaml  # type: ignore[import-untyped]

COMMENT = "# "
_COMMENT_LINE = re.compile(r"^( *(?:- )*)(['\"])# (.*)\2: null$", re.MULTILINE)
# Kubernetes takes these for numbers or truth values, and PyYAML for texts that need no quotes.
_NO_TEXT_IN_GO = re.compile(r"[yYnN]|[-+]?(0o[0-7_]+|[0-9_]*\.?[0-9_]*([eE][-+]?[0-9]+)?)")
_LINE_ENDS_OF_YAML = re.compile("[\x85\u2028\u2029]")  # for some readers, outside double quotes
_UNITS = (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10))


class _BlockDumper(yaml.SafeDumper):  # type: ignore[misc]
    """Dumper without aliases, which `kubectl diff` would show as changes; multi-line texts stay readable."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write each value in full."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_block = "\n" in text and all(line == line.rstrip() for line in text.split("\n"))
    style = "|" if is_block else "'" if _NO_TEXT_IN_GO.fullmatch(text) else None
    if _LINE_ENDS_OF_YAML.search(text):
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _text)


def manifest_text(head: Iterable[str], *documents: dict[str, Any]) -> str:
    """Write the documents of one file."""
    top = "".join(f"# {line}".rstrip() + "\n" for line in head)
    return top + "---\n" + "---\n".join(yaml_text(each) for each in documents)


def yaml_text(data: dict[str, Any]) -> str:
    """Write plain data with its comments."""
    text: str = yaml.dump(data, Dumper=_BlockDumper, sort_keys=False, width=10**9, allow_unicode=True)
    return _COMMENT_LINE.sub(r"\1# \3", text)


def without_comments(data: Any) -> Any:
    """Return the data that a reader of the text gets."""
    match data:
        case dict():
            return {key: without_comments(value) for key, value in data.items() if not key.startswith(COMMENT)}
        case list():
            return [without_comments(each) for each in data]
    return data


def quantity(size_bytes: int) -> str:
    """Bytes as Kubernetes itself writes them, so that no diff appears: `8Gi`, `512Mi`."""
    return next((f"{size_bytes // size}{unit}" for unit, size in _UNITS if size_bytes % size == 0), str(size_bytes))
