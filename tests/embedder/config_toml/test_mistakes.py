"""Mistakes in a configuration, in words of TOML: each kind, each key, and nothing of Python or pydantic in them."""

import re
from pathlib import Path

import pytest

from embedder.config import OF_TRAINING, RunConfig, load_config
from embedder.config_toml.fields import tables_below
from embedder.config_toml.load_config import load
from embedder.config_toml.mistakes import ConfigMistakesError
from embedder.errors import ConfigError
from embedder.plugins.train.train_config import TrainConfig, load_train_config

TAKES_DTYPE = 'takes "auto" or "float32" or "bfloat16" or "float16" or "int8"'

SOURCES = "write [[source]], and its keys below it (path, name, kind, columns, ...)"

# By kind of mistake: the file, and its line without the path that all of them begin with.
UNKNOWN_KEYS = {
    'modle = "x"': ", line 1: there is no key modle; did you mean model?",
    "\n[decode]\nmax_pixel = 3": (
        ", line 3: there is no key max_pixel in [decode]; max_pixels is in pixels: write max_pixels = 3"
    ),
    "[dekode]\ntimeout_s = 3": ", line 1: there is no table [dekode]; did you mean [decode]?",
    "[sources]\npath = 3": ", line 2: path stands in [sources] and belongs into [[source]] or [[join]] or "
    "[[deploy.volume]]: move it there",
    "quux = 3": ", line 1: there is no key quux; `embedder config --reference` lists all",
    "[[stage]]\nreplicas = { most = 3 }": ", line 2: there is no key most in [stage.replicas]; its keys are min, max",
    'my_api_key = "T0PS3CRET"': ", line 1: there is no key my_api_key; `embedder config --reference` lists all",
    "max_pixel = 3": ", line 1: there is no key max_pixel; did you mean max_pixels in [decode]?",
    '[index]\ntype = "HNSW"': ', line 2: there is no key type in [index]; did you mean kind = "hnsw"?',
    '[[source]]\npath = "a"\nurl = "s3://KEY:T0PS3CRET@b"': (
        ", line 3: there is no key url in [[source]]; did you mean path?"
    ),
}
WRONG_TABLES = {
    '[source]\npath = "a"': ", line 1: [source]: each is an entry of a list: write [[source]], in double brackets",
    'source = "a"': f', line 1: source = "a": found a string; takes tables: {SOURCES}',
    'source = ["a"]': f', line 1: source = "a": found a string in the list; takes a table: {SOURCES}',
    "[[decode]]\ntimeout_s = 3": ", line 1: [[decode]]: there is one, no list: write [decode], in single brackets",
    "decode = 5": (
        ", line 1: decode = 5: found an integer; takes a table: write [decode], and its keys below it "
        "(num_cpus, timeout_s, video_timeout_s, memory_bytes, ...)"
    ),
    '[[source]]\npath = "a"\ncolumns = "b"': (
        ', line 3: source.columns = "b": found a string; takes a table: write [source.columns], and its keys '
        "below it (id, image, caption)"
    ),
    "prices = 5": (
        ", line 1: prices = 5: found an integer; takes a table of numbers: write [prices], and its keys below it"
    ),
    "# x\nmax_pixels = 5": ", line 2: max_pixels stands at the top and belongs into [decode]: move it there",
    "[decode]\nnum_stages = 3": (
        ", line 2: num_stages stands in [decode] and is a key of the top: move it above the first [table]"
    ),
    "[decode]\nmin_recall = 1": ", line 2: min_recall stands in [decode] and belongs into [index]: move it there",
    'out = "x"\n[train]\nnum_steps = 3': (
        ", line 1: out, train are keys of a training run: give the file to `embedder train`"
    ),
    '[[source]]\nname = "a"': (
        ', line 1: [[source]] has no path; write path = "...": folder, file, glob or URI (local, s3://, gs://)'
    ),
}
WRONG_TYPES = {
    'num_stages = "8"': ', line 1: num_stages = "8": found a string; num_stages takes an integer: write num_stages = 8',
    'num_stages = "many"': ', line 1: num_stages = "many": found a string; num_stages takes an integer',
    "num_stages = 2.5": (
        ", line 1: num_stages = 2.5: found a number; num_stages takes an integer: write num_stages = 2 or 3"
    ),
    "num_stages = true": ", line 1: num_stages = true: found a boolean; num_stages takes an integer",
    "num_stages = 99999999999999999999": (
        ", line 1: num_stages = 99_999_999_999_999_999_999: found an integer beyond 64 bits; num_stages takes an "
        "integer"
    ),
    "model = 5": ', line 1: model = 5: found an integer; model takes a string or tables: write model = "5"',
    "store = 2024-01-01": (
        ', line 1: store = 2024-01-01: found a date or time; store takes a string: write store = "2024-01-01"'
    ),
    'fast_start = "yes"': (
        ', line 1: fast_start = "yes": found a string; fast_start takes true or false: write fast_start = true'
    ),
    "fast_start = 0": (
        ", line 1: fast_start = 0: found an integer; fast_start takes true or false: write fast_start = false"
    ),
    '[on_failure]\ncommand = "mail -v ops"': (
        ', line 2: on_failure.command = "mail -v ops": found a string; command takes a list of strings: '
        'write command = ["mail", "-v", "ops"]'
    ),
    "[on_failure]\ncommand = \"mail -s 'a b' ops\"": (
        ", line 2: on_failure.command = \"mail -s 'a b' ops\": found a string; command takes a list of strings"
    ),
    '[[source]]\npath = "a"\ncarryover = "sku, price"': (
        ', line 3: source.carryover = "sku, price": found a string; carryover takes a list of strings: write '
        'carryover = ["sku", "price"]'
    ),
    '[[source]]\npath = "a"\ninclude = "*.{a,b}"': (
        ', line 3: source.include = "*.{a,b}": found a string; include takes a list of strings: write include = '
        '["*.{a,b}"]'
    ),
    '[[source]]\npath = "a"\ninclude = [5]': (
        ', line 3: source.include = 5: found an integer in the list; each item takes a string: write "5"'
    ),
    '[[source]]\npath = ["a", "b"]': (
        ', line 2: source.path = ["a", "b"]: found a list; path takes a string: write one [[source]] for each'
    ),
    'batch_size = "32"': (
        ', line 1: batch_size = "32": found a string; batch_size takes an integer or "auto": write batch_size = 32'
    ),
    'batch_size = "atuo"': ', line 1: batch_size = "atuo": takes an integer or "auto"; did you mean "auto"?',
    "[[stage]]\nreplicas = 3": (
        ', line 2: stage.replicas = 3: found an integer; takes a table or "auto": write [stage.replicas], and '
        "its keys below it (min, max)"
    ),
    '[prices]\nL4 = "0.8"': ', line 2: prices.L4 = "0.8": found a string; L4 takes a number: write L4 = 0.8',
    'dtype = "fp16"': f', line 1: dtype = "fp16": {TAKES_DTYPE}; did you mean "float16"?',
    'dtype = "Float32"': f', line 1: dtype = "Float32": {TAKES_DTYPE}; did you mean "float32"?',
    'device = "gpu"': ', line 1: device = "gpu": takes "auto" or "cpu" or "cuda"; did you mean "cuda"?',
    'engine = "xyz"': ', line 1: engine = "xyz": takes "auto" or "ray" or "local"',
}
WRONG_UNITS = {
    '[decode]\ntimeout_s = "5m"': (
        ', line 2: decode.timeout_s = "5m": found a string; timeout_s takes a number, in seconds: write timeout_s = 300'
    ),
    '[decode]\nmemory_bytes = "10GB"': (
        ', line 2: decode.memory_bytes = "10GB": found a string; memory_bytes takes an integer, in bytes: write '
        "memory_bytes = 10_000_000_000"
    ),
    "[decode]\nmemory_bytes = 4": (
        ", line 2: decode.memory_bytes = 4: must be at least 268_435_456 bytes; 4 GiB are 4_294_967_296: write "
        "memory_bytes = 4_294_967_296"
    ),
    "[decode]\nmemory_gb = 4": (
        ", line 2: there is no key memory_gb in [decode]; memory_bytes is in bytes: write memory_bytes = 4_000_000_000"
    ),
    "[decode]\ntimeout = 30": (
        ", line 2: there is no key timeout in [decode]; timeout_s is in seconds: write timeout_s = 30"
    ),
    "[decode]\ntimeout_ms = 500": (
        ", line 2: there is no key timeout_ms in [decode]; timeout_s is in seconds: write timeout_s = 0.5"
    ),
    'max_reject_fraction = "5%"': (
        ', line 1: max_reject_fraction = "5%": found a string; max_reject_fraction takes a number, a share (5 % '
        "is 0.05): write max_reject_fraction = 0.05"
    ),
    "max_reject_fraction = 5": (
        ", line 1: max_reject_fraction = 5: must be at least 0 and at most 1, a share; 5 % is 0.05: write "
        "max_reject_fraction = 0.05"
    ),
    "max_retire_percent = 5": (
        ", line 1: there is no key max_retire_percent; max_retire_fraction is a share: write max_retire_fraction = 0.05"
    ),
}
BROKEN_RULES = {
    "num_stages = 0": ", line 1: num_stages = 0: must be at least 1",
    "segment_s = -1": ", line 1: segment_s = -1: must be more than 0 seconds",
    "segment_s = nan": ", line 1: segment_s = nan: must be a finite number; write one",
    "segment_s = inf": ", line 1: segment_s = inf: must be a finite number; write one",
    "[prices]\nL4 = -1": ", line 2: prices.L4 = -1: must be at least 0",
    "[decode]\nitems_per_task = 0": ", line 2: decode.items_per_task = 0: must be at least 1",
    "batch_size = 0": ', line 1: batch_size = 0: write "auto" or a number of rows from 1 up',
    '[[source]]\npath = "a"\nname = "my photos"': (
        ', line 3: source.name = "my photos": must be letters, digits, . _ and - only'
    ),
    '[on_failure]\nwebhook = "h.example.com/T0PS3CRET"': (
        ', line 2: on_failure.webhook = "h.example.com/***": must be an address that begins with http:// or https://'
    ),
}
COMBINATIONS = {
    "# 1\nnum_stages = 3\n[[stage]]\n[[stage]]": (
        ", lines 2 and 3: 2 [[stage]] entries for num_stages = 3; write one entry for each stage, or none"
    ),
    "[[stage]]\nreplicas = { min = 3, max = 2 }": (
        ", line 2: stage.replicas: max (2) is below min (3); raise max or lower min"
    ),
    '[[source]]\npath = "a"\n[[source]]\npath = "b"': (
        ", line 1: several [[source]] entries need a `name` each, all different: it stands before the ids"
    ),
}
ALL = UNKNOWN_KEYS | WRONG_TABLES | WRONG_TYPES | WRONG_UNITS | BROKEN_RULES | COMBINATIONS


