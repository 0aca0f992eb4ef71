"""One tiny ViT of transformers in five forms: a model folder, its own checkpoint, .pt2, TorchScript, ONNX."""

from pathlib import Path

import library_checkpoints as checkpoints
import torch
from command_runs import run_here

from shards.config import PreprocessConfig

SIDE_PX, WIDTH = checkpoints.SIZE, checkpoints.WIDE_VISION["hidden_size"]
PREPROCESS = {"image_size": SIDE_PX, "resize": "squash", "interpolation": "bilinear", "resampler": "torchvision"}
PREPROCESS |= {"reduced_decode": False}
"""As the checkpoint's own image processor has it; mean and deviation are the default."""


class UnitVectors(torch.nn.Module):
    """The tower's pooled features with length 1, of normalised pixels (B, 3, H, W)."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(self.model(pixels).pooler_output, dim=-1)


def save_everywhere(folder: Path) -> dict[str, dict]:
    """Save the tower in all forms; gives the section of each kind but for its name.

    Args:
        folder: an empty one.
    """
    from transformers import AutoModel

    checkpoints.vit(folder / "checkpoint")
    ended = run_here("model", "import", folder / "checkpoint", "--out", folder / "model")
    assert ended.code == 0, ended.stderr
    module = UnitVectors(AutoModel.from_pretrained(folder / "checkpoint", attn_implementation="eager")).eval()
    export(module, folder)
    PreprocessConfig.model_validate(PREPROCESS)
    graph = {
        "inputs": {"pixels": {"make": "pixels", "preprocess": PREPROCESS}},
        "outputs": {"image_embedding": {"shape": [WIDTH]}},
    }
    return {
        "towers": {"kind": "towers", "uri": str(folder / "model")},
        "hf": {
            "kind": "hf",
            "task": "image-feature-extraction",
            "uri": str(folder / "checkpoint"),
            "preprocess": PREPROCESS,
        },
        "torch_export": {"kind": "torch_export", "uri": str(folder / "tower.pt2"), **graph},
        "torchscript": {"kind": "torchscript", "uri": str(folder / "tower.pt"), **graph},
        "onnx": {"kind": "onnx", "uri": str(folder / "tower.onnx"), **graph},
    }


def export(module: torch.nn.Module, folder: Path, outputs: tuple[str, ...] = ("image_embedding",)) -> None:
    """Save a module of pixels as .pt2, TorchScript and ONNX, for any number of rows.

    Args:
        module: in evaluation mode.
        folder: gets tower.pt2, tower.pt and tower.onnx.
        outputs: their names in ONNX.
    """
    pixels = torch.rand(2, 3, SIDE_PX, SIDE_PX)
    batch = {0: torch.export.Dim("batch", max=1024)}
    program = torch.export.export(module, (pixels,), dynamic_shapes=(batch,))
    torch.export.save(program, folder / "tower.pt2")
    with torch.no_grad():
        torch.jit.trace(module, (pixels,), strict=False).save(str(folder / "tower.pt"))
    torch.onnx.export(
        program, f=str(folder / "tower.onnx"), input_names=["pixels"], output_names=list(outputs), dynamo=True
    )
