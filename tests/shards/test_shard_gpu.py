"""Shards on a CUDA device against the unsplit towers on the CPU."""

import pytest
import torch

from shards.plan import plan_shards
from shards.reference import load_towers
from shards.shard import load_shard


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("tokens", [(5, 9, 0, 2), (4, 4, 4, 4)])
def test_shards_on_a_gpu_agree_with_the_unsplit_towers_on_the_cpu(make_config, make_model, make_batch, dtype, tokens):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    config = make_config()
    folder = make_model(config)
    batch = make_batch(config, tokens=tokens)
    with torch.no_grad():
        expected = load_towers(folder)(batch)
    for stage in plan_shards(config, 3).stages:
        batch = load_shard(folder, stage.spec, dtype=dtype, device="cuda")(batch)
    least = {"float32": 0.99999, "int8": 0.99}.get(dtype, 0.999)
    for found, other in ((batch.vision, expected.vision), (batch.text, expected.text)):
        assert found.values.is_cuda
        assert found.lengths.tolist() == other.lengths.tolist()
        assert torch.cosine_similarity(found.values.cpu(), other.values).min() >= least
