"""Kind `torch_export`: a program that torch.export saved (.pt2)."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from embedder.plugins.runners import PROGRAMS
from embedder.servables.declared_servables import DeclaredServable, check_kind
from embedder.servables.program import ServableProgram


class TorchExportServable(DeclaredServable):
    """Program of torch.export; its inputs are given in their order, or by name where all have the program's names."""

    kind: Literal["torch_export"] = "torch_export"
    compiled: bool = Field(
        False,
        description="whether torch.compile makes machine code of it where it runs, for calls of `batch_size` rows; "
        "needs a C++ compiler there (for GPUs, Triton), and the first call waits for it",
    )

    def own_files(self) -> list[Path]:
        """Return the archive."""
        (path,) = super().own_files()
        check_kind(self.where(), path, ("torch_export",))
        return [path]

    def program(self) -> ServableProgram:
        """Return the program that runs it."""
        settings = {"path": str(self.files()[0]), "allow_pickle": self.allow_pickle, **self.column_settings()}
        settings["compiled_rows"] = self.batch_size if self.compiled else None
        return ServableProgram(str(PROGRAMS / "torch_graph.py"), "ExportedGraph", settings)
