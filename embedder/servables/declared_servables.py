"""Servables of a single file, whose inputs and outputs the configuration declares.

Their files are checked for existence and type without loading the framework.
"""

import zipfile
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from embedder.servables.servable import Servable, absolute_path
from embedder.servables.servable_columns import COLUMN_NAME_RULE, DeclaredInput, InputColumn, OutputColumn, TokensInput
from embedder.servables.servable_errors import ServableError, one_line
from shards.model_config import TOKENIZER_FILE

ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80"
SAFETENSORS_MAGIC = b"{"  # after the eight bytes of the header's length


class DeclaredServable(Servable):
    """Servable of a single file, with declared inputs and outputs."""

    inputs: dict[COLUMN_NAME_RULE, DeclaredInput] = Field(
        min_length=1, description="inputs by name; of .pt2 and TorchScript in the order that the graph takes them"
    )
    outputs: dict[COLUMN_NAME_RULE, OutputColumn] = Field(
        min_length=1, description="outputs by name; of .pt2 and TorchScript that return tuples, in their order"
    )
    extra_files: tuple[str, ...] = Field((), description="further files that decide its results")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, output in self.outputs.items():
            unknown = set(output.of or ()) - set(self.inputs)
            if unknown:
                raise ValueError(f"output {name} is `of` {min(unknown)!r}, which is no input; name one of its inputs")
        for name, column in self.inputs.items():
            if isinstance(column, TokensInput) and column.mask in self.inputs:
                raise ValueError(f"input {name}: mask = {column.mask!r} is an input already; write another name")
        return self

    def input_columns(self) -> Mapping[str, InputColumn]:
        """Return the declared inputs."""
        return self.inputs

    def output_columns(self) -> Mapping[str, OutputColumn]:
        """Return the declared outputs."""
        return self.outputs

    def absolute(self) -> Self:
        """Return it with absolute paths, including those of tokenisers and further files."""
        inputs = {
            name: each.model_copy(update={"tokenizer": absolute_path(each.tokenizer)})
            if isinstance(each, TokensInput)
            else each
            for name, each in self.inputs.items()
        }
        extra_files = tuple(map(absolute_path, self.extra_files))
        return super().absolute().model_copy(update={"inputs": inputs, "extra_files": extra_files})

    def hashed_settings(self) -> dict[str, Any]:
        """Return the keys that determine the results; tokenisers count by content, sources as another's outputs."""
        settings = super().hashed_settings()
        settings.pop("extra_files", None)
        for column in settings["inputs"].values():
            column.pop("tokenizer", None)
        return settings

    def files(self) -> list[Path]:
        """Return the file, its companion files, and the tokenisers of its inputs."""
        tokenizers = [each.tokenizer for each in self.inputs.values() if isinstance(each, TokensInput)]
        return [
            *self.own_files(),
            *(find_file(self.where(), each, "extra_files") for each in self.extra_files),
            *(find_tokenizer(self.where(), each) for each in tokenizers),
        ]

    def own_files(self) -> list[Path]:
        """Return the file of `uri`, checked."""
        return [find_file(self.where(), self.uri, "uri")]

    def column_settings(self) -> dict[str, Any]:
        """Return inputs and outputs in the form that a program in `embedder/plugins/runners/programs` takes."""
        return {
            "inputs": {name: each.model_dump(mode="json") for name, each in self.inputs.items()},
            "outputs": {name: each.model_dump(mode="json") for name, each in self.outputs.items()},
        }


def find_file(where: str, path: str, key: str) -> Path:
    """Find a local file; raises `ServableError` if it is missing, a folder, or unreadable."""
    found = Path(path).expanduser()
    if found.is_file():
        return found.absolute()
    what = "this is a folder" if found.is_dir() else "there is no such file"
    raise ServableError(f"{where}: {key} = {path!r}: {what}; give the path of a local file, on each node the same")


def find_module(where: str, name: str, instead: str) -> Path:
    """Find the source of an importable module; raises `ServableError` if there is none.

    It isn't imported itself, but the package that it is in is.
    """
    try:
        spec = find_spec(name)
    except (ImportError, ValueError) as error:
        raise ServableError(f"{where}: there is no module {name!r} ({error}); install it") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of the package's own code
        raise ServableError(
            f"{where}: the package of the module {name!r} can't be imported ({one_line(error)}); mend it, or {instead}"
        ) from None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise ServableError(f"{where}: there is no module {name!r}; install it, or {instead}")
    return Path(spec.origin)


def find_tokenizer(where: str, path: str) -> Path:
    """Find a tokenizer.json, given its path or its folder; raises `ServableError` if there is none."""
    found = Path(path).expanduser()
    return find_file(where, str(found / TOKENIZER_FILE) if found.is_dir() else path, "tokenizer")


def kind_of_file(path: Path) -> str:
    """Detect the type of a file of weights by its first bytes and the names inside; executes nothing of it.

    Returns "torch_export", "torchscript", "pickle", "safetensors", "zip", or "unknown".
    """
    with path.open("rb") as file:
        head = file.read(9)
    if head.startswith(ZIP_MAGIC) and zipfile.is_zipfile(path):
        return _kind_of_archive(path)
    if head.startswith(PICKLE_MAGIC):
        return "pickle"
    return "safetensors" if head[8:] == SAFETENSORS_MAGIC else "unknown"


def _kind_of_archive(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        names = {name.partition("/")[2] or name for name in archive.namelist()}
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return "torch_export"
    if "constants.pkl" in names and any(name.startswith("code/") for name in names):
        return "torchscript"
    return "pickle" if "data.pkl" in names else "zip"


SAID = {
    "torch_export": 'a .pt2 of torch.export, which kind = "torch_export" runs',
    "torchscript": 'a TorchScript archive, which kind = "torchscript" runs',
    "pickle": "a pickle, which can run any code",
    "safetensors": "only weights (safetensors), which say nothing of what to compute",
    "zip": "a zip archive of an unknown kind",
    "unknown": "a file of an unknown kind",
}


def check_kind(where: str, path: Path, allowed: Collection[str]) -> str:
    """Return the type of a file; raises `ServableError` if it isn't allowed."""
    kind = kind_of_file(path)
    if kind in allowed:
        return kind
    cure = "save it in the form of this kind, or name the kind that it has"
    if kind == "pickle":
        cure = "export it as ONNX or .pt2; of the kind torchscript, allow_pickle = true loads what you trust"
    raise ServableError(f"{where}: {path.name} is {SAID[kind]}; {cure}")
