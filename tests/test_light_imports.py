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
import samples
from index_stores import indexed_store, vector_of
from packaging.version import Version

import embedder
from embedder.compat import FAST_START_VARIABLE, light_imports
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
    "embedder.plugins.plan.answer",
    "index",
    "index.vectors",
    "index.versions",
    "embedder.store_index.keep_index",
    "embedder.plugins.maintain.store_check.check",
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
    not (DEFERRED_COMPILER.is_there() and light_imports.QUESTIONS.is_there()),
    reason="of versions that are not patched",
)
ROOT = Path(embedder.__file__).parents[1]
DEMO_MODEL = ROOT / "embedder" / "demo_model"
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
UNUSED = {"sympy", "torch.distributed.tensor", "torch.nn.attention.flex_attention", "wandb"}
"""What only training and tracking need, of what transformers and timm import where it is there."""
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
    """One after the other in one process: what is heavy is reported with the module that loads it."""
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
    unused = set(UNUSED)
    if Version(version("torch")) < Version("2.15"):  # on the meta device, older ones ask sympy about sizes
        unneeded, unused = unneeded - {"sympy"}, unused - {"sympy"}
    assert (COMPILER | unneeded | unused) & imported == set()


@patched
@pytest.mark.parametrize("program", [["-m", "embedder"], [str(Path(sys.executable).parent / "embedder")]])
def test_a_command_that_embeds_in_one_process_leaves_it_out_too(
    program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = samples.folder(tmp_path / "in", num_images=3)
    (tmp_path / "sitecustomize.py").write_text("""
import atexit, pathlib, sys
atexit.register(lambda: pathlib.Path("modules").write_text("\\n".join(sys.modules)))
""")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    command = ["embed", str(source), "--model", str(DEMO_MODEL), "--store", str(tmp_path / "s"), "--engine", "local"]
    result = run_fresh(*program, *command, folder=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    imported = set((tmp_path / "modules").read_text().splitlines())
    assert {"torch", "timm.layers", "transformers.models.albert.modeling_albert"} <= imported
    unused = UNUSED - ({"sympy"} if Version(version("torch")) < Version("2.15") else set()) | {"pandas"}
    assert unused & imported == set()


def test_the_names_of_transformers_models_that_are_read_once_are_those_that_it_reads_itself(tmp_path: Path) -> None:
    program = """
import json, sys
from embedder.compat.light_imports import MODEL_NAMES, sparing_imports
with sparing_imports(with_text=True):
    import transformers.models
from transformers.utils import import_utils
if MODEL_NAMES.is_there():
    read = import_utils.create_import_structure_from_path
    assert read.__module__ == "embedder.compat.light_imports"
    path = transformers.models.__file__
    cached = read.__closure__[1].cell_contents
    assert cached.cache_info().hits >= 1
    cached.cache_clear()
    assert import_utils.spread_import_structure(cached(path)) == import_utils.define_import_structure(path)
from transformers import AlbertConfig, AlbertModel, AutoTokenizer
"""
    modules_after(program, folder=tmp_path)


@pytest.mark.parametrize("is_installed", [True, False])
def test_whether_a_tracker_is_installed_can_be_asked_where_it_is_left_out(is_installed: bool, tmp_path: Path) -> None:
    """accelerate, which transformers imports where it is there, asks so at its import."""
    program = """
import sys
from importlib.util import find_spec
from embedder.compat import light_imports

light_imports.TRACKER = "left_out"
with light_imports.sparing_imports(with_text=False):
    is_found = find_spec("left_out") is not None
    try:
        import left_out
    except ImportError:
        assert "left_out" not in sys.modules
    else:
        raise AssertionError("imported")
assert is_found == (sys.argv[1] == "True"), is_found
if is_found:
    import left_out
"""
    if is_installed:
        (tmp_path / "left_out.py").touch()
    modules_after(program, str(is_installed), folder=tmp_path)


def test_frames_are_read_and_made_after_arrow_was_kept_from_pandas(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    program = """
import sys
from embedder.compat import light_imports
light_imports.is_command = lambda: True
light_imports.spare_pandas()
import pyarrow as pa
rows = pa.table({"a": pa.array([1.0, None])})
assert "pandas" not in sys.modules
frame = rows.to_pandas()
assert pa.table(frame)["a"].to_pylist() == [1.0, None]
assert pa.array(frame["a"]).null_count == 1
"""
    assert "pandas" in modules_after(program, folder=tmp_path)


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
