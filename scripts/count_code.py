"""How large checkouts are, and how their parts hang together: lines of Python, of all kinds, and the longest file.

python scripts/count_code.py DIR...            # the first may be compared with others: the last column is its ratio
python scripts/count_code.py --structure DIR   # how its parts hang together, by what the house is judged by
"""

import argparse
import ast
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import networkx

from harness import show

PACKAGES = ("embedder", "shards", "index", "scripts", "tests")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PRODUCT = ("embedder", "shards", "index")
BELOW_INGEST = (
    "observability", "report", "predictor.py", "planning", "pipeline.py", "retrieval", "store_check", "store_index",
    "ray_executor.py", "executors", "encoders", "placement", "models", "user_steps", "servables", "steps", "sources",
    "media", "store", "storage", "compat", "process",
)  # fmt: skip
LONG_LINES = 40
COLUMNS = {
    "checkout": "{checkout}",
    **{name: f"{{{name}:,}}" for name in PACKAGES},
    "plug-ins": "{plug-ins:,}",
    "all": "{all:,}",
}
COLUMNS |= {"longest file": "{longest}", "of the first": "{ratio:.3f}"}
FIGURES = ("files", "in circles", "RunConfig below ingest", "functions over 40 lines", "class names twice")
STRUCTURE = {name: f"{{{name}}}" for name in ("checkout", *FIGURES, "file names twice")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--structure", action="store_true", help="figures of the structure instead")
    options = parser.parse_args()
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
    readers = {path for path, node in nodes if isinstance(node, ast.ImportFrom) and _imports_configuration(node)}
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


def _imports_configuration(node: ast.ImportFrom) -> bool:
    return node.module == "embedder.config" and any(each.name == "RunConfig" for each in node.names)


def import_graph(checkout: Path, trees: Mapping[Path, ast.Module]) -> networkx.DiGraph:
    """Modules with an edge to each one that they import; imports in functions, and for types, count."""
    modules = {module_of(path.relative_to(checkout)): tree for path, tree in trees.items()}
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


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


if __name__ == "__main__":
    main()