def refusal(tmp_path, text, read=load_config, settings=()):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "run.toml", settings=settings)
    return str(caught.value).replace(str(tmp_path / "run.toml"), "FILE")


@pytest.mark.parametrize("text", ALL)
def test_each_kind_of_mistake_has_its_line(tmp_path, text):
    assert refusal(tmp_path, text) == f"FILE{ALL[text]}"


TRAINING = 'model = "m"\nout = "o"\n[[source]]\npath = "a"\n'
OF_A_TRAINING = {
    '[train]\nvision_layers = [5, 3]\nwhat = "layers"': (
        "train.vision_layers = [5, 3]: found a list; vision_layers takes [start, stop]"
    ),
    "[train]\nvision_layers = 3": "train.vision_layers = 3: found an integer; vision_layers takes [start, stop]",
    "[train]\nwarmup_steps = 70\nnum_steps = 60": "warmup_steps = 70 exceeds num_steps = 60",
    "[architecture.preprocess]\nstd = [0.5]": (
        "architecture.preprocess.std = [0.5]: found a list; std takes a list of 3 numbers"
    ),
    '[architecture.vision]\nfamily = "vitt"': 'architecture.vision.family = "vitt": takes "',
    '[architecture.vision]\nfamily = "naflex"\npatchsize = 3': "there is no key patchsize in [architecture.vision]",
    '[architecture.text]\nhidden = "9"': "there is no key hidden in [architecture.text]",
    "[architecture.vision]\ndepth = 0": "architecture.vision.depth = 0: must be at least 1",
}


