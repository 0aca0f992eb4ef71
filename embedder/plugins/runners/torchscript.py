"""Kind `torchscript`: a module that torch.jit saved; with `allow_pickle`, one that torch.save pickled whole.

torch's own reader opens a TorchScript archive. It makes only tensors and the archive's own classes and calls nothing
else, and it runs only if the user names this kind.
"""

from pathlib import Path
from typing import Literal

from embedder.plugins.runners import PROGRAMS
from embedder.servables.declared_servables import DeclaredServable, check_kind
from embedder.servables.program import ServableProgram


class TorchScriptServable(DeclaredServable):
    """Module of TorchScript; inputs are given in their order."""

    kind: Literal["torchscript"] = "torchscript"

    def own_files(self) -> list[Path]:
        """Return the archive."""
        (path,) = super().own_files()
        check_kind(self.where(), path, ("torchscript", "pickle") if self.allow_pickle else ("torchscript",))
        return [path]

    def program(self) -> ServableProgram:
        """Return the program that runs it."""
        path = self.files()[0]
        is_pickle = check_kind(self.where(), path, ("torchscript", "pickle")) == "pickle"
        settings = {"path": str(path), "is_pickle": is_pickle, **self.column_settings()}
        return ServableProgram(str(PROGRAMS / "torch_graph.py"), "ScriptedGraph", settings)
