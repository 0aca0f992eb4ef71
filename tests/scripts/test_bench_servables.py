"""One tower in five forms: their vectors are equal, each is measured in each round; and what is made of the rates."""

import bench_servables
import numpy as np
import pytest
from bench_servables import EAGER, FORMS, Alone, Passed
from script_runs import found_by


@pytest.mark.slow(rotates=True)
def test_all_forms_of_a_tiny_tower_go_through_the_pipeline_with_equal_vectors(starts_ray):
    found = found_by("bench_servables.py", "--quick", timeout_s=200)
    assert [form["form"] for form in found["forms"]] == list(FORMS)
    assert found["is_equal"]
    for form in found["forms"]:
        assert form["cosine"] >= 0.9999, form
        assert form["centred_cosine"] >= 0.9999, form
        assert min(form["items_per_s"], form["cpu_ms"], form["gflop_per_s"]) > 0, form
    (eager,) = (form for form in found["forms"] if form["form"] == EAGER)
    assert (eager["ratio"], eager["alone_ratio"]) == (1, 1)


def test_a_form_with_another_vector_is_told_by_its_least_cosine():
    cut = np.eye(4, dtype=np.float32)[:3]
    other = cut.copy()
    other[1] = [0, 0.6, 0.8, 0]
    rates = {"towers": [2.0] * 3, "hf": [4.0] * 3, "onnx": [2.0, 8.0, 40.0]}
    alone = {kind: Alone(each, [1.0, 7.0, 3.0]) for kind, each in rates.items()}
    through = {kind: Passed(other if kind == "onnx" else cut, each) for kind, each in rates.items()}
    form = bench_servables.form_of("onnx", alone, through, flop=1e9)
    assert form.cosine == pytest.approx(0.6)
    assert form.centred_cosine < form.cosine
    assert (form.items_per_s, form.ratio, form.gflop_per_s) == (8.0, 2.0, 8.0)
    assert (form.alone_ratio, form.cpu_ms) == (2.0, 3.0)
    assert bench_servables.form_of("hf", alone, through, flop=1e9).cosine == pytest.approx(1)


def test_ratios_are_those_of_one_round():
    """A machine that was slow for a round was slow for all forms."""
    assert bench_servables.median_ratio([10, 5, 30], [5, 2.5, 10]) == 2


def test_starting_is_no_part_of_a_rate():
    assert bench_servables.steady_rate([32, 32, 16], [100.0, 101.0, 103.0]) == 16


def test_each_round_begins_with_another_form():
    orders = [bench_servables.in_turn(FORMS, turn) for turn in range(len(FORMS) + 1)]
    assert [order[0] for order in orders] == [*FORMS, FORMS[0]]
    assert all(sorted(order) == sorted(FORMS) for order in orders)


def test_too_few_images_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_servables.main(["--num-images", "40"])
    assert "--num-images 40: two blocks of 32 at least are needed" in capsys.readouterr().err
