"""The head node of a cluster may have no torch and no decoder: these imports must not ask for them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "timm", "transformers", "ray", "faiss", "PIL", "av"}
LIGHT = (
    "embedder",
    "embedder.cli",
    "embedder.config",
    "shards",
    "shards.config",
    "shards.plan",
    "shards.planning.what_if",
    "embedder.planning.command",
    "index",
    "index.build",
    "index.search",
    "index.versions",
)


def run_fresh(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("module", LIGHT)
def test_import_loads_nothing_heavy(module: str, tmp_path: Path) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    result = run_fresh("-c", code, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert HEAVY & set(json.loads(result.stdout)) == set()


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    """`-X importtime` lists every import on standard error as `self | cumulative | name`."""
    result = run_fresh("-X", "importtime", Path(sys.executable).parent / "embedder", "--help", folder=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "search" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "import time:" in line}
    assert "embedder.cli" in imported
    assert HEAVY & imported == set()
