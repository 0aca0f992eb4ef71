"""Towers that are cut: their parts give what the whole gives, each in an actor of its own, and hand on no more."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from servable_runs import png, run_servables

from embedder.errors import ConfigError
from embedder.servables import make_servable
from embedder.servables.packing import pack_servables
from embedder.servables.servable_errors import ServableError
from shards.fingerprint import model_fingerprint
from shards.model_config import load_model_config
from shards.plan import plan_shards

IMAGES = [png(seed) for seed in range(4)]
CAPTIONS = ["a red car", "two cats", "fruit on a table", "rain"]
ROWS = pa.table(
    {"image": [*IMAGES, None, None, None], "caption": [CAPTIONS[0], None, CAPTIONS[2], "", *CAPTIONS[1:3], None]}
)


def towers(uri, **keys):
    return make_servable({"name": "t", "uri": str(uri)} | keys)


def check_equal(cut, whole, name):
    """Check a column of vectors, each of which is where the other has one."""
    for found, expected in zip(cut[name].to_pylist(), whole[name].to_pylist(), strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_vectors_are_those_of_the_whole_and_no_column_of_a_part_is_left(tiny_model, stages):
    whole, cut = (run_servables(ROWS, towers(tiny_model, batch_size=3, stages=each)) for each in (1, stages))
    assert sorted(cut.column_names) == sorted(whole.column_names)
    assert cut["t.error"].to_pylist() == whole["t.error"].to_pylist()
    for name in ("t.image_embedding", "t.text_embedding"):
        check_equal(cut, whole, name)


@pytest.mark.parametrize("side", ["image", "text"])
def test_one_side_alone_is_cut_into_its_own_layers(tiny_model, side):
    whole, cut = (run_servables(ROWS, towers(tiny_model, sides=[side], stages=each)) for each in (1, 2))
    check_equal(cut, whole, f"t.{side}_embedding")


def test_each_part_is_alone_in_its_actors_whatever_room_there_is(tiny_model):
    small = [towers(tiny_model, name=name) for name in ("a", "b")]
    groups = pack_servables([small[0], towers(tiny_model, stages=3), small[1]], 1 << 40)
    assert [[each.name for each in group.servables] for group in groups] == [["a"], ["t-0"], ["t-1"], ["t"], ["b"]]


def test_a_cut_is_no_other_model(tiny_model):
    assert towers(tiny_model).fingerprint() == towers(tiny_model, stages=3).fingerprint()


def test_more_stages_than_layers_are_refused(tiny_model):
    with pytest.raises(ServableError, match="servable t .*: stages = 99: .* each stage needs a layer"):
        towers(tiny_model, stages=99).parts()


def plan_file(folder, config, **stage):
    """Write a plan of three stages for a model; keys of each stage are replaced."""
    plan = plan_shards(load_model_config(config), 3, model_fingerprint=model_fingerprint(config))
    path = folder / "plan.json"
    path.write_text(replace(plan, stages=tuple(replace(each, **stage) for each in plan.stages)).to_json())
    return path


def test_a_plan_says_how_towers_are_cut_and_what_each_part_is_given(tiny_model, tmp_path):
    path = plan_file(tmp_path, tiny_model, num_replicas=2, num_gpus=0.0, num_threads=3, memory_bytes=77_000_000)
    planned = towers(tiny_model, plan=str(path))
    parts = planned.parts()
    assert [each.name for each in parts] == ["t-0", "t-1", "t"]
    assert {(each.replicas, each.num_cpus, each.num_gpus, each.size_bytes()) for each in parts} == {
        (2, 3, 0, 77_000_000)
    }
    assert planned.fingerprint() == towers(tiny_model).fingerprint()
    check_equal(run_servables(ROWS, planned), run_servables(ROWS, towers(tiny_model)), "t.image_embedding")


def test_a_plan_of_cuts_alone_keeps_what_the_section_gives(tiny_model, tmp_path):
    parts = towers(tiny_model, plan=str(plan_file(tmp_path, tiny_model)), num_cpus=2, replicas=4).parts()
    assert {(each.replicas, each.num_cpus) for each in parts} == {(4, 2)}


def test_a_plan_that_does_not_fit_is_refused_in_a_line(tiny_model, tmp_path):
    path = plan_file(tmp_path, tiny_model)
    with pytest.raises(ConfigError, match=r"plan absent\.json: No such file or directory; make one with"):
        towers(tiny_model, plan="absent.json").parts()
    with pytest.raises(ServableError, match="is for both towers; leave out sides, or plan"):
        towers(tiny_model, plan=str(path), sides=["image"]).parts()
    with pytest.raises(ValueError, match="plan and stages = 2 both say how the towers are cut"):
        towers(tiny_model, plan=str(path), stages=2)
    path.write_text(path.read_text().replace(model_fingerprint(tiny_model), "0" * 16))
    with pytest.raises(ConfigError, match="made for model 0000000000000000"):
        towers(tiny_model, plan=str(path)).parts()
