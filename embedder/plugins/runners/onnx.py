"""Kind `onnx`: a graph of ONNX, run by ONNX Runtime."""

from pathlib import Path
from typing import Literal

from embedder.plugins.runners import PROGRAMS
from embedder.servables.declared_servables import SAID, DeclaredServable, find_file, kind_of_file
from embedder.servables.program import ServableProgram
from embedder.servables.servable_errors import ServableError

FIRST_TAGS = (b"\x08", b"\x12", b"\x3a")
"""Protobuf's tags of the fields that a graph's file can begin with: ir_version, producer_name, graph."""


class OnnxServable(DeclaredServable):
    """Graph of ONNX; inputs and outputs have the graph's names."""

    kind: Literal["onnx"] = "onnx"

    def own_files(self) -> list[Path]:
        """Return the graph, and files next to it that begin with its name: tensors stored outside it."""
        path = find_file(self.where(), self.uri, "uri")
        kind = kind_of_file(path)
        with path.open("rb") as file:
            first = file.read(1)
        if kind != "unknown" or first not in FIRST_TAGS:
            raise ServableError(f"{self.where()}: {path.name} is {SAID[kind]}, and no ONNX graph; export one")
        return [path, *sorted(each for each in path.parent.glob(f"{path.name}[._]data*") if each.is_file())]

    def program(self) -> ServableProgram:
        """Return the program that runs the graph."""
        settings = {"path": str(self.files()[0]), **self.column_settings()}
        return ServableProgram(str(PROGRAMS / "onnx_graph.py"), "OnnxGraph", settings)
