"""How large checkouts are: lines of code by Python's tokenizer, documented public functions, the longest file.

    python scripts/count_code.py DIR...            # the first may be compared with others: the last column is its ratio
    python scripts/count_code.py --structure DIR   # how its parts hang together, by what the house is judged by

Comments, docstrings and blank lines do not count. Public are functions of modules and of classes without a leading
underscore; the longest file is that with the most lines of all kinds.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import networkx

from harness import show

PACKAGES = ("embedder", "shards", "index", "scripts")
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PRODUCT = ("embedder", "shards", "index")
BELOW_INGEST = (
    "observability", "report", "predictor.py", "planning", "pipeline.py", "retrieval", "store_check", "store_index",
    "engine", "servables", "steps", "sources", "media", "store", "storage", "compat",
)  # fmt: skip
LONG_LINES = 40
COLUMNS = {"checkout": "{checkout}", **{name: f"{{{name}:,}}" for name in PACKAGES}, "all": "{all:,}"}
COLUMNS |= {"documented": "{documented:.1%}", "longest file": "{longest}", "of the first": "{ratio:.3f}"}
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
    lines, lengths, documented = dict.fromkeys(PACKAGES, 0), {"none": 0}, []
    for package in PACKAGES:
        for path in sorted((checkout / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            nodes = list(ast.walk(ast.parse(text)))
            lines[package] += len(code_lines(text, nodes))
            lengths[str(path.relative_to(checkout))] = text.count("\n")
            bodies = (node.body for node in nodes if isinstance(node, ast.Module | ast.ClassDef))
            functions = (each for body in bodies for each in body if isinstance(each, FUNCTIONS))
            documented += [ast.get_docstring(each) is not None for each in functions if not each.name.startswith("_")]
    longest = max(lengths, key=lengths.__getitem__)
    share = sum(documented) / max(1, len(documented))
    about = {"checkout": checkout.resolve().name, "documented": share, "longest": f"{longest} ({lengths[longest]})"}
    return lines | about | {"all": sum(lines.values())}


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


def code_lines(text: str, nodes: list[ast.AST]) -> set[int]:
    """Numbers of the lines that hold code; texts that stand alone are documentation."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {at for token in tokens if token.type not in NO_CODE for at in range(token.start[0], token.end[0] + 1)}
    texts = [node for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    texts = [node for node in texts if isinstance(node.value.value, str)]
    return code - {at for node in texts for at in range(node.lineno, node.end_lineno + 1)}


if __name__ == "__main__":
    main()
