"""The cure that a refusal names is carried out, and leads to success: of configurations, sources and commands."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_runs import run_here
from PIL import Image
from search_stores import QUERY, picture, searchable

from embedder.config import load_config
from embedder.config_toml.run_sections import Columns, SourceConfig
from embedder.errors import ConfigError, EmbedderError
from embedder.sources.listing import list_sources

SOURCE = '[[source]]\npath = "a"\n'

# The file that is refused, the cure in its message, and the file after it.
CONFIGURATIONS = [
    ('modle = "x"', "did you mean model?", 'model = "x"'),
    ("[decode]\nmax_pixel = 3_000", "write max_pixels = 3", "[decode]\nmax_pixels = 3_000"),
    ("[dekode]\ntimeout_s = 3", "did you mean [decode]?", "[decode]\ntimeout_s = 3"),
    ('[sources]\npath = "a"', "belongs into [[source]]", SOURCE),
    ('[source]\npath = "a"', "write [[source]], in double brackets", SOURCE),
    ("[[decode]]\ntimeout_s = 3", "write [decode], in single brackets", "[decode]\ntimeout_s = 3"),
    ("max_pixels = 5_000", "belongs into [decode]: move it there", "[decode]\nmax_pixels = 5_000"),
    ("[decode]\nnum_stages = 3", "move it above the first [table]", "num_stages = 3\n[decode]"),
    ("[decode]\nmin_recall = 1", "belongs into [index]: move it there", "[index]\nmin_recall = 1"),
    ('[[source]]\nname = "a"', 'write path = "..."', '[[source]]\nname = "a"\npath = "..."'),
    ('num_stages = "8"', "write num_stages = 8", "num_stages = 8"),
    ("num_stages = 2.5", "write num_stages = 2 or 3", "num_stages = 3"),
    ('fast_start = "yes"', "write fast_start = true", "fast_start = true"),
    ("fast_start = 0", "write fast_start = false", "fast_start = false"),
    (
        '[on_failure]\ncommand = "mail -v ops"',
        'write command = ["mail", "-v", "ops"]',
        '[on_failure]\ncommand = ["mail", "-v", "ops"]',
    ),
    (
        SOURCE + 'carryover = "sku, price"',
        'write carryover = ["sku", "price"]',
        SOURCE + 'carryover = ["sku", "price"]',
    ),
    ('[[source]]\npath = ["a", "b"]', "write one [[source]] for each", f'{SOURCE}name = "a"\n{SOURCE}name = "b"'),
    (f"{SOURCE}{SOURCE}", "need a `name` each, all different", f'{SOURCE}name = "x"\n{SOURCE}name = "y"'),
    ('batch_size = "32"', "write batch_size = 32", "batch_size = 32"),
    ("batch_size = 0", 'write "auto" or a number of rows from 1 up', 'batch_size = "auto"'),
    ('dtype = "fp16"', 'did you mean "float16"?', 'dtype = "float16"'),
    ('device = "gpu"', 'did you mean "cuda"?', 'device = "cuda"'),
    ('engine = "xyz"', 'takes "auto" or "ray" or "local"', 'engine = "local"'),
    ('[decode]\ntimeout_s = "5m"', "write timeout_s = 300", "[decode]\ntimeout_s = 300"),
    (
        '[decode]\nmemory_bytes = "10GB"',
        "write memory_bytes = 10_000_000_000",
        "[decode]\nmemory_bytes = 10_000_000_000",
    ),
    ("[decode]\nmemory_gb = 4", "write memory_bytes = 4_000_000_000", "[decode]\nmemory_bytes = 4_000_000_000"),
    ("[decode]\ntimeout_ms = 500", "write timeout_s = 0.5", "[decode]\ntimeout_s = 0.5"),
    ('max_reject_fraction = "5%"', "write max_reject_fraction = 0.05", "max_reject_fraction = 0.05"),
    ("max_reject_fraction = 5", "write max_reject_fraction = 0.05", "max_reject_fraction = 0.05"),
    ("max_retire_percent = 5", "write max_retire_fraction = 0.05", "max_retire_fraction = 0.05"),
    ('[index]\ntype = "HNSW"', 'did you mean kind = "hnsw"?', '[index]\nkind = "hnsw"'),
    (
        "num_stages = 2\n[[stage]]\n",
        "write one entry for each stage, or none",
        "num_stages = 2\n[[stage]]\n[[stage]]\n",
    ),
    ("[[stage]]\nreplicas = 3", "write [stage.replicas]", "[[stage]]\n[stage.replicas]\nmin = 3\nmax = 3"),
    (
        "[[stage]]\n[stage.replicas]\nmin = 3\nmax = 1",
        "raise max or lower min",
        "[[stage]]\n[stage.replicas]\nmin = 3\nmax = 3",
    ),
    (
        '[[stage]]\ndevice = "cuda"\nnum_gpus = 0',
        'write device = "cpu"',
        '[[stage]]\ndevice = "cpu"\nnum_gpus = 0',
    ),
    (
        f'{SOURCE}[[join]]\npath = "t.csv"\non = {{ id = "k" }}',
        "name columns, a caption, or both",
        f'{SOURCE}[[join]]\npath = "t.csv"\non = {{ id = "k" }}\ncaption = "cap"',
    ),
    (
        f'{SOURCE}[[join]]\npath = "t.csv"\non = {{ left = "k" }}\ncaption = "c"',
        'right = "KEY COLUMN"',
        f'{SOURCE}[[join]]\npath = "t.csv"\non = {{ left = "k", right = "k" }}\ncaption = "c"',
    ),
]


@pytest.mark.parametrize(("refused", "cure", "mended"), CONFIGURATIONS, ids=range(len(CONFIGURATIONS)))
def test_the_cure_of_a_configuration(tmp_path, refused, cure, mended):
    path = tmp_path / "run.toml"
    path.write_text(refused)
    with pytest.raises(ConfigError) as found:
        load_config(path)
    assert cure in str(found.value)
    path.write_text(mended)
    load_config(path)


NAMED = {"id": "id", "caption": "cap"}
ROW = "id,cap\na,x\n"


def source(files, message, changes=None, *, path="", columns=NAMED, mended_path=None, mended_columns=None, **settings):
    """A source that is refused: its files, the refusal, and what the cure changes: files (None: away), path, keys."""
    return files, message, changes or {}, (path, mended_path), (columns, mended_columns), settings


def parquet(**columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


PICTURES = parquet(id=["a"], image=[b"x"], cap=["y"])
SOURCES = {
    "semicolon within a value": source(
        {"t.csv": "id,cap\na,one, two\nb,x\n"},
        'put that value into quotes: "one',
        {"t.csv": 'id,cap\na,"one, two"\nb,x\n'},
    ),
    "a value missing": source(
        {"t.csv": "id,cap\na\n"}, "write the ',' of those that are empty", {"t.csv": "id,cap\na,\n"}
    ),
    "title above the header": source(
        {"t.csv": "Report\nid,cap\na,x\n"}, "looks like no header of this table; put one there", {"t.csv": ROW}
    ),
    "no header": source(
        {"t.csv": "a,img/1.jpg\nb,img/2.jpg\n"},
        "put a header before it, a line that names the columns",
        {"t.csv": "id,cap\na,img/1.jpg\nb,img/2.jpg\n"},
    ),
    "empty file": source({"t.csv": ""}, "its first line must name the columns", {"t.csv": ROW}),
    "a column twice": source({"t.csv": "id,cap,cap\na,x,y\n"}, "rename one", {"t.csv": "id,cap,cap2\na,x,y\n"}),
    "Latin-1": source({"t.csv": "id,cap\na,é\n".encode("latin-1")}, "save it as UTF-8", {"t.csv": "id,cap\na,é\n"}),
    "open quote": source({"t.csv": 'id,cap\na,"x\n'}, "correct that row", {"t.csv": ROW}),
    "number that is none": source(
        {"t.csv": "id,cap,n\n" + "".join(f"{n},x,{n}\n" for n in range(1000)) + "z,x,many\n"},
        "correct that row, or write the column as text",
        {"t.csv": "id,cap,n\n" + "".join(f"{n},x,{n}\n" for n in range(1000)) + "z,x,7\n"},
        carryover=("n",),
    ),
    "JSON cut off": source({"t.jsonl": '{"id": "a"\n'}, "correct that line", {"t.jsonl": '{"id": "a", "cap": "x"}\n'}),
    "JSON list": source(
        {"t.jsonl": '[{"id": "a", "cap": "x"}]\n'}, "write one object a line", {"t.jsonl": '{"id": "a", "cap": "x"}\n'}
    ),
    "JSON list of captions": source(
        {"t.jsonl": '{"id": "a", "cap": ["x", "y"]}\n'}, "it must be a string", {"t.jsonl": '{"id": "a", "cap": "x"}\n'}
    ),
    "misspelt column": source(
        {"t.csv": "id,caption\na,x\n"},
        "did you mean 'caption'",
        mended_columns={"id": "id", "caption": "caption"},
        columns={"id": "id", "caption": "captoin"},
    ),
    "no columns named": source(
        {"t.parquet": PICTURES},
        "these look right",
        columns={},
        mended_columns={"id": "id", "image": "image", "caption": "cap"},
    ),
    "no ids": source(
        {"t.parquet": PICTURES},
        "file+row counts the rows",
        columns={"image": "image"},
        mended_columns={"image": "image", "id": "file+row"},
    ),
    "ids by content of addresses": source(
        {"t.csv": "img,cap\nb.jpg,x\n"},
        "the addresses are the ids then",
        columns={"id": "content", "image": "img", "caption": "cap"},
        mended_columns={"image": "img", "caption": "cap"},
    ),
    "labels of bytes": source(
        {"t.parquet": PICTURES},
        "it must be strings",
        columns={"id": "id", "caption": "image"},
        mended_columns={"id": "id", "caption": "cap"},
    ),
    "mixed formats": source(
        {"a.csv": ROW, "b.jsonl": "{}"}, "name one format by a pattern", mended_path="/*.csv", kind="table", path="."
    ),
    "a file missing a column": source(
        {"a.parquet": PICTURES, "b.parquet": parquet(id=["b"])},
        "is missing, which the first file has",
        {"b.parquet": parquet(id=["b"], image=[b"x"], cap=["y"])},
        path=".",
    ),
    "damaged Parquet": source(
        {"a.parquet": PICTURES, "b.parquet": b"PAR1 no"}, "take it out of the source", {"b.parquet": None}, path="."
    ),
    "packed table": source(
        {"t.csv.gz": b"\x1f\x8b"}, "unpack it", {"t.csv.gz": None, "t.csv": ROW}, mended_path="/t.csv", kind="table"
    ),
    "no such path": source({"t.csv": ROW}, "check the path", path="missing.csv", mended_path="/t.csv"),
    "no match": source({"t.csv": ROW}, "check the path", path="*.parquet", mended_path="/*.csv"),
    "range backwards": source(
        {"1.csv": ROW}, "write the smaller number first", path="{3..1}.csv", mended_path="/{1..1}.csv"
    ),
    "braces without end": source(
        {"1.csv": ROW}, "narrow the ranges", path="{1..99999999}.csv", mended_path="/{1..1}.csv"
    ),
    "pattern without kind": source({"t.csv": ROW}, "set kind = ", path="t.*", mended_path="/t.*", kind_after="table"),
    "a folder's column misspelt": source(
        {"lang=de/t.csv": ROW}, "did you mean 'lang'", path=".", carryover=("lng",), carryover_after=("lang",)
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_cure_of_a_source(tmp_path, name):
    files, message, changes, (path, mended_path), (columns, mended_columns), settings = SOURCES[name]
    root = tmp_path / "root"
    after = {key.removesuffix("_after"): value for key, value in settings.items() if key.endswith("_after")}
    before = {key: value for key, value in settings.items() if not key.endswith("_after")}

    def write(contents):
        for file, content in contents.items():
            if content is None:
                (root / file).unlink()
                continue
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_bytes(content.encode() if isinstance(content, str) else content)

    def listed(path, columns, settings):
        listing = list_sources([SourceConfig(path=f"{root}/{path}", columns=Columns(**columns), **settings)])
        return sum(table.num_rows for table in listing)

    write(files)
    path = path or next(iter(files))
    with pytest.raises(EmbedderError, match=re.escape(message)):
        listed(path, columns, before)
    write(changes)
    mended = mended_path.lstrip("/") if mended_path else path
    assert listed(mended, mended_columns or columns, before | after) > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model):
    """A store of four pictures whose vectors are known, and files to search with."""
    folder = tmp_path_factory.mktemp("cures")
    searchable(
        folder / "s", *(picture(f"{n}.png", 10 * n, caption="red") for n in range(4)), price=[1.0, 2.0, 3.0, 4.0]
    )
    np.save(folder / "q.npy", QUERY)
    np.save(folder / "long.npy", np.ones(8, np.float32))
    (folder / "text.npy").write_text("no array")
    (folder / "ids.txt").write_text("3.png\n")
    (folder / "pictures").mkdir()
    Image.new("RGB", (32, 32), (200, 9, 9)).save(folder / "pictures" / "a.png")
    (folder / "run.toml").write_text(
        f'model = "{tiny_model}"\nstore = "{folder}/new"\nengine = "local"\n[[source]]\npath = "{folder}/pictures"\n'
    )
    (folder / "model").symlink_to(tiny_model)
    return folder


Q, S = ["search", "--vector", "q.npy"], ["--store", "s"]

# In order: the command that is refused, the cure in its message, and the command after it.
COMMANDS = [
    (["search", *S], "give a text, --image FILE, both together, or only --vector FILE.npy", [*Q, *S]),
    (["search", "x", "--vector", "q.npy", *S], "or only --vector FILE.npy", [*Q, *S]),
    (["search", "--vector", "long.npy", *S], "2 are needed", [*Q, *S]),
    (["search", "--vector", "none.npy", *S], "give a file that numpy.save wrote", [*Q, *S]),
    (["search", "--vector", "text.npy", *S], "no plain array of numbers; give a file that numpy.save wrote", [*Q, *S]),
    ([*Q, *S, "-k", "0"], "greater than or equal to 1", [*Q, *S, "-k", "1"]),
    ([*Q, *S, "--min-score", "2"], "as 0.2", [*Q, *S, "--min-score", "0.2"]),
    ([*Q, *S, "--where", "prise > 2"], "price DOUBLE", [*Q, *S, "--where", "price > 2"]),
    ([*Q, *S, "--where", "price >"], "price DOUBLE", [*Q, *S, "--where", "price > 1"]),
    ([*Q, *S, "--where", "price = 'x'"], "price DOUBLE", [*Q, *S, "--where", "price = 1"]),
    ([*Q, *S, "--model", "zz"], "it has main", [*Q, *S, "--model", "main"]),
    ([*Q, *S, "--out", "hits"], "known are .csv", [*Q, *S, "--out", "hits.csv"]),
    (Q, "give --store URI", [*Q, *S]),
    ([*Q, *S, "--stor", "s"], "--store", [*Q, *S]),
    (["serch"], "Did you mean 'search'", [*Q, *S]),
    (["history", "--store", "none"], "embed SOURCE --model DIR --store URI", ["history", *S]),
    (["rollback", "xx", *S], "embedder history --store", ["history", *S]),
    (["index", "rollback", "--to", "9", *S], "embedder index status --store", ["index", "status", *S]),
    (["index", "rollback", *S], "published; `embedder index build --store", ["index", "build", *S]),
    (["purge", *S], "or --from-file FILE with one per line", ["purge", "--from-file", "ids.txt", "--yes", *S]),
    (["purge", "2.png", *S], "--yes says so beforehand", ["purge", "2.png", "--yes", *S]),
    (["purge", "2.png", *S], "--dry-run says what would be done", ["purge", "1.png", "--dry-run", *S]),
    (
        ["purge", "zz", "1.png", "--yes", *S],
        "correct what is unknown, or leave it out",
        ["purge", "1.png", "--yes", *S],
    ),
    (
        ["purge", "3.png", "--allow-again", "--dry-run", *S],
        "leave one of them out",
        ["purge", "3.png", "--allow-again", *S],
    ),
    (["config", "--set", "dtype"], "for example --set dtype=bfloat16", ["config", "--set", "dtype=bfloat16"]),
    (["model", "info", "pictures"], "give a model folder", ["model", "info", "model"]),
    (
        ["embed", "pictures", "--store", "new"],
        "give --model DIR",
        ["embed", "pictures", "--model", "model", "--store", "new", "--engine", "local"],
    ),
    (
        ["embed", "pictures", "--model", "model"],
        "give --store URI",
        ["embed", "pictures", "--model", "model", "--store", "new"],
    ),
    (
        ["embed", "--model", "model", "--store", "new"],
        "give SOURCE",
        ["embed", "pictures", "--model", "model", "--store", "new"],
    ),
    (
        ["embed", "pictures", "--model", "model", "--store", "pictures"],
        "such as",
        ["embed", "pictures", "--model", "model", "--store", "pictures-store", "--engine", "local"],
    ),
    (
        ["rejects", "--retry", "--store", "new"],
        "give --config FILE.toml",
        ["rejects", "--retry", "--config", "run.toml"],
    ),
    (
        ["rejects", "--force", "a.png", "--store", "new"],
        "give --retry too",
        ["rejects", "--retry", "--force", "a.png", "--config", "run.toml"],
    ),
    (["report", *S], "run `embedder embed` to its end", ["report", "--store", "new"]),
    (["embed", "pictures", "--config", "none.toml"], "give the path of a TOML file", ["embed", "--config", "run.toml"]),
]


@pytest.mark.medium
def test_the_cures_of_commands(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "1000")
    for refused, cure, mended in COMMANDS:
        ended = run_here(*refused)
        assert ended.code == 2, (refused, ended.stderr)
        assert cure in ended.stderr, (refused, ended.stderr)
        ended = run_here(*mended)
        assert ended.code == 0, (refused, mended, ended.stderr)


def test_there_are_enough_cures():
    assert len(CONFIGURATIONS) + len(SOURCES) + len(COMMANDS) >= 90
