"""The script that distils the shipped model, on drawings made here and a thousandth of its steps."""

import pytest
from script_runs import found_by
from test_demo_recipe import STYLES, write_style

from shards.config import load_model_config


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_student_of_half_the_size_is_distilled_and_compared_and_a_second_run_goes_on(tmp_path):
    data, work = tmp_path / "data", tmp_path / "work"
    data.mkdir()
    for style, margin in STYLES.items():
        write_style(data, style, margin)
    found = found_by("distill_demo_model.py", data, "--work", work, "--styles", data, "--share", 0.001, timeout_s=800)
    assert found["judged by"] == "noto"
    assert found["training"]["distilled"]["steps"] == found["training"]["without-teacher"]["steps"] == 4
    for name in ("teacher", "distilled", "without-teacher"):
        assert 0 <= found[name]["R@1"] <= found[name]["R@5"] <= found[name]["R@10"] <= 1
    assert found["student's passes for one of the teacher"]["images"] > 2
    config = load_model_config(work / "distilled" / "last")
    assert (config.vision.depth, config.vision.width) == (2, 96)
    assert (config.text.num_hidden_layers, config.text.hidden_size) == (2, 128)
