"""Programs run only by their path, where nothing of this package and of its other dependencies can be imported."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from exported_towers import SIDE_PX

from embedder.plugins.runners import PROGRAMS
from embedder.process import child_main
from embedder.servables import make_servable, program
from embedder.servables.program import as_table

FILES = [program.__file__, child_main.__file__, *sorted(map(str, PROGRAMS.glob("*.py")))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.rpartition("/")[2])
def test_the_syntax_is_that_of_python_3_9(path):
    ast.parse(Path(path).read_text(encoding="utf-8"), feature_version=(3, 9))


@pytest.mark.parametrize("kind", ["torch_export", "torchscript"])
@pytest.mark.slow
def test_a_program_runs_without_this_package(kind, tmp_path):
    """The child of another interpreter has Arrow, NumPy and the framework; what it returns travels as Arrow IPC."""
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIDE_PX * SIDE_PX * 3, 4)).eval()
    pixels = torch.rand(2, 3, SIDE_PX, SIDE_PX)
    path = tmp_path / "graph"
    if kind == "torch_export":
        path = path.with_suffix(".pt2")
        torch.export.save(torch.export.export(module, (pixels,)), path)
    else:
        with pytest.warns(FutureWarning):
            torch.jit.trace(module, (pixels,)).save(str(path))
    inputs = {"x": {"make": "pixels", "values": "unit", "preprocess": {"image_size": SIDE_PX}}}
    section = {"name": "s", "kind": kind, "uri": str(path), "inputs": inputs, "outputs": {"y": {"shape": [4]}}}
    found = make_servable(section).program()
    images = np.random.default_rng(0).integers(0, 256, (2, SIDE_PX, SIDE_PX, 3), dtype=np.uint8)
    batch = pa.record_batch({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(images)})
    with pa.OSFile(str(tmp_path / "in.arrow"), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    child = f"""
import importlib.util, sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {{"embedder", "shards", "index", "pydantic", "ray", "timm", "transformers"}}:
            raise ImportError(name + " is forbidden here")

sys.meta_path.insert(0, Forbidden())
import pyarrow as pa
spec = importlib.util.spec_from_file_location("program", {program.__file__!r})
program = importlib.util.module_from_spec(spec)
sys.modules["program"] = program
spec.loader.exec_module(program)
settings = {dict(found.settings)!r}
loaded = program.LoadedProgram(program.ServableProgram({found.place!r}, {found.name!r}, settings), "cpu", 1)
(batch,) = pa.ipc.open_stream(open("in.arrow", "rb").read())
table = loaded(batch)
with pa.ipc.new_stream("out.arrow", table.schema) as writer:
    writer.write_table(table)
"""
    ended = subprocess.run(
        [sys.executable, "-c", child], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    table = pa.ipc.open_stream((tmp_path / "out.arrow").read_bytes()).read_all()
    with torch.no_grad():
        expected = module(torch.from_numpy(images).permute(0, 3, 1, 2) / 255).numpy()
    assert np.abs(np.array(table["y"].to_pylist()) - expected).max() < 1e-5


def test_tables_batches_and_columns_become_tables():
    table = pa.table({"a": [1, 2]})
    assert as_table(table) is table
    assert as_table(table.to_batches()[0]).equals(table)
    made = as_table({"a": [1, 2], "b": np.arange(12, dtype=np.float32).reshape(2, 3, 2), "c": np.zeros((2, 0, 4))})
    assert made["b"].to_pylist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    assert made["b"].type.value_type.value_type == pa.float32()
    assert made["c"].to_pylist() == [[], []]
    for wrong in (None, [1], "a"):
        with pytest.raises(TypeError, match=r"return a pyarrow.Table"):
            as_table(wrong)
