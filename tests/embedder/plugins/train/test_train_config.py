"""What is wrong in a training's configuration is named in one line; exit 2."""

import pytest

from embedder.errors import ConfigError
from embedder.plugins.train.train_config import load_train_config

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


TAUGHT = 'model = "x"\nout = "y"\n[teacher]\n[[source]]\npath = "a"'
MISTAKES = [
    ('model = "x"\nout = "y"', r"no \[\[source\]\]"),
    ('out = "y"\n[[source]]\npath = "a"', "give `model`"),
    ('model = "x"\nout = "y"\n[architecture]\n[[source]]\npath = "a"', "one of the two"),
    ('model = "x"\nout = "y"\ntokenizer = "t"\n[[source]]\npath = "a"', r"goes with \[architecture\]"),
    (
        'model = "x"\nout = "y"\n[validation]\nsource = "b"\n[[source]]\npath = "a"',
        'validation.source = "b": there is no ',
    ),
    ('model = "x"\nout = "y"\n[train]\nwhat = "layers"\n[[source]]\npath = "a"', "ranges of layers"),
    (
        'out = "y"\n[architecture]\n[train]\nwhat = "layers"\ntext_layers = [0, 1]\n[[source]]\npath = "a"',
        "delta over a base",
    ),
    ('out = "y"\n[architecture.vision]\nimage_size = 32\n[[source]]\npath = "a"', "image_size"),
    ('out = "y"\n[architecture.text]\nvocab_size = 3\n[[source]]\npath = "a"', "at least 7"),
    ('out = "y"\nmodel = "x"\n[train]\nloss = "concepts"\nnum_concepts = 3\n[[source]]\npath = "a"', "clip"),
    (TAUGHT.replace("[teacher]", '[teacher]\nstore = "s"\nmodel = "m"'), "one of the two"),
    (TAUGHT, "give `store` for vectors that are there"),
    (TAUGHT.replace("[teacher]", '[teacher]\nmodel = "m"\npublication = "p"'), "go with `store`"),
    (TAUGHT.replace("[teacher]", '[teacher]\nstore = "s"\nvectors = 0\nsimilarities = 0'), "nothing is learnt"),
    ('model = "x"\nout = "y"\nlayers = "last 2"\n[[source]]\npath = "a"', 'write "all", "every 2nd"'),
    ('out = "y"\nlayers = "first 2"\n[architecture]\n[[source]]\npath = "a"', "`layers` are those of `model`"),
    (GOOD.replace("out =", 'layers = "first 2"\nout ='), "begins with another one"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_what_breaks_a_rule_is_named_in_one_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        read(tmp_path, text)
    assert str(tmp_path / "train.toml") in str(error.value)
    assert "\n" not in str(error.value)


def test_several_mistakes_have_a_line_each(tmp_path, run_embedder):
    (tmp_path / "train.toml").write_text('modle = "x"\n[train]\nseed = "6"\n')
    code, _, stderr = run_embedder("train", tmp_path / "train.toml")
    where = f"embedder: {tmp_path}/train.toml"
    assert (code, stderr.splitlines()) == (
        2,
        [
            f'{where}: out is missing; write out = "...": folder for models, checkpoint, metrics and curves',
            f"{where}, line 1: there is no key modle; did you mean model?",
            f'{where}, line 3: train.seed = "6": found a string; seed takes an integer: write seed = 6',
        ],
    )


@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (60, 6), (999, 99), (1000, 100), (20_000, 100)])
def test_the_warm_up_follows_the_length_where_none_is_set(tmp_path, num_steps, warmup_steps):
    text = GOOD.replace("num_steps = 5000", f"num_steps = {num_steps}")
    assert read(tmp_path, text).train.warmup_steps == warmup_steps
    assert read(tmp_path, text, settings=["train.warmup_steps=1"]).train.warmup_steps == 1
