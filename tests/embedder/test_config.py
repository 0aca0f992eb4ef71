"""One file describes a run; what is wrong in it is named."""

import numpy as np
import pytest

from embedder.config import load_config
from embedder.errors import ConfigError

DESIGNED = """
model = "models/products"
store = "s3://team/embeddings"
dtype = "bfloat16"
engine = "auto"
num_stages = 3
batch_size = "auto"
max_reject_fraction = 0.01
max_retire_fraction = 0.05
segment_s = 5.0
frames_per_segment = 4

[[source]]
name = "catalogue"
path = "s3://team/catalogue.parquet"
kind = "table"
columns = { id = "sku", image = "photo_uri", caption = "title" }
carryover = ["category", "price"]

[[stage]]
replicas = { min = 1, max = 4 }
num_cpus = 1
num_gpus = 0.5
[[stage]]
[[stage]]
"""


def test_the_designed_file_is_read_whole(tmp_path):
    (tmp_path / "run.toml").write_text(DESIGNED)
    config = load_config(tmp_path / "run.toml")
    assert config.source[0].columns.image == "photo_uri"
    assert (config.stage[0].replicas.max, config.stage[0].num_gpus, config.stage[1].num_cpus) == (4, 0.5, None)


def test_options_win_over_the_file_and_settings_over_options(tmp_path):
    (tmp_path / "run.toml").write_text('dtype = "bfloat16"\nsegment_s = 1.0\nnum_stages = 2\n')
    settings = ["num_stages=5", "decode.timeout_s=7.5", "model=/a path/with spaces"]
    config = load_config(tmp_path / "run.toml", {"segment_s": 2.0, "dtype": None, "num_stages": 4}, settings)
    assert (config.dtype, config.segment_s, config.num_stages, config.decode.timeout_s) == ("bfloat16", 2.0, 5, 7.5)
    assert config.model == "/a path/with spaces"


def test_a_setting_takes_quoted_keys_as_a_file_does():
    settings = ['prices."A100:80GB"=3', "prices.H100:94GB = 4", 'deploy.labels."app.kubernetes.io/name"=x']
    config = load_config(settings=[*settings, "'store'=y"])
    assert config.prices == {"A100:80GB": 3.0, "H100:94GB": 4.0}
    assert (config.deploy.labels, config.store) == ({"app.kubernetes.io/name": "x"}, "y")
    with pytest.raises(ConfigError, match=r'^--set prices\."A100:80GB" = -3: must be at least 0$'):
        load_config(settings=['prices."A100:80GB"=-3'])


def test_a_missing_file_and_a_broken_setting_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        load_config(settings=["dtype"])


def test_an_empty_store_is_not_the_working_directory():
    with pytest.raises(ConfigError, match='^the command line: store = "": must not be empty'):
        load_config(overrides={"store": ""})


def test_a_stop_has_an_end():
    with pytest.raises(ConfigError, match="at least 0 and at most 86400 seconds"):
        load_config(settings=["stop_timeout_s=inf"])


def test_as_many_stages_as_are_described_where_none_are_counted(tmp_path):
    (tmp_path / "run.toml").write_text("[[stage]]\nnum_cpus = 1\n[[stage]]\n")
    assert load_config(tmp_path / "run.toml").num_stages == 2
    assert load_config().num_stages == 3
    assert load_config(overrides={"num_stages": 5}).num_stages == 5
    with pytest.raises(ConfigError, match="must be at least 0") as caught:
        load_config(overrides={"stage": [{"num_cpus": -1}]})
    assert "num_stages" not in str(caught.value), "what follows from a mistake is none"


def test_the_least_recall_is_no_more_than_the_recall_that_is_asked_for():
    found = {
        recall: load_config(overrides={"index": {"recall": recall}}).index.min_recall for recall in (0.8, 0.9, 0.99)
    }
    assert found == {0.8: 0.8, 0.9: 0.9, 0.99: 0.9}
    assert load_config().index.min_recall == 0.9
    assert load_config(overrides={"index": {"recall": 0.8, "min_recall": 0.85}}).index.min_recall == 0.85


def test_lists_and_numbers_of_python_are_taken_as_those_of_a_file():
    config = load_config(overrides={"source": ({"path": "a", "carryover": ("b",)},), "segment_s": 2, "num_stages": 4.0})
    assert (config.source[0].carryover, config.segment_s, config.num_stages) == (("b",), 2.0, 4)
    config = load_config(overrides={"num_stages": np.int64(4), "fast_start": np.False_, "segment_s": np.float64(2)})
    assert (config.num_stages, config.fast_start, config.segment_s) == (4, False, 2.0)
    assert load_config(overrides={"decode": config.decode, "index": config.index}) == load_config()
