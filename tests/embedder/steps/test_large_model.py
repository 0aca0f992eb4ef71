"""A model larger than what may be held: written tensor by tensor, and loaded stage by stage."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.model_summary import describe_model
from shards.plan import plan_shards
from shards.saving import stream_weights
from shards.shard import load_shard
from shards.tensor_shapes import shard_shapes

SCRIPT = Path(__file__).parents[2] / "support" / "write_large_model.py"


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """120 MB in eight files, and what the script said of it."""
    out = tmp_path_factory.mktemp("large") / "model"
    done = subprocess.run(
        [sys.executable, SCRIPT, out, "60000000", "16000000"], capture_output=True, text=True, check=True, timeout=200
    )
    return out, json.loads(done.stdout.splitlines()[-1])


def test_it_is_as_large_as_asked_in_files_no_larger_than_asked(large):
    folder, said = large
    summary = describe_model(folder)
    assert 6e7 <= said["num_parameters"] == summary.num_parameters <= 7e7
    assert summary.dtypes == ("BF16",)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) == said["num_files"] == summary.num_files >= 7
    header_bytes = 64 << 10
    assert max(sizes) < 16e6 + header_bytes


@pytest.mark.medium
def test_writing_it_never_held_it(large):
    """Compared with a model of a tenth the size: torch itself is the larger part of both."""
    folder, said = large
    small = folder.parent / "small"
    command = [sys.executable, SCRIPT, small, "6000000", "1000000000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    grown = said["peak_rss_bytes"] - json.loads(done.stdout.splitlines()[-1])["peak_rss_bytes"]
    assert grown < said["size_bytes"] / 2


def test_its_stages_load_without_the_files_of_the_others(large, tmp_path):
    folder, _ = large
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    config = load_model_config(folder)
    for number, stage in enumerate(plan_shards(config, 3, dtype="bfloat16").stages):
        needed = {weight_map[name] for name in shard_shapes(config, stage.spec)}
        assert len(needed) < len(set(weight_map.values()))
        alone = tmp_path / str(number)
        alone.mkdir()
        for name in ("config.json", "model.safetensors.index.json", *needed):
            (alone / name).symlink_to(folder / name)
        assert load_shard(alone, stage.spec, dtype="bfloat16").weight_bytes == stage.weight_bytes


def test_streamed_files_are_what_the_safetensors_library_reads(tmp_path):
    shapes = {"a": (3, 5), "b": (), "c": (7,), "d": (2, 2)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    stream_weights(tmp_path, shapes, tensors.items(), dtype="bfloat16", max_file_bytes=40)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * 27
    assert [len({index["weight_map"][name] for name in names}) for names in ("ab", "cd", "abcd")] == [1, 1, 2]
    found = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name].to(torch.bfloat16)) for name in tensors)


@pytest.mark.parametrize("given", [{"a": (2,)}, {"a": (3,), "b": (1,)}, {"b": (1,), "a": (2,)}, {}])
def test_tensors_that_were_not_announced_are_refused(tmp_path, given):
    tensors = [(name, torch.zeros(shape)) for name, shape in given.items()]
    with pytest.raises(ModelError, match="comes next"):
        stream_weights(tmp_path, {"a": (2,), "b": (1,)}, tensors, dtype="float32")