@pytest.mark.parametrize("text", OF_A_TRAINING)
def test_mistakes_of_a_training_run_are_told_the_same_way(tmp_path, text):
    assert OF_A_TRAINING[text] in refusal(tmp_path, TRAINING + text, load_train_config)


def test_a_run_given_to_training_and_the_reverse_are_told_the_command(tmp_path):
    assert "index is a key of a run that embeds: give the file to `embedder embed --config`" in refusal(
        tmp_path, TRAINING + "[index]\n", load_train_config
    )
    within = {key for table in tables_below(RunConfig) for key in table.kind.model_fields}
    assert set(TrainConfig.model_fields) - within == set(OF_TRAINING) - within
    assert set(OF_TRAINING) <= set(TrainConfig.model_fields) - set(RunConfig.model_fields)


def test_settings_get_the_same_lines_which_speak_of_set(tmp_path):
    text = "num_stages = 2\n[decode]\ntimeout_s = 3\n"
    said = {
        "decode.timeout_s=5m": (
            '--set decode.timeout_s = "5m": found a string; timeout_s takes a number, in seconds: write --set '
            "decode.timeout_s=300"
        ),
        "model=2024": (
            "--set model = 2024: found an integer; model takes a string or tables: write --set 'model=\"2024\"'"
        ),
        "store=2026-11-30": (
            "--set store = 2026-11-30: found a date or time; store takes a string: write --set 'store=\"2026-11-30\"'"
        ),
        "fast_start=True": (
            '--set fast_start = "True": found a string; fast_start takes true or false: write --set fast_start=true'
        ),
        "modle=x": "--set modle: there is no key modle; did you mean model?",
        "decode={timeout_s=0}": "--set decode: decode.timeout_s = 0: must be more than 0 seconds",
        "on_failure.command=[mail, ops]": (
            '--set on_failure.command = "[mail, ops]": found a string; command takes a list of strings: write '
            '--set \'on_failure.command=["mail", "ops"]\''
        ),
        "dtype": '--set "dtype": write it as NAME=VALUE, for example --set dtype=bfloat16',
        "=3": '--set "=...": write it as NAME=VALUE, for example --set dtype=bfloat16',
        "decode..x=3": '--set "decode..x=...": write it as NAME=VALUE, for example --set dtype=bfloat16',
        "model.x=3": (
            "--set model.x: model is a list, and --set goes into tables only; change it in the file, or write the "
            "whole list, as --set 'model=[{...}]'"
        ),
        "num_stages.x=3": (
            "--set num_stages.x: num_stages = 2 is no table and has no keys; write [num_stages] in the file"
        ),
        "stage=[{},{},{}]": (
            "FILE, line 1 with --set stage: 3 [[stage]] entries for num_stages = 2; write one entry for each "
            "stage, or none"
        ),
    }
    assert {setting: refusal(tmp_path, text, settings=[setting]) for setting in said} == said
    message = refusal(tmp_path, text, settings=["source.path=x"])
    assert message.startswith("--set source.path: source is a list, and --set goes into tables only")
    assert "T0PS3CRET" not in refusal(tmp_path, text, settings=["aws_secret_access_key=T0PS3CRET"])


