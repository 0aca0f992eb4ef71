"""What layers launch on a GPU, told without one: nothing that waits for it, and few operations for many rows."""

import pytest
import torch
from gpu_simulation import H100, MODELS, SimulatedGpu, caption_lengths, fused_attention, shard_of_shapes
from library_versions import is_older
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from tower_checks import make_batch
from tower_families import FAMILIES, beside_default, captions_for

from embedder.placement.device_settings import GPU_SETTINGS, group_costs
from shards.activations import Batch, TowerState
from shards.ranges import LayerRange
from shards.shard import Shard
from shards.shard_specs import ShardSpec, whole_model
from shards.towers.naflex import NaFlexTower
from shards.towers.vit import VitTower

GPU = torch.device("cuda")
# Their positions are made within the layers, on the host, by the size of each image, and copied while they wait.
WAITING = {"naflex", "embedding_gemma2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}


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
        return shard.compute(arranged.move_to(lambda values: torch.empty(values.shape, dtype=values.dtype, device=GPU)))


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


@pytest.mark.skipif(is_older("torch", "2.14"), reason="which of the older ones can is not known")
def test_fakes_are_moved_so_that_the_tests_below_are_not_skipped():
    assert CAN_MOVE_FAKES


@needs_fakes
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_fields["family"].default)
def test_no_layer_waits_for_the_device(family):
    config = beside_default(family)
    batch = make_batch(config, captions_for(config))
    if family.model_fields["family"].default in WAITING:
        with pytest.raises(AssertionError, match="FakeTensors"):
            compute_fake(config, whole_model(config), batch)
        batch = Batch(None, batch.text)
    found = compute_fake(config, whole_model(config), batch)
    for state in (found.vision, found.text):
        assert state is None or (state.values.shape, state.values.device.type) == ((4, 24), "cuda")


@needs_fakes
def test_of_naflex_the_front_alone_waits():
    config = beside_default(NaFlexTower)
    pixels = make_batch(config, captions_for(config)).vision
    lengths = pixels.grids.long().prod(1) + pixels.grids[:, 0] * config.vision.num_prefix_tokens
    state = TowerState(torch.zeros(int(lengths.sum()), *config.vision.activation_shape()), lengths, pixels.grids)
    for layers, shape in (
        (LayerRange(1, 2), (int(lengths.sum()), 32)),
        (LayerRange(1, 3), (int((lengths > 0).sum()), 24)),
    ):
        found = compute_fake(config, ShardSpec(layers, LayerRange(0, 0)), Batch(state, None))
        assert (found.vision.values.shape, found.vision.values.device.type) == (shape, "cuda")


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
