"""Figures of [[metric]]: however rows are cut, and in whatever order they come, to the last bit those of the whole."""

import json
import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedder.config_toml.own_code_sections import MetricConfig
from embedder.errors import ConfigError
from embedder.store.row_metrics import Drift, check_columns, compute_figures, drift_between

OWN = """
class Longest:
    def __init__(self, above=0):
        self.above = above
    def add(self, rows):
        return {"longest": max([len(each) for each in rows["word"].drop_null().to_pylist()] or [self.above])}
    def merge(self, first, second):
        return max(first, second, key=lambda each: each["longest"])
    def figures(self, state):
        return dict(state)
class Broken(Longest):
    def add(self, rows):
        return {"longest": 1 / 0}
"""


@pytest.fixture(scope="module")
def own_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "longest.py"
    path.write_text(OWN)
    return path


def hostile_rows(num_rows, seed=0):
    """Rows with nulls, NaN, infinity, sizes from 1e-300 to 1e300, and labels that are none."""
    rng = np.random.default_rng(seed)
    sizes = rng.normal(size=num_rows) * 10.0 ** rng.integers(-300, 300, num_rows)
    sizes[rng.random(num_rows) < 0.05] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 5e-324])
    vectors = rng.normal(size=(num_rows, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    missing = rng.random(num_rows) < 0.1

    def some(values, kind=None):
        return pa.array([None if gone else value for value, gone in zip(values, missing, strict=True)], kind)

    return pa.table(
        {
            "item_id": [f"item-{seed}-{number}" for number in range(num_rows)],
            "segment": pa.array(np.where(rng.random(num_rows) < 0.2, 1, 0), pa.int32()),
            "size": some(sizes.tolist(), pa.float64()),
            "number": pa.array(rng.integers(-(2**62), 2**62, num_rows)),
            "score": some(np.round(rng.random(num_rows) * 1.1, 3).tolist(), pa.float64()),
            "truth": some(rng.integers(0, 3, num_rows).tolist(), pa.int64()),
            "word": some(rng.choice(["cat", "dog", "", "a, b", "chat\u00a0noir"], num_rows).tolist(), pa.string()),
            "guess": rng.choice(["cat", "dog", "horse"], num_rows).tolist(),
            "image_embedding": pa.array(vectors.tolist(), pa.list_(pa.float32())),
            "text_embedding": some(vectors[::-1].tolist(), pa.list_(pa.float32())),
        }
    )


def all_metrics(own_file):
    of_numbers = [
        {"name": f"{kind}_{column}", "kind": kind, "column": column}
        for kind in ("count", "sum", "moments", "quantiles")
        for column in ("size", "number", "score")
    ]
    return [
        MetricConfig(**values)
        for values in (
            *of_numbers,
            {"name": "rows", "kind": "count"},
            {"name": "words", "kind": "count", "column": "word"},
            {"name": "loss", "kind": "log_loss", "column": "score", "label": "truth"},
            {"name": "area", "kind": "auroc", "column": "score", "label": "truth"},
            {"name": "classes", "kind": "confusion", "column": "guess", "label": "word"},
            {"name": "moved", "kind": "drift", "column": "text_embedding"},
            {"name": "own", "kind": "own", "callable": f"{own_file}:Longest", "inputs": ("word",)},
        )
    ]


def text_of(configs, *chunks):
    """Figures by name, and the states that are kept, as text."""
    figures, states = compute_figures(configs, chunks[0].schema, chunks)
    return json.dumps([figures, states], sort_keys=True, allow_nan=False)


def config_of(**values):
    return MetricConfig(name="it", **values)


def figures_of(*chunks, **values):
    return compute_figures([config_of(**values)], chunks[0].schema, chunks)[0]["it"]


def drift_of(rows, column="image_embedding"):
    drift = Drift(config_of(kind="drift", column=column))
    drift.add(rows)
    return drift.state


@pytest.mark.medium
@settings(max_examples=12, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), seed=st.integers(0, 2**16), chance=st.randoms())
def test_any_partition_in_any_order_has_the_figures_of_the_whole(own_file, sizes, seed, chance):
    rows = hostile_rows(max(1, sum(sizes)), seed)
    cuts = [min(sum(sizes[:place]), rows.num_rows) for place in range(len(sizes))] + [rows.num_rows]
    turned = rows.take(pa.array(np.random.default_rng(seed).permutation(rows.num_rows)))
    parts = [turned.slice(begin, end - begin) for begin, end in pairwise(cuts)] or [turned]
    chance.shuffle(parts)
    configs = all_metrics(own_file)
    assert text_of(configs, rows.schema.empty_table(), *parts) == text_of(configs, rows)


def test_a_sum_that_floating_point_loses_is_exact():
    rows = pa.table({"x": [1e300, 1.0, -1e300, 2.0**-1074, None, math.nan]})
    found = figures_of(rows, kind="moments", column="x")
    assert found["sum"] == 1.0 and found["num"] == 4 and found["num_null"] == found["num_not_finite"] == 1
    assert found["std"] == pytest.approx(1e300 / math.sqrt(2)) and found["variance"] is None


def test_moments_are_those_of_the_definition():
    values = np.random.default_rng(3).gamma(2.0, size=1000)
    found = figures_of(pa.table({"x": values}), kind="moments", column="x")
    centred = values - values.mean()
    assert found["mean"] == pytest.approx(values.mean(), rel=1e-14)
    assert found["variance"] == pytest.approx(values.var(), rel=1e-12)
    assert found["skewness"] == pytest.approx((centred**3).mean() / values.std() ** 3, rel=1e-10)
    assert found["kurtosis"] == pytest.approx((centred**4).mean() / values.var() ** 2 - 3, rel=1e-10)


def test_moments_of_equal_values_have_no_spread():
    found = figures_of(pa.table({"x": [0.1] * 7}), kind="moments", column="x")
    assert found["mean"] == 0.1 and found["variance"] == found["std"] == 0.0 and "skewness" not in found


def test_quantiles_are_within_four_thousandths_of_the_value():
    values = np.sort(np.random.default_rng(4).normal(size=5000) * 1e6)
    found = figures_of(pa.table({"x": values}), kind="quantiles", column="x", quantiles=(0.001, 0.3, 0.5, 0.999))
    for name, quantile in (("p0.1", 0.001), ("p30", 0.3), ("p50", 0.5), ("p99.9", 0.999)):
        expected = values[math.ceil(quantile * 5000) - 1]
        assert found[name] == pytest.approx(expected, rel=0.004), name
    assert (found["min"], found["max"]) == (values[0], values[-1])


def test_log_loss_and_auroc_are_those_of_the_definition():
    rng = np.random.default_rng(5)
    scores, truth = rng.random(400), rng.integers(0, 2, 400)
    rows = pa.table({"p": scores, "y": truth})
    loss = -np.log(np.where(truth == 1, scores, 1 - scores)).mean()
    assert figures_of(rows, kind="log_loss", column="p", label="y")["log_loss"] == pytest.approx(loss, rel=1e-12)
    ones, zeros = scores[truth == 1][:, None], scores[truth == 0][None]
    area = ((ones > zeros) + 0.5 * (ones == zeros)).mean()
    found = figures_of(rows, kind="auroc", column="p", label="y")
    assert abs(found["auroc"] - area) <= found["auroc_within"] < 0.005


@pytest.mark.medium
def test_rows_beyond_memory_have_the_figures_of_rows_within(monkeypatch):
    rows = pa.table({"x": np.random.default_rng(6).normal(size=4_000_000)})  # 32 MB
    within = figures_of(rows, kind="moments", column="x")
    monkeypatch.setattr("embedder.store.metric_queries.MEMORY", "24MB")
    chunks = [rows.slice(start, 200_000) for start in range(0, rows.num_rows, 200_000)]
    assert figures_of(*chunks, kind="moments", column="x") == within
    monkeypatch.setattr("embedder.store.metric_queries.MEMORY", "1MB")
    found = compute_figures(
        [config_of(kind="moments", column="x"), MetricConfig(name="rows", kind="count")], rows.schema, chunks
    )[0]
    assert "Memory" in found["it"]["error"] and found["rows"]["num"] == rows.num_rows


def test_scores_without_an_order_have_an_area_of_a_half_and_one_label_alone_has_none():
    rows = pa.table({"p": [0.5] * 10, "y": [True, False] * 5})
    assert figures_of(rows, kind="auroc", column="p", label="y")["auroc"] == 0.5
    alone = pa.table({"p": [0.1, 0.9], "y": [1, 1]})
    assert figures_of(alone, kind="auroc", column="p", label="y")["auroc"] is None


def test_what_is_no_probability_or_no_label_is_counted_apart():
    rows = pa.table({"p": [0.0, 1.5, math.nan, 0.5, None], "y": [1, 1, 1, 7, 1]})
    found = figures_of(rows, kind="log_loss", column="p", label="y")
    assert (found["num"], found["num_invalid"], found["num_null"]) == (1, 3, 1)
    assert found["log_loss"] == pytest.approx(53 * math.log(2))  # certain, and wrong


def test_a_confusion_has_the_matrix_and_one_of_too_many_classes_says_so():
    rows = pa.table({"guess": ["a", "b", "b", "c"], "truth": ["a", "b", "a", None]})
    found = figures_of(rows, kind="confusion", column="guess", label="truth")
    assert found["matrix"] == {"a": {"a": 1, "b": 1}, "b": {"b": 1}} and found["num_null"] == 1
    assert found["accuracy"] == pytest.approx(2 / 3) and found["mean_f1"] == pytest.approx(2 / 3)
    ids = [str(number) for number in range(6000)]
    many = pa.table({"guess": ids, "truth": ids})
    other = pa.table({"guess": [f"x{each}" for each in ids], "truth": ids})
    assert "more than 10,000" in figures_of(many, other, kind="confusion", column="guess", label="truth")["error"]


def test_drift_is_nothing_against_oneself_and_sees_a_turn():
    rows = hostile_rows(500)
    state = drift_of(rows)
    same = drift_between(state, state)
    assert same["mean_distance"] == same["frechet_distance"] == 0.0 and same["cosine_of_means"] == pytest.approx(1)
    shifted = np.array(rows["image_embedding"].to_pylist(), np.float32) + np.float32(0.1)
    turned = rows.set_column(8, "image_embedding", pa.array(shifted.tolist(), pa.list_(pa.float32())))
    moved = drift_between(drift_of(turned), state)
    assert moved["mean_distance"] == pytest.approx(0.1 * math.sqrt(8), rel=1e-4)
    assert moved["frechet_distance"] == pytest.approx(moved["mean_distance"] ** 2, rel=1e-3)
    assert drift_between(state, state | {"sums": [1], "squares": [1]}) == {}  # of a model of another width


def test_an_error_of_ones_own_metric_is_told_and_raises_nothing(own_file, tmp_path):
    rows = hostile_rows(10)
    (tmp_path / "leaving.py").write_text(
        OWN.replace("def figures(self, state):", "def figures(self, state):\n        exit(3)")
    )
    values = {"kind": "own", "callable": f"{tmp_path / 'leaving.py'}:Longest", "inputs": ("word",)}
    assert "SystemExit: 3" in figures_of(rows, rows, **values)["error"]
    (tmp_path / "leaving.py").write_text("raise SystemExit(2)\n")
    with pytest.raises(ConfigError, match=r"leaving.py:Longest can't be imported \(SystemExit: 2\)"):
        check_columns([config_of(**values)], rows.schema)
    found = figures_of(rows, rows, kind="own", callable=f"{own_file}:Broken", inputs=("word",))
    assert "ZeroDivisionError: division by zero" in found["error"]


def test_a_changed_file_is_computed_anew(tmp_path):
    path = tmp_path / "longest.py"
    path.write_text(OWN)
    values = {"kind": "own", "callable": f"{path}:Longest", "inputs": ("word",)}
    rows = pa.table({"word": ["four"]})
    assert figures_of(rows, **values) == {"longest": 4}
    path.write_text(OWN.replace("len(each)", "10 * len(each)"))
    assert figures_of(rows, **values) == {"longest": 40}


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"kind": "sum", "column": "nowhere"}, "no column 'nowhere'.*item_id"),
        ({"kind": "moments", "column": "word"}, "of numbers.*'word' is string"),
        ({"kind": "auroc", "column": "score", "label": "word"}, "'word' is string"),
        ({"kind": "confusion", "column": "word", "label": "word"}, "column and label are both"),
        ({"kind": "own", "callable": "no.such.module:Name", "inputs": ("word",)}, "can't be imported"),
    ],
)
def test_a_metric_that_cant_be_computed_is_refused_before_the_run(values, found):
    with pytest.raises(ConfigError, match=found):
        check_columns([config_of(**values)], hostile_rows(1).schema)
