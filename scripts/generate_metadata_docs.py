#!/usr/bin/env python3
"""Write the table of docs/metadata.md: the columns of the medium, from the table that the code follows.

python scripts/generate_metadata_docs.py
"""

import re
from pathlib import Path

from embedder.batch_schema import medium_schema
from embedder.medium_columns import COLUMNS

PAGE = Path(__file__).parents[1] / "docs/metadata.md"
BLOCK = re.compile(r"(?<=<!-- columns -->\n).*?(?=<!-- end of the columns -->)", re.DOTALL)


def page() -> str:
    lines = ["| column | type | group | what it is | from |", "| --- | --- | --- | --- | --- |"]
    types = medium_schema(column.name for column in COLUMNS)
    for column in COLUMNS:
        sources = ", ".join(f"`{source}`" for source in column.sources)
        kind = types.field(column.name).type
        lines.append(f"| `{column.name}` | {kind} | `{column.group}` | {column.text} | {sources} |")
    return BLOCK.sub(lambda _: "\n".join(["", *lines, "", ""]), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
