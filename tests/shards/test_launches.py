"""What layers launch on a GPU, found without one: nothing that waits for it, and few operations for many rows."""

import math
from dataclasses import replace

import pytest
import torch
from gpu_simulation import H100, MODELS, Launching, SimulatedGpu, caption_lengths, fused_attention, shard_of_shapes
from library_versions import is_older
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tower_checks import make_batch
from tower_families import FAMILIES, beside_default, captions_for

from embedder.placement.device_settings import GPU_SETTINGS, group_costs
from shards.activations import Batch, TowerState
from shards.length_groups import GroupCosts
from shards.ranges import LayerRange
from shards.shard import Shard
from shards.shard_specs import ShardSpec, specs_between, whole_model
from shards.towers.picture_decoder import PictureDecoderTower
from shards.towers.vit import VitTower
from shards.towers.whole_timm import WholeTimmTower

GPU = torch.device("cuda")
ONE_GROUP = GroupCosts(price_tokens=math.inf, max_tokens=1 << 20, max_computed=math.inf, few_tokens=0)
# Families whose images keep their proportions; on fake tensors they take seconds.
WITH_GRIDS = [family for family in FAMILIES if "max_patches" in family.model_fields]


class WithoutCopies(TorchDispatchMode):
    """Mode that refuses copies between host and device: one waits for the other, as fake tensors don't say."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Refuse an operation with tensors on both; a number on the host is no copy next to a tensor on the device."""
        found = func(*args, **(kwargs or {}))
        given, made = (
            [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
            for values in ((args, kwargs), found)
        )
        is_beside = any(each.is_cuda for each in given)
        devices = {each.is_cuda for each in (*given, *made) if each.ndim or not is_beside}
        assert len(devices) < 2, f"{func} copies between host and device"
        return found


def make_fake(module):
    """Put weights and buffers of a module on a GPU that is not there; within the mode of fake tensors."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU)
                    tensors[name] = torch.nn.Parameter(fake, False) if tensors is part._parameters else fake


def compute_fake(config, spec, batch):
    """Run a shard on a GPU that is not there: what needs a value of it raises."""
    with torch.device("meta"):
        shard = Shard(config, spec, torch.float32)
    arranged = shard.arrange(batch)
    with FakeTensorMode():
        make_fake(shard)
        shard.finish(GPU)
        moved = arranged.move_to(lambda values: torch.empty(values.shape, dtype=values.dtype, device=GPU))
        with WithoutCopies():
            return shard.compute(moved)


def moves_fakes():
    """Whether torch moves a module of fake tensors to a GPU that is not there; 2.8 asks the driver for it."""
    with FakeTensorMode():
        module = torch.nn.Linear(1, 1)
        make_fake(module)
        try:
            module.to(GPU)
        except RuntimeError:
            return False
    return True


# In torch 2.15 the first move of a process fails, as a map of torch's own still refers to the tensor.
CAN_MOVE_FAKES = moves_fakes() or moves_fakes()
needs_fakes = pytest.mark.skipif(not CAN_MOVE_FAKES, reason="this torch asks the driver where a fake tensor moves")


@needs_fakes
def test_a_copy_within_layers_is_refused():
    with FakeTensorMode():
        values, places = torch.ones(2, device=GPU), torch.ones(2, dtype=torch.int64)
        for copy in (lambda: places.to(GPU), lambda: torch.tensor([1], device=GPU), values.cpu, lambda: values[places]):
            with WithoutCopies(), pytest.raises(AssertionError, match="copies between host and device"):
                copy()
        with WithoutCopies():
            assert (values * torch.tensor(2.0)).device.type == "cuda"


@pytest.mark.skipif(is_older("torch", "2.14"), reason="which of the older ones can is not known")
def test_fakes_are_moved_so_that_the_tests_below_are_not_skipped():
    assert CAN_MOVE_FAKES


def name_of(family):
    """Name of a family."""
    return family.model_fields["family"].default


@needs_fakes
@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=pytest.mark.medium if each in WITH_GRIDS else ()) for each in FAMILIES],
    ids=name_of,
)
def test_no_layer_waits_for_the_device(family):
    config = beside_default(family)
    batch = make_batch(config, captions_for(config))
    found = compute_fake(config, whole_model(config), batch)
    for given, state in ((batch.vision, found.vision), (batch.text, found.text)):
        shape = None if given is None else (int((given.lengths > 0).sum()), 24)
        assert state is None or (state.values.shape, state.values.device.type) == (shape, "cuda")


@needs_fakes
@pytest.mark.medium
@pytest.mark.parametrize("family", WITH_GRIDS, ids=name_of)
def test_no_stage_of_one_layer_waits_with_pictures_and_clips_that_keep_their_proportions(family):
    config = beside_default(family)
    state = make_batch(config, []).vision.take(torch.tensor([0, 3]))  # the second has two frames
    if isinstance(config.vision, PictureDecoderTower):
        clip = [5, *(-1 - place for place in range(2 // config.vision.temporal_patch_size)), 7]
        ids = torch.tensor([11, 12, *clip], dtype=torch.int32)
        state = replace(state, text=TowerState(ids, torch.tensor([2, len(clip)])))
    batch = Batch(state, None)
    for spec in specs_between([(layer, 0) for layer in range(config.vision.num_layers + 1)]):
        batch = compute_fake(config, spec, batch)
    assert (batch.vision.values.shape, batch.vision.values.device.type) == ((2, 24), "cuda")


@needs_fakes
def test_a_shard_in_the_middle_waits_neither():
    config = beside_default(VitTower)
    lengths = {"vision": torch.ones(4, dtype=torch.int64), "text": torch.tensor([3, 0, 9, 4])}
    states = [
        TowerState(torch.zeros((int(own.sum()), *config.towers[side].activation_shape())), own)
        for side, own in lengths.items()
    ]
    found = compute_fake(config, ShardSpec(LayerRange(1, 2), LayerRange(1, 2)), Batch(*states))
    assert found.text.values.shape == (16, 32)


class CountingGpu(SimulatedGpu):
    """Simulated GPU that counts kernels, and takes no time."""

    def __init__(self):
        super().__init__(H100, 1e-9)
        self.num_kernels = 0

    def launch(self, kernel_s):
        self.num_kernels += kernel_s > 0

    def spend(self, seconds):
        """Take none."""


def count_kernels(config, side, num_layers):
    """Kernels of the first layers of a tower, of inputs of several lengths in one rectangle."""
    spec = ShardSpec(*(LayerRange(0, num_layers if each == side else 0) for each in ("vision", "text")))
    batch = make_batch(config, captions_for(config))
    batch = replace(batch, **{each: None for each in ("vision", "text") if each != side})
    shard, gpu = shard_of_shapes(config, spec), CountingGpu()
    arranged = shard.arrange(batch, dict.fromkeys(("vision", "text"), ONE_GROUP)).move_to(lambda each: each.to("meta"))
    with fused_attention(gpu), Launching(gpu):
        shard.compute(arranged)
    return gpu.num_kernels


@pytest.mark.parametrize("family", [each for each in FAMILIES if each is not WholeTimmTower], ids=name_of)
def test_a_layer_launches_about_as_many_kernels_as_its_tower_says(family):
    config = beside_default(family)
    side = "vision" if isinstance(config.vision, family) else "text"
    last = config.towers[side].num_layers - 1
    counted = (count_kernels(config, side, last) - count_kernels(config, side, 1)) / (last - 1)
    assert family.kernels_per_layer == pytest.approx(counted, rel=0.1, abs=5)


class Counting(TorchDispatchMode):
    """Mode that counts operations."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count one."""
        self.num += 1
        return func(*args, **(kwargs or {}))


def operations_per_thousand_rows(num_rows, costs):
    """Operations of a whole ViT-L/14 with its text tower, for a thousand pairs in batches of so many."""
    config = MODELS["vit-l-14"]()
    shard = shard_of_shapes(config, whole_model(config))
    lengths = torch.ones(num_rows, dtype=torch.int64), caption_lengths(config, num_rows)
    pixels = torch.zeros(1, dtype=torch.uint8).expand(num_rows, 224, 224, 3)
    ids = torch.zeros(int(lengths[1].sum()), dtype=torch.int32)
    batch = Batch(TowerState(pixels, lengths[0]), TowerState(ids, lengths[1]))
    arranged = shard.arrange(batch, costs).move_to(lambda values: values.to("meta"))
    with fused_attention(SimulatedGpu(H100, 1e-6)), Counting() as counting:
        shard.compute(arranged)
    return 1000 * counting.num / num_rows


@pytest.mark.medium
def test_pairs_in_batches_of_a_gpu_take_a_thirteenth_of_the_operations():
    config = MODELS["vit-l-14"]()
    costs = dict(group_costs(config, ["H100"]))
    assert operations_per_thousand_rows(GPU_SETTINGS.batch_sizes[0], costs) <= 3000
    assert operations_per_thousand_rows(32, {}) > 35_000
