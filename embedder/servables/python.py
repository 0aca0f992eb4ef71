"""Kind `python`: a class of the user's own file or package."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from embedder.servables.declared_servables import DeclaredServable, find_file, find_module
from embedder.servables.program import FILE_SUFFIX, ServableProgram
from embedder.servables.servable import absolute_path
from embedder.servables.servable_errors import ServableError


class PythonServable(DeclaredServable):
    """Class named FILE.py:Class or package.module:Class, with `load(device)` and `__call__(RecordBatch) -> Table`.

    Its source counts for the fingerprint; what it imports counts only if `extra_files` names it.
    """

    kind: Literal["python"] = "python"
    settings: dict[str, Any] = Field({}, description="keyword arguments of the class")

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        place, _, class_name = self.uri.rpartition(":")
        if not place or not class_name.isidentifier():
            raise ValueError(f"uri = {self.uri!r}: expected FILE.py:Class or package.module:Class")
        return self

    def absolute(self) -> Self:
        """Return it with absolute paths; a module name stays."""
        place, _, class_name = self.uri.rpartition(":")
        path = absolute_path(place) if place.endswith(FILE_SUFFIX) else place
        return super().absolute().model_copy(update={"uri": f"{path}:{class_name}"})

    def hashed_settings(self) -> dict[str, Any]:
        """Return the keys that determine the results, with the name of the class."""
        return super().hashed_settings() | {"class": self.uri.rpartition(":")[2]}

    def own_files(self) -> list[Path]:
        """Return the source file; for a module, the file that would be imported."""
        place = self._place()
        if place.endswith(FILE_SUFFIX):
            return [find_file(self.where(), place, "uri")]
        if self.python is not None:
            raise ServableError(
                f"{self.where()}: python = {self.python!r} with a module, which can't be read here; name FILE.py:Class"
            )
        return [find_module(self.where(), place, "name its FILE.py:Class")]

    def program(self) -> ServableProgram:
        """Return the class as a program."""
        place, _, class_name = self.uri.rpartition(":")
        source = self.files()[0]
        return ServableProgram(str(source) if place.endswith(FILE_SUFFIX) else place, class_name, self.settings)

    def _place(self) -> str:
        return self.uri.rpartition(":")[0]
