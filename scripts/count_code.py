"""How large checkouts are, and how their parts hang together: lines of Python, of all kinds, and the longest file.

python scripts/count_code.py DIR...            # the first may be compared with others: the last column is its ratio
python scripts/count_code.py --structure DIR   # how its parts hang together, by what the house is judged by
python scripts/count_code.py --follow embedder/ingest/embed.py:ingest:config DIR    # where a parameter's value goes
"""

import argparse
import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import networkx

from harness import show

PACKAGES = ("embedder", "shards", "index", "scripts", "tests")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PRODUCT = ("embedder", "shards", "index")
BELOW_INGEST = (
    "observability", "report", "predictor.py", "planning", "pipeline.py", "retrieval", "store_index",
    "ray_executor.py", "executors", "encoders", "placement", "models", "user_steps", "servables", "steps", "sources",
    "media", "store", "storage", "compat", "process",
)  # fmt: skip
LONG_LINES = 40
COLUMNS = {"checkout": "{checkout}"} | {name: f"{{{name}:,}}" for name in (*PACKAGES, "plug-ins", "all")}
COLUMNS |= {"longest file": "{longest}", "of the first": "{ratio:.3f}"}
FIGURES = ("files", "in circles", "RunConfig below ingest", "functions over 40 lines", "class names twice")
STRUCTURE = {name: f"{{{name}}}" for name in ("checkout", *FIGURES, "file names twice")}
TRAIL = {name: f"{{{name}}}" for name in ("checkout", "files", "ways back")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--structure", action="store_true", help="figures of the structure instead")
    parser.add_argument("--follow", metavar="FILE:FUNCTION:PARAM", help="files that its value is passed to instead")
    options = parser.parse_args()
    if options.follow:
        trails = [(each, Trail(each, options.follow)) for each in options.checkouts]
        show([{"checkout": each.resolve().name} | trail.figures() for each, trail in trails], TRAIL)
        return
    if options.structure:
        show([{"checkout": each.resolve().name} | structure(each) for each in options.checkouts], STRUCTURE)
        return
    counts = [count(checkout) for checkout in options.checkouts]
    show([each | {"ratio": each["all"] / max(1, counts[0]["all"])} for each in counts], COLUMNS)


def count(checkout: Path) -> dict:
    """Lines of Python by package; `plug-ins` are those of `embedder`, too."""
    lines = {path.relative_to(checkout): path.read_bytes().count(b"\n") for path in sorted(checkout.rglob("*.py"))}
    found = {name: sum(number for path, number in lines.items() if path.parts[0] == name) for name in PACKAGES}
    plugins = sum(number for path, number in lines.items() if path.parts[:2] == ("embedder", "plugins"))
    longest = max((path for path in lines if path.parts[0] in PACKAGES), key=lines.__getitem__, default="none")
    about = {"checkout": checkout.resolve().name, "longest": f"{longest} ({lines.get(longest, 0)})"}
    return found | about | {"plug-ins": plugins, "all": sum(found.values())}


def structure(checkout: Path) -> dict[str, int]:
    """Figures of how the files of the product hang together, each of which should be small."""
    trees = product_trees(checkout)
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    functions = [node for _, node in nodes if isinstance(node, FUNCTIONS)]
    classes = Counter(node.name for _, node in nodes if isinstance(node, ast.ClassDef))
    names = Counter(path.name for path in trees if path.name != "__init__.py")
    imports = [(path, node) for path, node in nodes if isinstance(node, ast.ImportFrom)]
    of_config = ((path, node) for path, node in imports if node.module == "embedder.config")
    readers = {path for path, node in of_config if any(each.name == "RunConfig" for each in node.names)}
    return {
        "files": len(trees),
        "in circles": sum(map(len, file_circles(import_graph(checkout, trees)))),
        "RunConfig below ingest": sum(path.relative_to(checkout).parts[1] in BELOW_INGEST for path in readers),
        "functions over 40 lines": sum(each.end_lineno - each.lineno + 1 > LONG_LINES for each in functions),
        "class names twice": sum(number > 1 for number in classes.values()),
        "file names twice": sum(number > 1 for number in names.values()),
    }


def product_trees(checkout: Path) -> dict[Path, ast.Module]:
    paths = (path for package in PRODUCT for path in sorted((checkout / package).rglob("*.py")))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def import_graph(checkout: Path, trees: Mapping[Path, ast.Module]) -> networkx.DiGraph:
    """Modules with an edge to each one that they import; imports in functions, and for types, count."""
    modules = {_module_of(path.relative_to(checkout)): tree for path, tree in trees.items()}
    graph = networkx.DiGraph()
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                inner = {f"{node.module}.{each.name}" for each in node.names}
                known = inner & modules.keys() or {node.module} & modules.keys()
                graph.add_edges_from((name, each) for each in known)
            elif isinstance(node, ast.Import):
                graph.add_edges_from((name, each.name) for each in node.names if each.name in modules)
    return graph


def file_circles(graph: networkx.DiGraph) -> list[list[str]]:
    return [sorted(each) for each in networkx.strongly_connected_components(graph) if len(each) > 1]


def _module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


class Trail:
    """Where a parameter's value goes, only by the code: the modules that it, or a part of it, is passed to.

    A function is gone into where it takes the whole: by the parameter's type, or that of a class that holds it. What
    takes a part, as `config.compute`, is a stop. A way back leads to a higher layer than the stop before.
    """

    def __init__(self, checkout: Path, start: str) -> None:
        file, function, self.parameter = start.split(":")
        contracts = tomllib.loads((checkout / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        self.layers = next(each["layers"] for each in contracts if "containers" in each)
        trees = {_module_of(path.relative_to(checkout)): tree for path, tree in product_trees(checkout).items()}
        self.names = {module: _names(module, tree) for module, tree in trees.items()}
        self.defined = {
            f"{module}.{name}": (module, node) for module, tree in trees.items() for name, node in _definitions(tree)
        }
        module = _module_of(Path(file))
        node = self.defined[f"{module}.{function}"][1]
        own = [each.annotation for each in _parameters(node) if each.arg == self.parameter]
        self.whole, self.holders, self.fields = self._types(module, own), set[str](), set[str]()
        while more := {each for each in self.defined.keys() - self.holders if self._holds(each)}:
            self.holders |= more
        self.stops: list[str] = []
        self._visit(f"{module}.{function}", set())

    def figures(self) -> dict[str, int]:
        at = {f"embedder.{name}": number for number, layer in enumerate(self.layers) for name in layer.split(" | ")}
        heights = [at.get(".".join(stop.split(".")[:2]), len(at)) for stop in self.stops]
        back = sum(after < before for before, after in pairwise(heights))
        return {"files": len(set(self.stops)), "ways back": back}

    def _types(self, module: str, annotations: Iterable[ast.expr | None]) -> set[str]:
        words = {word for each in annotations if each is not None for word in re.findall(r"\w+", ast.unparse(each))}
        return {self.names[module][word] for word in words & self.names[module].keys()}

    def _holds(self, name: str) -> bool:
        module, node = self.defined[name]
        if not isinstance(node, ast.ClassDef):
            return False
        fields = {each.target.id: each.annotation for each in node.body if isinstance(each, ast.AnnAssign)}
        made_by = self.defined.get(f"{name}.__init__", (module, node))[1]
        fields |= {each.arg: each.annotation for each in _parameters(made_by)}
        found = {each for each, kind in fields.items() if self._types(module, [kind]) & (self.whole | self.holders)}
        self.fields |= found
        return bool(found)

    def _visit(self, name: str, seen: set[str]) -> None:
        module, node = self.defined[name]
        if name in self.holders:  # a record takes it no way
            return
        self.stops.append(module)
        kinds = {each.arg: self._types(module, [each.annotation]) for each in _parameters(node)}
        known = {each: not kind & self.whole for each, kind in kinds.items() if kind & (self.whole | self.holders)}
        known |= {"self": True} if name.rpartition(".")[0] in self.holders else {}
        if name in seen or not known:
            return
        seen.add(name)
        steps = [each for each in ast.walk(node) if isinstance(each, ast.Assign | ast.Call)]
        for each in sorted(steps, key=lambda each: (each.lineno, each.col_offset)):
            if isinstance(each, ast.Assign):
                known |= self._assigned(module, each.targets[0], each.value, known)
                continue
            given = [*each.args, *(keyword.value for keyword in each.keywords), getattr(each.func, "value", each.func)]
            if any(self._is_holder(module, value, known) is not None for value in given):
                for callee in (self._named(module, name, part) for part in (each.func, *each.args)):
                    if callee in self.defined:
                        self._visit(callee, seen)

    def _assigned(self, module: str, target: ast.expr, value: ast.expr, known: dict[str, bool]) -> dict[str, bool]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = zip(target.elts, value.elts, strict=False)
            return {name: held for pair in pairs for name, held in self._assigned(module, *pair, known).items()}
        held = self._is_holder(module, value, known)
        return {target.id: held} if isinstance(target, ast.Name) and held is not None else {}

    def _is_holder(self, module: str, value: ast.expr, known: Mapping[str, bool]) -> bool | None:
        """Whether an expression only holds the value; None where it has nothing of it."""
        if isinstance(value, ast.Call):
            made = self._named(module, "", value.func).removesuffix(".__init__")
            if made in self.defined:
                home, node = self.defined[made]
                types = {made} if isinstance(node, ast.ClassDef) else self._types(home, [node.returns])
                return not types & self.whole if types & (self.whole | self.holders) else None
            return self._is_holder(module, getattr(value.func, "value", value.func), known)
        last = getattr(value, "attr", None)
        while isinstance(value, ast.Attribute):
            if value.attr == self.parameter:
                return False
            value = value.value
        held = known.get(value.id) if isinstance(value, ast.Name) else None
        return None if held and last is not None and last not in self.fields else held

    def _named(self, module: str, caller: str, part: ast.expr) -> str:
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            owner = caller.rpartition(".")[0] if part.value.id == "self" else self.names[module].get(part.value.id, "")
            return f"{owner}.{part.attr}"
        name = self.names[module].get(part.id, "") if isinstance(part, ast.Name) else ""
        return f"{name}.__init__" if name in self.holders and f"{name}.__init__" in self.defined else name


def _parameters(node: ast.AST) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs] if isinstance(node, FUNCTIONS) else []


def _names(module: str, tree: ast.Module) -> dict[str, str]:
    imports = [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
    names = {name.asname or name.name: f"{each.module}.{name.name}" for each in imports for name in each.names}
    return names | {name: f"{module}.{name}" for name, _ in _definitions(tree)}


def _definitions(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    """Functions and classes of a module, and methods as `Class.method`."""
    found = [(each.name, each) for each in tree.body if isinstance(each, (*FUNCTIONS, ast.ClassDef))]
    classes = [each for _, each in found if isinstance(each, ast.ClassDef)]
    inner = [(each.name, part) for each in classes for part in each.body if isinstance(part, FUNCTIONS)]
    return found + [(f"{name}.{part.name}", part) for name, part in inner]


if __name__ == "__main__":
    main()
