"""What is wrong in a training's configuration is named in one line; exit 2."""

import pytest

from embedder.errors import ConfigError
from embedder.training.config import load_train_config

GOOD = """
model = "models/base"
out = "runs/training"
concept = "sku"
texts = ["title", "keywords"]

[train]
loss = "siglip"
what = "layers"
vision_layers = [9, 12]
num_steps = 5000
[train.augmentation]
rotate_deg = 10

[validation]
source = "noto"

[[source]]
name = "noto"
path = "noto.parquet"
[[source]]
name = "others"
path = "others.parquet"
columns = { id = "item_id", image = "image", caption = "caption" }
"""


def read(tmp_path, text, **options):
    (tmp_path / "train.toml").write_text(text)
    return load_train_config(tmp_path / "train.toml", **options)


def test_a_whole_file_is_read(tmp_path):
    config = read(tmp_path, GOOD, settings=["train.seed=7"])
    assert (config.train.vision_layers.start, config.train.vision_layers.stop) == (9, 12)
    assert (config.train.seed, config.train.augmentation.rotate_deg) == (7, 10.0)
    assert config.validation.source == "noto"
    assert config.source[1].columns.image == "image"


MISTAKES = [
    ('modle = "x"', "modle"),
    ('model = "x"\nout = "y"', r"no \[\[source\]\]"),
    ('out = "y"\n[[source]]\npath = "a"', "give `model`"),
    ('model = "x"\nout = "y"\n[architecture]\n[[source]]\npath = "a"', "one of the two"),
    ('model = "x"\nout = "y"\ntokenizer = "t"\n[[source]]\npath = "a"', r"goes with \[architecture\]"),
    ('model = "x"\nout = "y"\n[validation]\nsource = "b"\n[[source]]\npath = "a"', "validation.source is 'b'"),
    ('model = "x"\nout = "y"\n[train]\nvision_layers = 3\n[[source]]\npath = "a"', r"\[start, stop\]"),
    ('model = "x"\nout = "y"\n[train]\nwhat = "layers"\n[[source]]\npath = "a"', "ranges of layers"),
    (
        'out = "y"\n[architecture]\n[train]\nwhat = "layers"\ntext_layers = [0, 1]\n[[source]]\npath = "a"',
        "delta over a base",
    ),
    ('model = "x"\nout = "y"\n[train]\nlearning_rate = -1\n[[source]]\npath = "a"', "train.learning_rate = -1"),
    ('out = "y"\n[architecture.vision]\nimage_size = 32\n[[source]]\npath = "a"', "image_size"),
    ('out = "y"\n[architecture.text]\nvocab_size = 3\n[[source]]\npath = "a"', "at least 7"),
    ('out = "y"\nmodel = "x"\n[train]\nloss = "concepts"\nnum_concepts = 3\n[[source]]\npath = "a"', "clip"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_what_breaks_a_rule_is_named_in_one_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        read(tmp_path, text)
    assert str(tmp_path / "train.toml") in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command_exits_with_2_and_one_line(tmp_path, run_embedder):
    (tmp_path / "train.toml").write_text('modle = "x"')
    code, _, stderr = run_embedder("train", tmp_path / "train.toml")
    assert code == 2
    assert "modle" in stderr
    assert len(stderr.strip().splitlines()) == 1
