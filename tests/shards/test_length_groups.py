"""Groups of sequences of similar length: little padding, few groups, each sequence once, the same for the same data."""

import numpy as np
import pytest
import torch

from shards.activations import TowerState
from shards.length_groups import (
    CPU_GROUPS,
    MAX_GPU_TOKENS,
    GroupCosts,
    count_computed,
    gpu_groups,
    group_by_length,
)
from shards.planning.devices import DEVICES
from shards.towers.clip import ClipTextTower
from shards.towers.qwen3_vl import Qwen3VlTower

KERNELS = ClipTextTower.kernels_per_layer


def skewed(number: int, seed: int = 0) -> np.ndarray:
    """Lengths as of captions: most are short, few are long."""
    lengths = np.random.default_rng(seed).lognormal(2.7, 0.6, number)
    return np.clip(lengths.round(), 5, 64).astype(np.int64)


@pytest.mark.parametrize("number", [2, 8, 32, 256, 3000])
@pytest.mark.parametrize("seed", range(5))
def test_skewed_lengths_are_computed_with_little_padding_and_each_of_them_once(number, seed):
    lengths = skewed(number, seed)
    groups = group_by_length(lengths)
    assert np.array_equal(np.sort(np.concatenate(groups)), np.arange(number))
    assert count_computed(lengths) == sum(len(group) * lengths[group].max() for group in groups)
    if lengths.sum() > CPU_GROUPS.few_tokens:
        assert count_computed(lengths) <= CPU_GROUPS.max_computed * lengths.sum()
    assert all(np.array_equal(group, np.sort(group)) for group in groups)
    longest = [lengths[group].max() for group in groups]
    assert longest == sorted(longest)


def test_the_groups_of_a_block_are_few():
    assert number_of_groups(skewed(32)) < 12
    assert number_of_groups(skewed(256)) < 24


def test_a_batch_of_few_tokens_is_not_cut_into_many_groups():
    """Calls of kernels would cost a small model a fifth of its time there."""
    lengths = np.array([3] * 12 + [4] * 10 + [5] * 4 + [6] * 4 + [9, 13])
    assert lengths.sum() < CPU_GROUPS.few_tokens
    assert number_of_groups(lengths) <= 3


def number_of_groups(lengths: np.ndarray) -> int:
    """Number of groups."""
    return len(group_by_length(lengths))


@pytest.mark.parametrize("lengths", [[7], [12] * 32, [1, 1], [12, 12, 13, 12, 11, 13, 12, 12]])
def test_lengths_that_are_nearly_equal_are_one_group_in_the_order_of_rows(lengths):
    [group] = group_by_length(np.array(lengths))
    assert np.array_equal(group, np.arange(len(lengths)))


def test_nothing_has_no_groups():
    assert group_by_length(np.array([], np.int64)) == []
    assert count_computed(np.array([], np.int64)) == 0


def test_groups_follow_from_the_lengths_alone_and_the_order_of_rows_only_names_them():
    lengths = skewed(256)
    assert all(map(np.array_equal, group_by_length(lengths), group_by_length(lengths.copy())))
    order = np.random.default_rng(1).permutation(256)
    found = [sorted(lengths[order][group]) for group in group_by_length(lengths[order])]
    assert found == [sorted(lengths[group]) for group in group_by_length(lengths)]
    assert count_computed(lengths[order]) == count_computed(lengths)


def test_no_group_has_more_tokens_than_the_budget_but_for_one_sequence_that_does():
    lengths = np.array([64] * 1000 + [60] * 10 + [CPU_GROUPS.max_tokens + 1] * 2)
    groups = group_by_length(lengths)
    assert max(len(group) * lengths[group].max() for group in groups[:-2]) <= CPU_GROUPS.max_tokens
    assert [len(group) for group in groups[-2:]] == [1, 1]
    assert np.array_equal(np.sort(np.concatenate(groups)), np.arange(len(lengths)))


@pytest.mark.parametrize(("width", "flops", "most"), [(768, 400e12, 1), (768, 10e12, 6), (4096, 400e12, 6)])
def test_on_a_gpu_a_group_is_worth_as_many_tokens_as_are_computed_while_it_is_launched(width, flops, most):
    costs = gpu_groups(24 * width**2, KERNELS, flops)
    lengths = np.random.default_rng(1).integers(5, 78, 256)
    groups = group_by_length(lengths, costs)
    assert 1 <= len(groups) <= most
    assert sorted(np.concatenate(groups).tolist()) == list(range(256))
    fewest = len(group_by_length(lengths, gpu_groups(24 * width**2, KERNELS, 1e15)))
    assert fewest <= len(groups) < len(group_by_length(lengths))


@pytest.mark.parametrize("layer_s", [345e-6, 690e-6])
@pytest.mark.parametrize(("median", "deviation", "longest"), [(15, 0.6, 77), (55, 1.0, 512), (245, 1.0, 2048)])
def test_groups_on_a_gpu_cost_little_more_than_the_best_at_each_time_of_launching(median, deviation, longest, layer_s):
    """The least and the most that launching a layer took on an H100's host."""
    flops_per_token, device_flops = 24 * 768**2, DEVICES["H100"].flops["bfloat16"]
    token_s = flops_per_token / device_flops
    exact = GroupCosts(layer_s / token_s, MAX_GPU_TOKENS, np.inf, 0)
    for seed in range(5):
        lengths = np.random.default_rng(seed).lognormal(np.log(median), deviation, 256)
        lengths = np.clip(lengths.round(), 5, longest).astype(np.int64)
        best, found = (
            sum(len(group) * lengths[group].max() * token_s + layer_s for group in group_by_length(lengths, costs))
            for costs in (exact, gpu_groups(flops_per_token, KERNELS, device_flops))
        )
        assert best <= found <= 1.09 * best, seed


def test_a_group_on_a_gpu_holds_no_more_than_memory_allows():
    costs = gpu_groups(1e6, KERNELS, 1e15)
    groups = group_by_length(np.full(10_000, 77), costs)
    assert max(len(group) * 77 for group in groups) <= costs.max_tokens


def test_a_picture_with_a_long_caption_is_no_group_with_those_of_short_ones():
    grids = torch.tensor([[1, 8, 8]] * 8, dtype=torch.int32)
    lengths = torch.tensor([3, 2, 3, 2000, 3, 2, 3, 2])
    text = TowerState(torch.zeros(int(lengths.sum()), dtype=torch.int32), lengths)
    state = TowerState(torch.zeros(8 * 64, 3), torch.full((8,), 64), grids, text)
    groups = state.groups(Qwen3VlTower())
    assert [3] in [group.tolist() for group in groups]
    assert sorted(row for group in groups for row in group.tolist()) == [*range(8)]
