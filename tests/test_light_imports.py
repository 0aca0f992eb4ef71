"""Imports of each kind of process: the head node of a cluster may have no torch and no decoder, and every import of a
stage is paid for by each of its replicas."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from index_stores import indexed_store, vector_of
from packaging.version import Version

import embedder
from embedder.compat import FAST_START_VARIABLE, light_transformers
from embedder.retrieval.store_api import keep_row_files
from embedder.store.lock import write_lock
from shards.compat import DEFERRED_COMPILER

pytestmark = pytest.mark.medium

HEAVY = {"torch", "timm", "transformers", "ray", "faiss", "PIL", "av"}
LIGHT = (
    "embedder",
    "embedder.cli",
    "embedder.config",
    "embedder.config_toml.config_reference",
    "embedder.plugins.train.train_config",
    "shards",
    "shards.model_config",
    "shards.plan",
    "shards.planning.what_if",
    "embedder.planning.answer",
    "index",
    "index.vectors",
    "index.versions",
    "embedder.store_index.keep_index",
    "embedder.store_check.check",
    "embedder.retrieval.flat_index",
    "embedder.plugins.deploy.submission.submit",
    "embedder.sources.listing",
    "embedder.sources.fetch",
    "embedder.plugins.train.trainer.train_settings",
    "embedder.retrieval.rank_metrics",
    "embedder.retrieval.paired",
    "embedder.entry_points",
)
patched = pytest.mark.skipif(
    not (DEFERRED_COMPILER.is_there() and light_transformers.QUESTIONS.is_there()),
    reason="of versions that are not patched",
)
DEMO_MODEL = Path(embedder.__file__).parent / "demo_model"
COMPILER = {"torch._dynamo", "torch._inductor", "triton"}  # 1.5 s of CPU
SLOW_EXTRAS = {"scipy", "sklearn", "matplotlib", "pandas"}
STAGES = {
    "vision": ("vision_only", {"transformers", "sympy"}),
    "text": ("text_only", {"timm"}),
    "both": ("whole_model", set()),
}
EMBED = """
import json, sys
import torch
from shards.activations import Batch, TowerState
from shards.model_config import load_model_config
from shards import shard_specs
from shards.shard import load_shard

folder, spec = sys.argv[1], sys.argv[2]
config = load_model_config(folder)
shard = load_shard(folder, getattr(shard_specs, spec)(config))
size, one = config.vision.image_size, torch.ones(2, dtype=torch.int64)
pixels = TowerState(torch.zeros((2, size, size, 3), dtype=torch.uint8), one)
shard(Batch(pixels, TowerState(torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([1, 2]))))
"""
STAGE_PROCESS = """
import gc, json, os, sys
from embedder.steps.stage_actor import StageActor, StageSpec
from shards.model_config import load_model_config
from shards import shard_specs

folder, spec = sys.argv[1], sys.argv[2]
shard = getattr(shard_specs, spec)(load_model_config(folder))
niceness = os.nice(0)
stage = StageActor(StageSpec(0, folder, shard, "bfloat16", "cpu", 1, (32,), niceness=2))
assert os.nice(0) == min(19, niceness + 2)
assert gc.isenabled() and gc.get_freeze_count() > 0
import torch
assert torch.distributed.is_available(), "torch itself stays as it is"
"""
LIST = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def run_fresh(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environment = os.environ | {FAST_START_VARIABLE: "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def modules_after(program: str, *arguments: str | Path, folder: Path) -> set[str]:
    """Modules that a fresh process has imported by the end of a program."""
    result = run_fresh("-c", f"{program}\n{LIST}", *arguments, folder=folder)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


def test_imports_load_nothing_heavy(tmp_path: Path) -> None:
    """One after the other in one process: what is heavy is told with the module that loads it."""
    program = f"""
import importlib, sys
for module in {LIGHT!r}:
    importlib.import_module(module)
    assert not (heavy := {HEAVY!r} & set(sys.modules)), (module, heavy)
