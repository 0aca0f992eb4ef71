"""A command that refuses writes nothing at all: every file is afterwards as it was before."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from command_runs import run_here
from store_samples import INFO, publish_rows, row
from store_states import no_index, publish_refresh, rows_now

from embedder.config import load_config
from embedder.ingest.embed import embed
from embedder.store.files import StoreFiles
from embedder.store.journal.refusals import rollback_on_mistake, snapshot_files
from embedder.store.layout import read_current
from embedder.store.lock import write_lock
from embedder.store.maintenance.compact import compact
from embedder.store.publish.current import begin
from embedder.store.publish.history import publications
from embedder.store.store_errors import StoreUnwritableError
from embedder.store.store_info import bind_store

RUN = 'model = "{model}"\nengine = "local"\n[[source]]\npath = "photos"\n'
CONFIGS = {
    "unknown.toml": 'modle = "x"',
    "no toml.toml": "model =",
    "no source.toml": 'store = "new"\nmodel = "{model}"',
    "gone.toml": 'store = "new"\nmodel = "{model}"\n[[source]]\npath = "gone"',
    "gone of store.toml": 'store = "store"\nmodel = "{model}"\nmetrics_file = ""\n[[source]]\npath = "gone"',
    "nightly.toml": 'store = "store"\n' + RUN,
    "gpus.toml": RUN + "[[stage]]\nnum_gpus = 4\n" * 3,
    "gpus and more.toml": RUN.replace("photos", "more") + "[[stage]]\nnum_gpus = 4\n" * 3,
    "cpus.toml": RUN.replace("local", "ray") + "[[stage]]\nnum_cpus = 640\n" * 3,
    "files.toml": RUN + 'carryover = ["price"]',
    "patterns.toml": RUN + 'include = [""]',
    "tars.toml": RUN.replace("photos", "table.parquet")
    + 'include = ["*.jpg"]\ncolumns = {{ id = "id", image = "image" }}',
    "train.toml": 'out = "trained"\nmodel = "{model}"\n[[source]]\npath = "photos"\n[train]\nwhat = "layers"\n'
    "vision_layers = [0, 99]\n",
    "train gone.toml": 'out = "trained"\nmodel = "gone/x/y"\n[[source]]\npath = "photos"',
}
NEW = ("--store", "new/deep/store")
MODEL = ("--model", "{model}")
STORE_COMMANDS = (
    "search words", "index build", "index update", "index status", "index rollback", "evaluate", "rejects", "history",
    "rollback", "vacuum", "compact", "purge some-id", "purge --allow-again some-id", "migrate",
)  # fmt: skip
COMMANDS = {
    "store is the source": ("embed", "photos", *MODEL, "--store", "photos"),
    "store is the source, said otherwise": ("embed", "photos/", *MODEL, "--store", "photos/../photos"),
    "no source": ("embed", "gone", *MODEL, *NEW),
    "empty source": ("embed", "empty", *MODEL, *NEW),
    "nothing but other files": ("embed", "papers", *MODEL, *NEW),
    "no model": ("embed", "photos", *NEW),
    "missing model": ("embed", "photos", "--model", "gone/x/y", *NEW),
    "a file as model": ("embed", "photos", "--model", "papers/a.pdf", *NEW),
    "no store": ("embed", "photos", *MODEL),
    "unknown key": ("embed", "photos", *MODEL, *NEW, "--set", "colour=red"),
    "value out of range": ("embed", "photos", *MODEL, *NEW, "--set", "max_reject_fraction=2"),
    "missing plan": ("embed", "photos", *MODEL, *NEW, "--plan", "gone.json"),
    "no plan": ("embed", "photos", *MODEL, *NEW, "--plan", "papers/a.pdf"),
    "wrong kind": ("embed", "photos", *MODEL, *NEW, "--kind", "tables"),
    "no such column": ("embed", "table.parquet", *MODEL, *NEW, "--id-column", "sku", "--image-column", "image"),
    "a type that no table keeps": (
        "embed", "table.parquet", *MODEL, *NEW, "--id-column", "id", "--image-column", "image", "--carryover", "span",
    ),
    "too many GPUs": ("embed", "--config", "gpus.toml", *NEW),
    "too many CPUs": ("embed", "--config", "cpus.toml", *NEW),
    "too many GPUs for a new run of a store": ("embed", "--config", "gpus and more.toml", "--store", "store"),
    "carryover of files": ("embed", "--config", "files.toml", *NEW),
    "empty pattern": ("embed", "--config", "patterns.toml", *NEW),
    "patterns of a table": ("embed", "--config", "tars.toml", *NEW),
    "another segment length": ("embed", "photos", *MODEL, "--store", "store", "--set", "segment_s=9"),
    "a store that another scheme names": ("embed", "photos", *MODEL, "--store", "ftp://host/x"),
    "unknown guard": ("refresh", "nightly.toml", "--force", "everything"),
    "missing file": ("refresh", "gone-config.toml"),
    **{f"refresh {name}": ("refresh", name) for name in CONFIGS if name not in ("nightly.toml", "cpus.toml")},
    "training of layers that are not there": ("train", "train.toml"),
    "training of no model": ("train", "train gone.toml"),
    "resumed training of nothing": ("train", "train.toml", "--resume"),
    "plan of no model": ("plan", "--model", "gone/x/y", "--out", "plan.json"),
    "import of nothing": ("model", "import", "gone", "--out", "imported"),
    "import of a folder of pictures": ("model", "import", "photos", "--out", "imported"),
    "delta of nothing": ("model", "apply-delta", "{model}", "gone", "--out", "applied"),
    "verify of no model": ("verify", "--model", "gone/x/y"),
    "rollback to no run": ("rollback", "20200101T000000Z-aaaa", "--store", "store"),
    "search in no version": ("search", "words", "--store", "store", "--version", "20200101T000000Z-aaaa"),
    "search with a wrong condition": ("search", "words", "--store", "store", "--where", "a = 3", "--sheet", "s.png"),
    "rejects of no run": ("rejects", "--store", "store", "--run", "20200101T000000Z-aaaa"),
    **{
        f"{command} on {place}": (*command.split(), "--store", place)
        for command in STORE_COMMANDS for place in ("nowhere", "photos", "papers/a.pdf")
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_model):
    """Photographs, papers, a table, a published store, and configurations of all kinds."""
    root = tmp_path_factory.mktemp("world")
    samples.folder(root / "photos", num_images=3)
    (root / "more").mkdir()
    (root / "more" / "new.png").write_bytes(samples.image_bytes(9))
    (root / "empty").mkdir()
    (root / "papers").mkdir()
    (root / "papers" / "a.pdf").write_bytes(b"%PDF-1.4")
    span = pa.array([1, 2], pa.duration("s"))
    pq.write_table(
        pa.table({"id": ["a", "b"], "image": [samples.image_bytes(1)] * 2, "span": span}), root / "table.parquet"
    )
    for name, text in CONFIGS.items():
        (root / name).write_text(text.format(model=tiny_model))
    source = [{"path": str(root / "photos")}]
    config = {"model": str(tiny_model), "store": str(root / "store"), "source": source, "engine": "local"}
    embed(load_config(overrides=config))
    yield root
    shutil.rmtree(root)


def tree(root):
    return {path.relative_to(root): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_refused_command_changes_no_file(world, tiny_model, monkeypatch, name):
    monkeypatch.chdir(world)
    before = tree(world)
    ended = run_here(*(word.format(model=tiny_model) for word in COMMANDS[name]))
    assert ended.code == 2, ended.stderr
    assert ended.stderr.strip(), "it says why"
    after = tree(world)
    assert after.keys() ^ before.keys() == set()
    assert [path for path in before if before[path] != after[path]] == []


def test_the_operators_files_that_the_user_named_tell_of_a_refusal(world, tmp_path, monkeypatch):
    monkeypatch.chdir(world)
    files = [f"runs_file={tmp_path}/runs.jsonl", f"log_file={tmp_path}/log", f"metrics_file={tmp_path}/m.prom"]
    ended = run_here("refresh", "gone of store.toml", *(word for file in files for word in ("--set", file)))
    assert ended.code == 2
    assert all("gone" in (tmp_path / name).read_text() for name in ("runs.jsonl", "log"))
    assert 'embedder_run_exit_code{kind="refresh",store="' in (tmp_path / "m.prom").read_text()


def test_a_disk_that_fills_up_after_the_first_publication_takes_nothing_of_it(tmp_path):
    files = StoreFiles(tmp_path / "store")
    full = rollback_on_mistake(files, snapshot_files(files))
    with pytest.raises(StoreUnwritableError), write_lock(files), full:
        bind_store(files, INFO)
        publish_rows(files, row("a.jpg"))
        begin(files, "compaction", read_current(files))
        raise StoreUnwritableError("no space left")
    assert {item for item, _ in rows_now(files)} == {"a.jpg"}


def test_a_mistake_after_a_compaction_leaves_the_record_of_what_it_published(tmp_path):
    files = StoreFiles(tmp_path / "store")
    bind_store(files, INFO)
    full = rollback_on_mistake(files, snapshot_files(files))
    with pytest.raises(StoreUnwritableError), write_lock(files), full:
        for name in ("a.jpg", "b.jpg"):
            publish_refresh(files, row(name))
        compact(files, choose_index=no_index)
        raise StoreUnwritableError("no space left")
    assert [each.kind for each in publications(files)] == ["refresh", "refresh", "compaction"]
