"""One tiny ViT of transformers in five forms: a model folder, its own checkpoint, .pt2, TorchScript, ONNX."""

from pathlib import Path

import bench_servables
import library_checkpoints as checkpoints
import torch

SIDE_PX = checkpoints.SIZE


def save_everywhere(folder: Path) -> dict[str, dict]:
    """Save the tower in all forms; gives the section of each kind but for its name.

    Args:
        folder: an empty one.
    """
    checkpoints.vit(folder / "checkpoint")
    return bench_servables.save_forms(folder, SIDE_PX)


def export(module: torch.nn.Module, folder: Path, outputs: tuple[str, ...] = ("image_embedding",)) -> None:
    """Save a module of pixels as .pt2, TorchScript and ONNX, for any number of rows.

    Args:
        module: in evaluation mode.
        folder: gets tower.pt2, tower.pt and tower.onnx.
        outputs: their names in ONNX.
    """
    bench_servables.export(module, folder, SIDE_PX, outputs)
