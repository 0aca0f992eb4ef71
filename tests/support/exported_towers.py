"""One tiny ViT of transformers in five forms: a model folder, its own checkpoint, .pt2, TorchScript, ONNX."""

from pathlib import Path

import library_checkpoints as checkpoints
import torch

from shards.convert import import_checkpoint

SIDE_PX = checkpoints.SIZE
PREPROCESS = {
    "image_size": SIDE_PX,
    "resize": "squash",
    "interpolation": "bilinear",
    "resampler": "torchvision",
    "reduced_decode": False,
}
"""What transformers' image processor of a ViT does; mean and deviation are the default."""


class UnitVectors(torch.nn.Module):
    """Pooled features of a tower of transformers with length 1, of normalised pixels (B, 3, H, W)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixels):
        return torch.nn.functional.normalize(self.model(pixels).pooler_output, dim=-1)


def save_everywhere(folder: Path) -> dict[str, dict]:
    """Save the tower in all forms, in an empty folder; gives the section of each kind but for its name."""
    from transformers import AutoModel

    checkpoints.vit(folder / "checkpoint")
    model = AutoModel.from_pretrained(folder / "checkpoint")
    import_checkpoint(folder / "checkpoint", folder / "model")
    export(UnitVectors(model).eval(), folder)
    graph = {
        "inputs": {"pixels": {"make": "pixels", "preprocess": PREPROCESS}},
        "outputs": {"image_embedding": {"shape": [model.config.hidden_size]}},
    }
    features = {"task": "image-feature-extraction", "preprocess": PREPROCESS}
    return {
        "towers": {"kind": "towers", "uri": str(folder / "model")},
        "hf": {"kind": "hf", "uri": str(folder / "checkpoint"), **features},
        "torch_export": {"kind": "torch_export", "uri": str(folder / "tower.pt2"), **graph},
        "compiled": {"kind": "torch_export", "uri": str(folder / "tower.pt2"), "compiled": True, **graph},
        "torchscript": {"kind": "torchscript", "uri": str(folder / "tower.pt"), **graph},
        "onnx": {"kind": "onnx", "uri": str(folder / "tower.onnx"), **graph},
    }


def export(module: torch.nn.Module, folder: Path, outputs: tuple[str, ...] = ("image_embedding",)) -> None:
    """Save a module of pixels, in evaluation mode, as tower.pt2, tower.pt and tower.onnx, for any number of rows."""
    pixels = torch.rand(2, 3, SIDE_PX, SIDE_PX)
    program = torch.export.export(module, (pixels,), dynamic_shapes=({0: torch.export.Dim("batch", max=1024)},))
    torch.export.save(program, folder / "tower.pt2")
    with torch.no_grad():
        torch.jit.trace(module, (pixels,), strict=False).save(str(folder / "tower.pt"))
    torch.onnx.export(
        program, f=str(folder / "tower.onnx"), input_names=["pixels"], output_names=list(outputs), dynamo=True
    )
