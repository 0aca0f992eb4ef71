"""Section [[metric]]: what each kind needs, and what it takes."""

import pytest

from embedder.config import RunConfig
from embedder.config_toml.metric_section import MetricConfig


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"kind": "sum"}, "needs column"),
        ({"kind": "auroc", "column": "score"}, "needs label"),
        ({"kind": "own", "inputs": ("a",)}, "needs callable"),
        ({"kind": "own", "callable": "m:C"}, "needs inputs"),
        ({"kind": "recall", "column": "score"}, "takes no column"),
        ({"kind": "sum", "column": "a", "label": "b"}, "takes no label"),
        ({"kind": "sum", "column": "a", "settings": {"b": 1}}, "takes no settings"),
        ({"kind": "drift", "column": "score"}, "image_embedding or text_embedding"),
    ],
)
def test_a_key_too_few_or_too_many_is_refused(values, found):
    with pytest.raises(ValueError, match=found):
        MetricConfig(name="it", **values)


def test_two_metrics_of_one_name_are_refused():
    metrics = [{"name": "a", "kind": "count"}, {"name": "a", "kind": "recall"}]
    with pytest.raises(ValueError, match='two metrics have the name "a"'):
        RunConfig(metric=metrics)
