"""One file describes a run; what is wrong in it is named."""

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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('modle = "x"', "modle"),
        ("segment_s = -1", "segment_s = -1"),
        ("segment_s = nan", "segment_s"),
        ('dtype = "int7"', "dtype = 'int7'"),
        ("batch_size = 0", 'write "auto" or a number'),
        ("[[stage]]\n[[stage]]", "2 .*stage.* entries for num_stages = 3"),
        ('[[source]]\npath = "a"\n[[source]]\npath = "b"', "need a `name` each"),
        ("[[stage]]\nreplicas = { min = 3, max = 2 }", "below min"),
        ("model = ", "no valid TOML"),
    ],
)
def test_what_breaks_a_rule_is_named_in_one_line(tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(tmp_path / "run.toml")
    assert str(tmp_path / "run.toml") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_broken_setting_are_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="key=value"):
        load_config(settings=["dtype"])
