"""Programs of the kinds `torch_export` and `torchscript`: graphs of torch; Python 3.9."""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from .tensors import graph_inputs, in_pieces, join_outputs, named_outputs

ONLY_WEIGHTS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Variable that makes torch.load restrict itself to tensors and plain values, whatever its caller asks for."""
WHOLE_PICKLES = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
CODE_FOLDERS = ("data/aotinductor/", "data/executorch/", "data/mtia")
OBJECT_PREFIXES = ("custom_obj_", "opaque_obj_")


class TorchGraph:
    """Graph of torch: arrays of a batch in, one array for each declared output out."""

    least = 1
    most: int | None = None

    def __init__(self, path: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any], **settings: Any) -> None:
        self.path, self.inputs, self.outputs, self.settings = path, inputs, outputs, settings

    def load(self, device: str, num_threads: int) -> None:
        """Load the graph; ValueError if the archive holds pickles or compiled code, or other inputs than declared."""
        import torch

        torch.set_num_threads(num_threads)
        self.torch, self.device = torch, torch.device(device)
        self.graph = self.open()

    def open(self) -> Any:
        """Return the callable."""
        raise NotImplementedError

    def __call__(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """Run the graph."""
        found = []
        with self.torch.inference_mode():
            for count, arrays in in_pieces(graph_inputs(batch, self.inputs), self.least, self.most):
                tensors = [self.torch.from_numpy(values).to(self.device) for values in arrays.values()]
                values = named_outputs(self.graph(*tensors), self.outputs)
                found.append({name: value[:count].cpu().numpy() for name, value in values.items()})
        return join_outputs(found, self.outputs)


class ExportedGraph(TorchGraph):
    """Program that torch.export saved."""

    def open(self) -> Any:
        """Read the archive; only tensors and the graph are made from it, unless pickles are allowed."""
        import torch.export

        allow_pickle = self.settings["allow_pickle"]
        if not allow_pickle:
            check_archive(self.path)
        with weights_only(not allow_pickle):
            program = torch.export.load(self.path)
        names = program.graph_signature.user_inputs
        masks = [each["mask"] for each in self.inputs.values() if each.get("mask")]
        declared = [*self.inputs, *masks]
        if len(names) != len(declared):
            raise ValueError(f"its inputs are {', '.join(map(str, names))}, and declared are {', '.join(declared)}")
        self._read_rows(program, names[0])
        module = program.module()
        if self.device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            module = move_to_device_pass(program, self.device).module()
        rows = self.settings["compiled_rows"]
        return module if rows is None else self._compile(module, rows)

    def _compile(self, module: Any, rows: int) -> Any:
        """Wrap the graph, whose first call then compiles it for one number of rows; ValueError without a compiler.

        Each call has this number of rows, or at most as many as the graph takes; short batches repeat their last row.
        """
        compilers = [os.environ.get("CXX") or "g++", "clang++"]
        if self.device.type == "cpu" and not any(map(shutil.which, compilers)):
            raise ValueError(
                f"compiled = true needs a C++ compiler, and none of {', '.join(compilers)} is here; install g++, or "
                "leave the key out"
            )
        self.least = self.most = rows if self.most is None else max(self.least, min(rows, self.most))
        return self.torch.compile(module)

    def _read_rows(self, program: Any, first: str) -> None:
        """Note how many rows the graph takes: one number, or the range of a dynamic dimension."""
        (node,) = [each for each in program.graph.nodes if each.op == "placeholder" and each.name == first]
        size = node.meta["val"].shape[0] if node.meta["val"].dim() else 1
        if isinstance(size, int):
            self.least = self.most = size
            return
        limits = program.range_constraints.get(size.node.expr)
        if limits is not None:
            self.least = max(1, int(limits.lower))
            self.most = int(limits.upper) if limits.upper.is_finite and limits.upper < 1 << 31 else None


class ScriptedGraph(TorchGraph):
    """Module that torch.jit saved, or with the user's permission one that was pickled."""

    def open(self) -> Any:
        """Read the archive."""
        if self.settings["is_pickle"]:
            module = self.torch.load(self.path, map_location=self.device, weights_only=False)
            if not callable(module):
                raise ValueError(
                    f"the pickle holds a {type(module).__name__}, which computes nothing; save the whole module"
                )
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # that torch.export is newer
                module = self.torch.jit.load(self.path, map_location=self.device)
        return module.eval()


@contextmanager
def weights_only(is_on: bool) -> Iterator[None]:
    """With `is_on`, limit torch.load to tensors within the block: torch.export's reader falls back to whole pickles."""
    before = {name: os.environ.pop(name, None) for name in (ONLY_WEIGHTS, WHOLE_PICKLES)}
    if is_on:
        os.environ[ONLY_WEIGHTS] = "1"
    try:
        yield
    finally:
        os.environ.pop(ONLY_WEIGHTS, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def check_archive(path: str) -> None:
    """Refuse a .pt2 that holds pickled objects or compiled code.

    Raises `ValueError` if it does, or two readers could understand its list of files differently.
    """
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        roots = {name.partition("/")[0] for name in names}
        if len(roots) != 1 or len(set(names)) != len(names):
            raise ValueError("its files have several roots or one name twice, as those of torch.export.save don't")
        for name in names:
            inner = name.partition("/")[2]
            if inner.startswith(CODE_FOLDERS):
                raise ValueError(f"it holds compiled code ({inner}); allow_pickle = true runs what you trust")
            if inner.startswith("data/") and inner.endswith("_config.json"):
                _check_payloads(inner, json.loads(archive.read(name))["config"])


def _check_payloads(where: str, payloads: Mapping[str, Mapping[str, Any]]) -> None:
    for name, payload in payloads.items():
        if payload.get("use_pickle") or str(payload["path_name"]).startswith(OBJECT_PREFIXES):
            raise ValueError(f"it holds a pickle ({where}: {name}); allow_pickle = true loads what you trust")
