"""The tables are everybody's: other programs read them as the documentation says, and end as they should.

Arrow's threads may let go of a buffer while the interpreter ends. A buffer that a Python file or file system gave them
aborts the process then, some times in a hundred; so each way is looked at for such a one.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_samples import row
from store_states import new_store, publish_refresh

ROOT = Path(__file__).parents[3]
PAGES = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", ROOT / "docs/search.md")]
BLOCKS = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)]
SHOWN = """
import ast, sys
for statement in ast.parse(sys.argv[1]).body:  # each shown as a notebook would
    exec(compile(ast.Interactive([statement]), "README.md", "single"))
"""
FORBIDDING = """
import pyarrow.fs
def refuse(*arguments, **keywords): raise RuntimeError("Arrow would read through Python")
pyarrow.fs.PyFileSystem = pyarrow.PythonFile = refuse
"""


def block_with(text: str) -> str:
    """The one example of the documentation that has some words."""
    (block,) = [block for block in BLOCKS if text in block]
    return block


def lines_of(block: str, *names: str) -> str:
    """Those of an example's statements that import something or give a name its value."""
    statements = ast.parse(block).body
    kept = [
        each
        for each in statements
        if isinstance(each, ast.Import)
        or (isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.targets[0].id in names)
    ]
    return "\n".join(map(ast.unparse, kept))


WAYS = {
    "Store.to_arrow": lines_of(block_with("store.to_arrow(["), "store", "vectors") + "\nvectors.num_rows",
    "Polars": block_with("polars"),
    "DuckDB": block_with("duckdb"),
    "deltalake": "from published_rows import delta_rows\ndelta_rows('runs/demo/store/embeddings').num_rows",
}
SHOWS = {"Store.to_arrow": "40\n", "Polars": "shape: (5, ", "DuckDB": "40", "deltalake": "40\n"}


@pytest.fixture
def folder(tmp_path):
    """Folder in which the examples are run: they name runs/demo/store."""
    files = new_store(tmp_path / "runs/demo/store")
    rng = np.random.default_rng(0)
    for number in range(2):
        vectors = rng.standard_normal((20, 256), np.float32)
        publish_refresh(
            files, *(row(f"{number}-{place}.jpg", image_embedding=each.tolist()) for place, each in enumerate(vectors))
        )
    return tmp_path


def run(folder: Path, source: str, before: str = "") -> subprocess.CompletedProcess:
    """Run an example in a process of its own, which ends as any other does."""
    # Ray's workers have it too; in Ray's own `runtime_env` a path with a space would let them wait for ever.
    paths = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    command = [sys.executable, "-c", before + SHOWN, source]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False, env=paths)


@pytest.mark.medium
@pytest.mark.parametrize("way", WAYS)
def test_no_documented_way_reads_through_a_python_file_system(folder, way):
    done = run(folder, WAYS[way], FORBIDDING)
    assert (done.returncode, done.stderr) == (0, "")
    assert SHOWS[way] in done.stdout


@pytest.mark.medium
def test_a_way_that_does_is_found_out(folder):
    plain = "import deltalake\ndeltalake.DeltaTable('runs/demo/store/embeddings').to_pyarrow_table()"
    assert "Arrow would read through Python" in run(folder, plain, FORBIDDING).stderr


@pytest.fixture
def bucket_files(bucket):
    """A store in a bucket."""
    files = new_store(f"{bucket}/plain/store")
    publish_refresh(files, *(row(f"{number}.jpg", image_embedding=[float(number)] * 256) for number in range(40)))
    return files


@pytest.mark.medium
def test_a_store_in_a_bucket_is_not_read_through_a_python_file(bucket_files, tmp_path):
    opened = f"import embedder\nstore = embedder.open_store('{bucket_files.address}')\n"
    ways = (
        "embeddings = store.to_arrow()\nembeddings.num_rows\nstore.items().num_rows\nimport polars, duckdb",
        f"polars.read_delta('{bucket_files.uri('embeddings')}', storage_options={{'allow_http': 'true'}}).head()",
        "duckdb.sql('SELECT modality, count(*) FROM embeddings GROUP BY modality')",
    )
    done = run(tmp_path, opened + "\n".join(ways), FORBIDDING)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("40\n40\nshape: (5, ") and "image" in done.stdout
    python_file = "store.files.open('CURRENT.json')"
    assert "Arrow would read through Python" in run(tmp_path, opened + python_file, FORBIDDING).stderr