def test_a_right_setting_mends_a_wrong_value_of_the_file(tmp_path):
    (tmp_path / "run.toml").write_text('dtype = "fp16"\n[decode]\ntimeout_s = "5m"\n')
    config = load_config(tmp_path / "run.toml", settings=["dtype=float16", "decode.timeout_s=300"])
    assert (config.dtype, config.decode.timeout_s) == ("float16", 300.0)


def test_values_of_options_are_told_without_a_file():
    with pytest.raises(ConfigError, match=r"^the command line: num_stages = 0: must be at least 1$"):
        load_config(overrides={"num_stages": 0})


def test_several_mistakes_are_told_in_the_order_of_the_file_ten_at_most(tmp_path):
    text = 'dtype = "fp16"\n\n[decode]\nmemory_gb = 4\ntimeout_s = "5m"\n\n[source]\npath = "photos"\n'
    assert [line.partition(":")[0] for line in refusal(tmp_path, text).split("\n")] == [
        *("FILE, line 1", "FILE, line 4", "FILE, line 5", "FILE, line 7")
    ]
    (tmp_path / "run.toml").write_text("".join(f"unknown{number} = 1\n" for number in range(30)))
    with pytest.raises(ConfigMistakesError) as caught:
        load_config(tmp_path / "run.toml")
    assert len(caught.value.lines) == 11
    assert caught.value.lines[-1] == "and 20 more mistakes"


