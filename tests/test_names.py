"""Functions are verbs, or nouns that say what they return, no bare participles; each class has a name of its own."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("embedder", "shards", "index")
PARTICIPLE = re.compile(
    "(?!(embed|exceed|feed|need|proceed|seed|speed)$).{2,}ed|begun|bound|broken|brought|built|caught|chosen|done|drawn|driven"
    "|forgotten|found|given|gone|grown|held|hidden|kept|known|left|lost|made|met|said|seen|sent|shown|sold|spoken|spread"
    "|taken|thought|thrown|told|torn|worn|woven|written"
)
ADVERB = re.compile("again|alone|among|apart|aside|away|beside|ever|here|once|only|still|there|together|whole")
PROPERTIES = frozenset({"property", "cached_property", "locked_cached_property"})


def is_bare(name: str) -> bool:
    word = name.strip("_")
    return "_" not in word and bool(PARTICIPLE.fullmatch(word) or ADVERB.fullmatch(word))


def functions(tree: ast.AST) -> Iterator[str]:
    """Names of all functions but properties, which are named as values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
            if not decorators & PROPERTIES:
                yield node.name


@pytest.mark.medium
@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_is_a_bare_participle_or_adverb(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in functions(ast.parse(path.read_text(encoding="utf-8")))
        if is_bare(name)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("def shown(): ...", ["shown"]),
        ("class A:\n    async def _parsed(self): ...", ["_parsed"]),
        ("def f():\n    def apart(): ...", ["apart"]),
        ("class A:\n    @property\n    def finished(self): ...", []),
        ("def embed(): ...\ndef is_shown(): ...\ndef feed(): ...", []),
    ],
)
def test_the_rule_finds_them(code: str, names: list[str]) -> None:
    assert [name for name in functions(ast.parse(code)) if is_bare(name)] == names


@pytest.mark.medium
def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
