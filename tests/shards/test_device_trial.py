"""A trial of a device gives rates that its own products and copies are seen to reach."""

import time

import pytest
import torch

from shards.device_trial import TRIAL_S, measure_speed


@pytest.mark.medium
def test_the_rates_are_those_of_a_product_and_a_copy_by_hand():
    started_s = time.perf_counter()
    speed = measure_speed("cpu", "float32", widths=(512,))
    assert time.perf_counter() - started_s < 40 * TRIAL_S
    assert speed.product_width == 512
    left = torch.ones(512, 512)
    by_hand = []
    for _ in range(5):
        started_s = time.perf_counter()
        left @ left
        by_hand.append(2 * 512**3 / (time.perf_counter() - started_s))
    assert max(by_hand) / 30 < speed.product_flops < 30 * max(by_hand)
    assert speed.memory_bytes_per_s > speed.link_bytes_per_s / 30 > 0
    assert type(speed).from_json(speed.to_json()) == speed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gpu_multiplies_faster_than_it_copies(dtype):
    speed = measure_speed("cuda", dtype)
    assert speed.product_flops > 1e12
    assert speed.memory_bytes_per_s > speed.link_bytes_per_s > 1e9