def test_the_documentation_shows_real_lines(tmp_path):
    text = 'dtype = "fp16"\n\n[decode]\nmemory_gb = 4\ntimeout_s = "5m"\n\n[source]\npath = "photos"\n'
    page = Path(__file__).parents[3] / "docs/configuration.md"
    assert f"```\n{refusal(tmp_path, text).replace('FILE', 'run.toml')}\n```" in page.read_text(encoding="utf-8")


# Words that only Python and pydantic say. A value is quoted as TOML writes it, so `None` and `dict` can't be one here.
FOREIGN_WORDS = re.compile(
    r"Input should|valid (tuple|dict|string|integer|number|bool)|Value error|pydantic|NoneType|\bNone\b|\bdict\b|"
    r"\btuple\b|\bTrue\b|\bFalse\b|instance of|literal|Extra inputs|validation error|unable to parse|Traceback|<class"
)
HOSTILE = [
    "x y", "", True, -7, 0.5, float("nan"), 2**70, ["a"], [[1]], [{"a": 1}], {"a": 1}, {"family": 3}, [2, 1],
    "\x00" * 90,
]  # fmt: skip


MINIMAL = {RunConfig: {}, TrainConfig: {"model": "m", "out": "o", "source": [{"path": "a"}]}}


def tree_with(kind, table, key, value):
    """A whole configuration with one more value, in a table of any depth."""
    is_list = {each.keys: each.is_list for each in tables_below(kind)}
    tree = {key: value}
    for depth in range(len(table.keys), 0, -1):
        required = {"path": "a"} if table.keys[:depth] == ("source",) else {}
        tree = {table.keys[depth - 1]: [required | tree] if is_list[table.keys[:depth]] else tree}
    return MINIMAL[kind] | tree


# The training run's has eleven families of towers, which take 8 s.
@pytest.mark.medium
@pytest.mark.parametrize("kind", [RunConfig, pytest.param(TrainConfig, marks=pytest.mark.slow)])
def test_every_key_with_every_wrong_value_is_told_in_words_of_toml(kind):
    refused = 0
    for table in tables_below(kind):
        for key in table.kind.model_fields:
            for value in HOSTILE:
                try:
                    load(kind, overrides=(tree := tree_with(kind, table, key, value)))
                except ConfigMistakesError as error:
                    assert not FOREIGN_WORDS.search(str(error)), (tree, str(error))
                    assert all(line.startswith("the command line: ") for line in error.lines), (tree, error.lines)
                    refused += 1
    assert refused > 1000
