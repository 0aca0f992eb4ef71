"""Private names of libraries are in `embedder.compat` and `shards.compat`; other code uses what is public."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OWN = ("embedder", "shards", "index")
HOMES = ("embedder/compat/", "shards/compat.py")
# Methods of named tuples, and `os._exit`: documented in spite of their underscore.
PUBLIC = {"_asdict", "_replace", "_fields", "_make", "_exit"}
INTERNAL = {"map_batches_internal"}
EXCEPTIONS: dict[str, str] = {}
"""`file: name`, each with its reason."""


def sources() -> list[Path]:
    files = [path for package in OWN for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in files if not str(path.relative_to(ROOT)).startswith(HOMES)]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: list[ast.Module]) -> set[str]:
    """Private names that the project itself defines: functions, attributes of `self`, fields."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def private_names(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of what a module takes from behind a library's public interface."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.partition(".")[0] not in OWN:
            parts = [*node.module.split("."), *(each.name for each in node.names)]
            yield from ((node.lineno, ".".join(parts)) for part in parts if is_private(part))
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names if any(map(is_private, each.name.split("."))))
        elif isinstance(node, ast.Attribute):
            if node.attr in INTERNAL or (is_private(node.attr) and node.attr not in own | PUBLIC):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in INTERNAL:
            yield node.lineno, node.value


def found_in(paths: list[Path]) -> set[str]:
    trees = {path: ast.parse(path.read_text()) for path in paths}
    own = own_names(list(trees.values()))
    return {f"{path.relative_to(ROOT)}: {name}" for path, tree in trees.items() for _, name in private_names(tree, own)}


def test_no_private_name_of_a_library_is_used_outside_of_compat() -> None:
    found = found_in(sources())
    assert found - EXCEPTIONS.keys() == set(), "give it a home in embedder.compat, with a probe and a fallback"
    assert EXCEPTIONS.keys() - found == set(), "exceptions that nothing needs"
    assert all(EXCEPTIONS.values())


@pytest.mark.parametrize(
    "code",
    [
        "from ray._private.state import state",
        "from ray.data._internal.execution import interfaces",
        "from torch._compile import _disable_dynamo",
        "from ray.experimental.internal_kv import _internal_kv_put",
        "import ray._raylet",
        "def late(dataset):\n    return dataset.map_batches_internal(len)",
        "def late(dataset):\n    return getattr(dataset, 'map_batches_internal')",
        "def late(tower):\n    return tower._pos_embed(1)",
        "import torch\ntorch._C",
    ],
)
def test_the_contract_finds_private_names(code: str) -> None:
    assert list(private_names(ast.parse(code), set()))


def test_the_contract_leaves_names_of_our_own_alone() -> None:
    tree = ast.parse(
        "class Own:\n    def _method(self, other):\n        self._value = other._value\n        other._method()"
    )
    assert list(private_names(tree, own_names([tree]))) == []


def test_each_private_attribute_in_compat_is_looked_for_by_a_probe() -> None:
    """What a patch uses and no probe names would end a run where a library renames it."""
    homes = [*sorted((ROOT / "embedder/compat").glob("*.py")), ROOT / "shards/compat.py"]
    trees = [ast.parse(path.read_text()) for path in homes]
    looked_for = " ".join(
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    own = own_names(trees)
    used = {name.rpartition(".")[2] for tree in trees for _, name in private_names(tree, own)}
    assert {name for name in used if name not in looked_for} == set()