"""
    modules_after(program, folder=tmp_path)


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    """`-X importtime` lists every import on standard error as `self | cumulative | name`."""
    result = run_fresh("-X", "importtime", Path(sys.executable).parent / "embedder", "--help", folder=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "search" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "import time:" in line}
    assert "embedder.cli" in imported
    assert (HEAVY | {"urllib3"}) & imported == set()


def test_a_search_by_vector_imports_its_own_command_and_neither_pandas_nor_encoders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedder.retrieval.row_files.MIN_ROWS", 1)
    files = indexed_store(tmp_path / "s", 100, kind="flat")
    with write_lock(files):
        keep_row_files(files)
    np.save(tmp_path / "query.npy", vector_of("0007.jpg"))
    program = f"""
import sys
import embedder.retrieval.row_files
from embedder.cli import main
embedder.retrieval.row_files.MIN_ROWS = 1
sys.argv = ["embedder", "search", "--store", {files.address!r}, "--vector", "query.npy"]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
"""
    result = run_fresh("-c", f"{program}\n{LIST}", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "0007.jpg" in result.stdout
    imported = set(json.loads(result.stdout.splitlines()[-1]))
    assert {"faiss", "embedder.cli.search_command"} <= imported
    unneeded = {"pandas", "deltalake", "duckdb", "embedder.cli.embed_command", "embedder.encoders.query_encoder"}
    assert (unneeded | {"shards.towers.registry", "pyarrow.dataset"} | HEAVY - {"faiss"}) & imported == set()


@patched
@pytest.mark.slow
@pytest.mark.parametrize("kind", STAGES)
def test_a_stage_starts_and_embeds_without_a_compiler(kind: str, tmp_path: Path) -> None:
    spec, unneeded = STAGES[kind]
    imported = modules_after(EMBED, DEMO_MODEL, spec, folder=tmp_path)
    assert "torch" in imported
    assert (COMPILER | SLOW_EXTRAS | HEAVY - {"torch", "timm", "transformers", "PIL"} | unneeded) & imported == set()


@patched
@pytest.mark.parametrize("kind", ["vision", "text"])
def test_a_process_of_a_stage_leaves_out_what_no_shard_uses(kind: str, tmp_path: Path) -> None:
    spec, unneeded = STAGES[kind]
    imported = modules_after(STAGE_PROCESS, DEMO_MODEL, spec, folder=tmp_path)
    assert {"torch", "embedder.steps.stage"} <= imported
    unused = {"sympy", "torch.distributed.tensor", "torch.nn.attention.flex_attention"}
    if Version(version("torch")) < Version("2.15"):  # on the meta device, older ones ask sympy about sizes
        unneeded, unused = unneeded - {"sympy"}, unused - {"sympy"}
    assert (COMPILER | unneeded | unused) & imported == set()


@patched
@pytest.mark.parametrize("library", ["timm.layers", "transformers.masking_utils"])
@pytest.mark.slow
def test_a_library_imported_without_a_compiler_finds_it_when_it_asks(library: str, tmp_path: Path) -> None:
    program = f"""
import sys
from shards.compat import deferred_compiler
with deferred_compiler():
    import {library}
    import torch
    marked = torch.compiler.disable(lambda x: x + 1)
assert "torch._dynamo" not in sys.modules
assert marked(1) == 2
compiled = torch.compile(lambda x: x * 2, backend="eager")
assert compiled(torch.ones(2)).tolist() == [2, 2]
import torch._dynamo.utils
assert torch._dynamo.__file__ and torch._dynamo.utils.is_compile_supported("cpu") in (True, False)
if "torchvision" in sys.modules:
    from importlib import import_module
    assert import_module("torchvision.ops.roi_align").is_compile_supported("cpu") in (True, False)
"""
    modules_after(program, folder=tmp_path)


@patched
def test_an_unknown_name_of_the_compiler_brings_the_real_one(tmp_path: Path) -> None:
    program = """
import sys
from shards.compat import deferred_compiler
with deferred_compiler():
    from torch._dynamo import reset
    from torch._dynamo.utils import counters
    import torch._dynamo.config
import torch
assert reset is torch._dynamo.reset and counters is sys.modules["torch._dynamo.utils"].counters
"""
    assert "torch._dynamo" in modules_after(program, folder=tmp_path)
