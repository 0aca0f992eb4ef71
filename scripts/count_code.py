"""How large checkouts are: lines of code by Python's tokenizer, documented public functions, the longest file.

    python scripts/count_code.py DIR...      # the first may be compared with others: the last column is its ratio

Comments, docstrings and blank lines do not count. Public are functions of modules and of classes without a leading
underscore; the longest file is that with the most lines of all kinds.
"""

import argparse
import ast
import io
import tokenize
from pathlib import Path

from harness import show

PACKAGES = ("embedder", "shards", "index", "scripts")
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COLUMNS = {"checkout": "{checkout}", **{name: f"{{{name}:,}}" for name in PACKAGES}, "all": "{all:,}"}
COLUMNS |= {"documented": "{documented:.1%}", "longest file": "{longest}", "of the first": "{ratio:.3f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="DIR")
    counts = [count(checkout) for checkout in parser.parse_args().checkouts]
    show([each | {"ratio": each["all"] / max(1, counts[0]["all"])} for each in counts], COLUMNS)


def count(checkout: Path) -> dict:
    """What stands in a row of the table."""
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


def code_lines(text: str, nodes: list[ast.AST]) -> set[int]:
    """Numbers of the lines that hold code; texts that stand alone are documentation."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {at for token in tokens if token.type not in NO_CODE for at in range(token.start[0], token.end[0] + 1)}
    texts = [node for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    texts = [node for node in texts if isinstance(node.value.value, str)]
    return code - {at for node in texts for at in range(node.lineno, node.end_lineno + 1)}


if __name__ == "__main__":
    main()
