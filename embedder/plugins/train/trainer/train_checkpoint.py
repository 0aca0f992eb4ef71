"""Checkpoints of a run, written whole or not at all."""

from pathlib import Path
from typing import Any

import torch

from embedder.storage.atomic_write import atomic_write
from shards.model_errors import ModelError


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write a state of tensors and plain values; after a crash the file is either the old one or the new one.

    Raises OSError if the disk is full.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(Path(path)) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch's writer hides it behind positions in the file
                raise error.__context__ from None
            raise


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a file of `save_checkpoint`, without running code from it; ModelError if the file is missing or broken."""
    if not Path(path).is_file():
        raise ModelError(f"{path}: there is no such file; name a checkpoint of a training run")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - torch raises system, pickle, zip and runtime errors for broken files
        raise ModelError(f"{path}: this is no whole checkpoint ({error!s:.200}); start from an older one") from None
    if not isinstance(state, dict):
        raise ModelError(f"{path}: found {type(state).__name__}, expected a checkpoint's values; name another file")
    return state
