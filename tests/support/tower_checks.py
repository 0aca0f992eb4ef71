"""Checks that each family of towers passes: its checkpoint against the library, every cut, every part of it."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shards.activations import Batch, TowerState
from shards.length_groups import count_computed
from shards.model_config import ModelConfig, load_model_config
from shards.model_errors import ModelError
from shards.reference import load_towers
from shards.shard import load_shard
from shards.shard_specs import ShardSpec, specs_between, whole_model
from shards.weights import WEIGHTS_FILE

LEAST_MOVE = 1e-3
# Frames, patch rows and patch columns of images that keep their own proportions; the second row has no image.
GRIDS = ((1, 3, 4), (0, 0, 0), (1, 6, 6), (2, 2, 7), (1, 1, 30), (1, 4, 3), (1, 5, 7), (1, 1, 1))


def randomise(model: torch.nn.Module, seed: int = 7) -> torch.nn.Module:
    """Give every parameter values of a size that matters: fresh norms, biases and scales would hide a wrong mapping."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("logit_scale", "logit_bias")):
                parameter.fill_(1.25)
            elif parameter.ndim <= 1:
                parameter.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
            elif "embed" in name or name.endswith(("token", "probe", "latent")):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter[0].numel() ** 0.5)
    return model.eval()


def make_batch(config: ModelConfig, captions: list[list[int]], num_images: int = 4) -> Batch:
    """Make random images, and captions of token ids, for the towers that the model has."""
    vision = text = None
    generator = torch.Generator().manual_seed(0)
    if config.vision is not None and config.vision.patch_px is not None:
        grids = torch.tensor(GRIDS, dtype=torch.int32)
        grids[:, 1:] *= config.vision.merge_size
        shape = int(grids.prod(1).sum()), 3 * config.vision.patch_px**2
        patches = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        vision = TowerState(patches, grids.long().prod(1), grids)
    elif config.vision is not None:
        side = config.preprocess.image_size
        pixels = torch.randint(0, 256, (num_images, side, side, 3), dtype=torch.uint8, generator=generator)
        vision = TowerState(pixels, torch.ones(num_images, dtype=torch.int64))
    if "text" in config.towers:
        ids = torch.tensor([each for caption in captions for each in caption], dtype=torch.int32)
        text = TowerState(ids, torch.tensor([len(caption) for caption in captions]))
    return Batch(vision, text)


def vectors(batch: Batch) -> dict[str, torch.Tensor]:
    """Vectors by side of an embedded batch."""
    sides = {"vision": batch.vision, "text": batch.text}
    return {side: state.values for side, state in sides.items() if state is not None}


def embed_whole(folder: Path, batch: Batch) -> dict[str, torch.Tensor]:
    """Embed by one shard that holds everything."""
    return vectors(load_shard(folder, whole_model(load_model_config(folder)))(batch))


def with_padding(batch: Batch) -> Batch:
    """Add the longest caption without its second token: the two are computed together, and one of them is padded."""
    assert batch.text is not None
    captions = batch.text.values.split(batch.text.lengths.tolist())
    longest = max(captions, key=len)
    captions = (*captions, torch.cat([longest[:1], longest[2:]]))
    lengths = torch.tensor([len(caption) for caption in captions])
    assert count_computed(lengths.numpy()) > int(lengths.sum())
    return Batch(batch.vision, TowerState(torch.cat(captions), lengths))


@torch.inference_mode()  # as runs compute: with gradients torch 2.8 multiplies in another order
def check_every_cut(folder: Path, batch: Batch) -> None:
    """Check that each cut into two stages, and the finest, give the bits of the unsplit towers, on one thread."""
    config = load_model_config(folder)
    if batch.text is not None and len(batch.text.lengths) > 1 and not config.required_text.has_fixed_length:
        batch = with_padding(batch)
    expected = vectors(load_towers(folder)(batch))
    depths = [config.num_layers.get(side, 0) for side in ("vision", "text")]
    end = tuple(depths)
    cuts = [[(0, 0), cut, end] for cut in itertools.product(*(range(depth + 1) for depth in depths))]
    finest = [tuple(min(number, depth) for depth in depths) for number in range(max(depths) + 1)]
    for steps in [*cuts, finest]:
        found = run_stages(folder, [spec for spec in specs_between(steps) if spec.vision or spec.text], batch)
        for side, rows in expected.items():
            assert torch.equal(found[side], rows), f"{side}, cut {steps}"


def run_stages(folder: Path, specs: list[ShardSpec], batch: Batch) -> dict[str, torch.Tensor]:
    """Run a batch through stages in order."""
    for spec in specs:
        batch = load_shard(folder, spec)(batch)
    return vectors(batch)


def check_every_part_matters(folder: Path, batch: Batch, tmp_path: Path) -> None:
    """Check that without any one part (a table, a layer, a norm, a scale), each set to zero, a vector moves."""
    config = load_model_config(folder)
    before = embed_whole(folder, batch)
    weights = load_file(folder / WEIGHTS_FILE)
    changed = tmp_path / "changed"
    changed.mkdir()
    for name in ("config.json", "tokenizer.json"):
        if (folder / name).is_file():
            (changed / name).write_bytes((folder / name).read_bytes())
    for part in sorted({part_name(config, name) for name in weights if name.partition(".")[2]}):
        side = part.partition(".")[0].removesuffix("_head")
        without = {name: each * (part_name(config, name) != part) for name, each in weights.items()}
        save_file(without, changed / WEIGHTS_FILE)
        moved = float((embed_whole(changed, batch)[side] - before[side]).abs().max())
        assert moved > LEAST_MOVE, f"without {part} no vector moves by more than {moved}"


def part_name(config: ModelConfig, name: str) -> str:
    """Part that a tensor goes with: its layer and the module in it, or its module."""
    side, _, inner = name.partition(".")
    tower = config.towers.get(side)
    if tower is not None and inner.startswith(tower.layer_prefix):
        number, _, rest = inner.removeprefix(tower.layer_prefix).partition(".")
        return f"{side}.{tower.layer_prefix}{number}.{rest.partition('.')[0]}"
    return name.removesuffix(".weight").removesuffix(".bias")


def check_against(
    folder: Path, batch: Batch, expected: dict[str, Callable[[TowerState], torch.Tensor]], tolerance: float = 1e-5
) -> None:
    """Check vectors against a library's own features, both of length 1."""
    found = embed_whole(folder, batch)
    for side, features in expected.items():
        state = batch.vision if side == "vision" else batch.text
        with torch.no_grad():
            theirs = torch.nn.functional.normalize(features(state), dim=-1)
        assert float((found[side] - theirs).abs().max()) < tolerance, side


def check_refused(importing: Callable[..., Any], folder: Path, out: Path, message: str) -> None:
    """Check that an import refuses a checkpoint in one line and leaves nothing."""
    with pytest.raises(ModelError, match=message) as caught:
        importing(folder, out)
    assert "\n" not in str(caught.value)
    assert [path for path in out.parent.iterdir() if path != folder] == []
