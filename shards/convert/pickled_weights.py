"""Weights of a checkpoint as safetensors: its own, or converted from its pickles.

Pickles are read by torch's weights-only loader, which makes tensors and plain values and calls nothing else.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shards.model_errors import ModelError
from shards.weights import INDEX_SUFFIX, WEIGHTS_FILE, check_present, describe_foreign, read_entries, read_index

if TYPE_CHECKING:
    import torch

PICKLE_FILE = "pytorch_model.bin"

# Zip archives, which torch has written since 1.6; only those can be mapped.
_ZIP_MAGIC = b"PK\x03\x04"


@contextmanager
def checkpoint_weights(folder: Path, out: Path, prefix: str = "") -> Iterator[dict[str, Path]]:
    """Yield the safetensors file of each tensor of a checkpoint, after checking that all files are complete.

    Without safetensors, pickles are converted in a temporary folder next to `out`, which is removed when the block
    ends; errors of the block name the pickle instead. `prefix` begins the names of weight files, such as `open_clip_`.
    Raises a ModelError if there are no weights, they are broken, or a pickle holds anything but tensors.
    """
    safetensors = f"{prefix}{WEIGHTS_FILE}"
    if any((folder / name).is_file() for name in (safetensors, f"{safetensors}{INDEX_SUFFIX}")):
        yield {name: entry.path for name, entry in read_entries(folder, safetensors).items()}
        return
    pickles, indexed = _find_pickles(folder, prefix)
    parent = next(each for each in out.absolute().parents if each.is_dir())
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{out.name}.", suffix=".weights.tmp") as stage:
        try:
            files: dict[str, Path] = {}
            for pickle in pickles:
                files |= _convert(pickle, Path(stage) / pickle.name)
            for name, pickle in indexed.items():
                if name not in files:
                    raise ModelError(f"{pickle}: lacks the tensor {name} that the index puts there; fetch both again")
            yield files
        except ModelError as error:
            converted = re.compile(rf"{re.escape(stage)}/([\w.-]+)(/\d+\.safetensors)?")
            raise ModelError(converted.sub(lambda found: str(folder / found[1]), str(error))) from None


def _find_pickles(folder: Path, prefix: str) -> tuple[list[Path], dict[str, Path]]:
    """Return the pickled files, and the file of each tensor by name if there is an index."""
    path = folder / f"{prefix}{PICKLE_FILE}"
    if path.is_file():
        return [path], {}
    index = folder / f"{path.name}{INDEX_SUFFIX}"
    if not index.is_file():
        raise ModelError(
            f"{folder}: found no weights; expected {prefix}{WEIGHTS_FILE} or {path.name}, or the index "
            f"({prefix}{WEIGHTS_FILE}{INDEX_SUFFIX}, {index.name}) of several such files"
            f"{'; ' if (foreign := describe_foreign(folder)) else ''}{foreign or ''}"
        )
    files = {name: folder / file_name for name, file_name in read_index(index, "bin").items()}
    check_present(files, index)
    return sorted(set(files.values())), files


def _convert(pickle: Path, folder: Path) -> dict[str, Path]:
    """Write each tensor of a pickle to its own file, one at a time; tensors may share memory."""
    from safetensors.torch import save_file

    folder.mkdir()
    files: dict[str, Path] = {}
    for number, (name, tensor) in enumerate(_load(pickle).items()):
        files[name] = folder / f"{number}.safetensors"
        save_file({name: tensor.detach().contiguous()}, files[name])
    return files


def load_values(pickle: Path) -> object:
    """Load tensors and plain values of a pickle, mapped if possible; raises a ModelError for any other content."""
    import torch

    with pickle.open("rb") as file:
        can_be_mapped = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.load(pickle, map_location="cpu", weights_only=True, mmap=can_be_mapped)
    except Exception as error:  # noqa: BLE001 - torch raises system, pickle, zip and runtime errors for broken files
        # The rest of torch's message advises running the code in the file.
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it names the code {code[1]}" if code else f"{type(error).__name__}: this is no whole file of torch's"
        raise ModelError(
            f"{pickle}: torch's weights-only loader refuses it ({reason}); pickles may hold tensors and nothing else, "
            "fetch the file again, or save the model as safetensors"
        ) from None


def _load(pickle: Path) -> dict[str, torch.Tensor]:
    state = load_values(pickle)
    if not isinstance(state, dict):
        raise ModelError(f"{pickle}: found one {type(state).__name__}, expected tensors by name; save a state_dict")
    for name, tensor in state.items():
        found = _unlike_tensor(tensor) if isinstance(name, str) else f"a name of type {type(name).__name__}"
        if found:
            raise ModelError(
                f"{pickle}: {name!r:.100}: found {found}, expected a dense tensor; save a plain state_dict"
            )
    return state


def _unlike_tensor(value: object) -> str | None:
    """Describe a value of a pickle unless it is a dense tensor whose values are all in the file; then None."""
    import torch

    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        return "a tensor without values" if value.is_meta else f"a {value.layout} tensor of {value.dtype}"
    # One stored value can claim any shape, and would be written out that often.
    if value.nbytes > value.untyped_storage().nbytes():
        return f"a tensor of {value.nbytes} bytes, of which {value.untyped_storage().nbytes()} are stored"
    return None
