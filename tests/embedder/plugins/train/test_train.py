"""`embedder train`: the same weights each time, exact resumption, broken pairs, what is left behind."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
import train_samples
from PIL import Image
from train_samples import calling, metrics, training, weights

import embedder
from embedder.config import load_config
from embedder.errors import ConfigError, RunFailedError, SourceError
from embedder.ingest.embed import embed
from embedder.models.model_folder import open_model
from embedder.plugins.train import loop
from embedder.plugins.train.items import list_items
from embedder.plugins.train.train_progress import from_plain
from embedder.plugins.train.train_run import train
from embedder.plugins.train.trainer.train_checkpoint import load_checkpoint
from embedder.plugins.train.trainer.train_settings import TrainSettings
from shards.model_errors import ModelError

ARCHITECTURE = {
    "embedding_dim": 16,
    "vision": {"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "num_heads": 2},
    "text": {
        "vocab_size": 60,
        "embedding_size": 8,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
    },
    "preprocess": {"image_size": 16, "max_caption_tokens": 16},
}
AUGMENTED = {"augmentation": {"rotate_deg": 10.0, "brightness": 0.2, "erase": 0.5}}


@pytest.fixture
def pairs(tmp_path):
    return train_samples.table(tmp_path / "pairs.parquet")


@pytest.mark.medium
def test_training_twice_from_nothing_gives_the_same_tokeniser_weights_and_metrics(pairs, tmp_path):
    for name in ("one", "two"):
        config = training(pairs, tmp_path / name, architecture=ARCHITECTURE, texts=["also"], train=AUGMENTED)
        report = train(config)
        assert (report.num_steps, report.num_rejected) == (12, 0)
    one, two = tmp_path / "one", tmp_path / "two"
    assert (one / "tokenizer.json").read_text() == (two / "tokenizer.json").read_text()
    assert weights(one / "last") == weights(two / "last")
    assert metrics(one) == metrics(two)
    other = training(
        pairs, tmp_path / "three", architecture=ARCHITECTURE, texts=["also"], train=AUGMENTED | {"seed": 4}
    )
    train(other)
    assert weights(one / "last") != weights(tmp_path / "three" / "last")


@pytest.mark.medium
@pytest.mark.parametrize("what", ["all", "projections"])
def test_a_stopped_run_leaves_a_model_and_resumed_it_equals_an_uninterrupted_one(pairs, tiny_model, tmp_path, what):
    options = {"model": str(tiny_model), "texts": ["also"], "train": AUGMENTED | {"what": what}}
    whole = training(pairs, tmp_path / "a" / "run", **options)
    train(whole)

    stopped = training(pairs, tmp_path / "b" / "run", **options)
    signals = {4: signal.SIGTERM, 8: signal.SIGINT}

    def on_step(step):
        if step in signals:
            os.kill(os.getpid(), signals.pop(step))

    out = tmp_path / "b" / "run"
    for resume, step in ((False, 4), (True, 8)):
        with pytest.raises(RunFailedError, match=f"after step {step} of 12.*--resume"):
            train(stopped, show_steps=calling(on_step), resume=resume)
        for folder in ("model", "last"):
            assert {file.name for file in (out / folder).iterdir()} == {
                "config.json",
                "model.safetensors",
                "tokenizer.json",
            }
    train(stopped, resume=True)
    for folder in ("model", "last"):
        assert weights(out / folder) == weights(tmp_path / "a" / "run" / folder)
    assert metrics(out) == metrics(tmp_path / "a" / "run")


@pytest.mark.medium
def test_held_out_pairs_are_counted_once_however_often_a_run_is_resumed(pairs, tiny_model, tmp_path):
    config = training(pairs, tmp_path / "out", model=str(tiny_model))
    stops, seen = {1, 2}, []
    for resume in (False, True):

        def stop(step):
            if step in stops:
                stops.remove(step)
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(RunFailedError, match="stopped on request"):
            train(config, show_steps=calling(stop), resume=resume)
        seen.append(from_plain(load_checkpoint(tmp_path / "out/checkpoint.pt")["standing"]).counts.num_seen)
    assert seen[1] - seen[0] == config.batch_size, "those of the second step"


@pytest.mark.medium
def test_a_crash_goes_back_to_the_last_checkpoint_and_no_line_of_metrics_stands_twice(pairs, tiny_model, tmp_path):
    whole = training(pairs, tmp_path / "whole", model=str(tiny_model))
    train(whole)
    crashing = training(pairs, tmp_path / "crashed", model=str(tiny_model), checkpoint_every_s=1e-9)

    def crash(step):
        if step == 8:
            raise MemoryError("the machine went down")

    with pytest.raises(MemoryError):
        train(crashing, show_steps=calling(crash))
    with pytest.raises(MemoryError):
        train(crashing.model_copy(update={"checkpoint_every_s": 1000.0}), show_steps=calling(crash), resume=True)
    train(crashing, resume=True)
    assert weights(tmp_path / "crashed" / "last") == weights(tmp_path / "whole" / "last")
    steps = [line["step"] for line in metrics(tmp_path / "crashed") if line["kind"] == "train"]
    assert steps == list(range(1, 13))


@pytest.mark.medium
def test_a_run_that_began_with_another_warm_up_keeps_it_where_none_is_set(pairs, tiny_model, tmp_path):
    """As runs of fewer than 1,000 steps did before the default followed their length: it was 100 steps."""
    settings = {"num_steps": 12, "learning_rate": 1e-3, "seed": 3}
    options = {"model": str(tiny_model), "train": settings | {"warmup_steps": 9}, "checkpoint_every_s": 1e-9}
    train(training(pairs, tmp_path / "whole", **options))

    def crash(step):
        if step == 4:
            raise MemoryError("the machine went down")

    began = training(pairs, tmp_path / "run", **options)
    with pytest.raises(MemoryError):
        train(began, show_steps=calling(crash))
    other = began.model_copy(update={"train": TrainSettings(**settings, warmup_steps=1)})
    with pytest.raises(ConfigError, match=r"began with train\.warmup_steps = 9"):
        train(other, resume=True)
    unset = began.model_copy(update={"train": TrainSettings(**settings)})
    assert unset.train.warmup_steps == 1
    train(unset, resume=True)
    assert weights(tmp_path / "run" / "last") == weights(tmp_path / "whole" / "last")


@pytest.mark.medium
def test_decoding_anew_in_each_epoch_gives_the_weights_of_a_run_that_keeps_pictures_in_memory(
    pairs, tiny_model, tmp_path
):
    picture_bytes = 32 * 32 * 3 + 4 * 10
    reports = [
        train(training(pairs, tmp_path / str(size), model=str(tiny_model), cache_bytes=size))
        for size in (0, 10 * picture_bytes, 1 << 30)
    ]
    assert reports[0].num_cached == 0
    assert 8 <= reports[1].num_cached <= 11
    assert reports[2].num_cached == reports[2].num_items == 60 - reports[2].num_held_out
    found = {weights(tmp_path / str(size) / "last") for size in (0, 10 * picture_bytes, 1 << 30)}
    assert len(found) == 1


@pytest.mark.slow
def test_ray_and_the_local_engine_train_the_same_weights(pairs, tiny_model, tmp_path, ray_cluster):
    changes = {"decode": {"items_per_task": 5}, "model": str(tiny_model), "cache_bytes": 0}
    for engine in ("local", "ray"):
        report = train(training(pairs, tmp_path / engine, engine=engine, **changes))
        assert (report.engine, report.num_steps) == (engine, 12)
    assert weights(tmp_path / "ray" / "last") == weights(tmp_path / "local" / "last")
    assert metrics(tmp_path / "ray") == metrics(tmp_path / "local")


@pytest.mark.slow
def test_training_runs_where_ray_is_not_installed(pairs, tiny_model, tmp_path):
    config = training(pairs, tmp_path / "out", model=str(tiny_model), engine="auto")
    code = """
import pickle, sys
sys.modules["ray"] = None  # as if it weren't there: importing it fails
from embedder.plugins.train import decode_stream
from embedder.plugins.train.train_command import step_bar
from embedder.plugins.train.train_progress import from_plain
from embedder.plugins.train.train_run import train
from embedder.plugins.train.trainer.train_checkpoint import load_checkpoint
from embedder.plugins.train.trainer.train_settings import TrainSettings
decode_stream.IMAGE_DECODE_S = 1e3  # so slow that `auto` would take Ray
report = train(pickle.load(sys.stdin.buffer), show_steps=step_bar)
assert (report.engine, report.engine_reason, report.num_steps) == ("local", "Ray is not installed", 12), report
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=pickle.dumps(config), capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    train(training(pairs, tmp_path / "here", model=str(tiny_model)))
    assert weights(tmp_path / "out" / "last") == weights(tmp_path / "here" / "last")


@pytest.mark.medium
def test_a_broken_pair_is_rejected_and_counted_and_training_goes_on(tiny_model, tmp_path):
    rows = train_samples.rows_of(range(60))
    rows[7]["photo"] = b"\x89PNG\r\n\x1a\n broken"
    rows[8]["title"] = None
    rows[9]["photo"] = None
    source = train_samples.table(tmp_path / "pairs.parquet", rows=rows)
    config = training(source, tmp_path / "out", model=str(tiny_model), max_reject_fraction=0.02)
    report = train(config)
    assert (report.num_rejected, report.num_unpaired, report.num_steps) == (1, 2, 12)
    (reject,) = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert (reject["item_id"], reject["step"]) == ("item-007", "decode")
    assert reject["error"]


@pytest.mark.medium
def test_too_many_broken_pairs_end_the_run_and_name_the_cure(tiny_model, tmp_path):
    rows = train_samples.rows_of(range(60))
    for row in rows[:6]:
        row["photo"] = b"no picture"
    source = train_samples.table(tmp_path / "pairs.parquet", rows=rows)
    with pytest.raises(RunFailedError, match=r"6 of .* items rejected.*rejects\.jsonl.*max_reject_fraction"):
        train(training(source, tmp_path / "out", model=str(tiny_model)))
    changes = {"model": str(tiny_model), "max_reject_fraction": 0.2}
    assert train(training(source, tmp_path / "out", **changes), resume=True).num_rejected == 6


@pytest.mark.medium
def test_a_run_that_too_many_broken_pairs_end_within_an_epoch_goes_on_with_the_next_batch(
    tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "MIN_SEEN", 20)
    rows = train_samples.rows_of(range(60))
    for row in rows[:6]:
        row["photo"] = b"no picture"
    source = train_samples.table(tmp_path / "pairs.parquet", rows=rows)
    options = {"model": str(tiny_model), "validation": {"every_steps": 2}}
    with pytest.raises(RunFailedError, match="max_reject_fraction"):
        train(training(source, tmp_path / "out", **options))
    options["max_reject_fraction"] = 0.2
    train(training(source, tmp_path / "out", **options), resume=True)
    train(training(source, tmp_path / "whole", **options))
    assert weights(tmp_path / "out" / "last") == weights(tmp_path / "whole" / "last")


@pytest.mark.medium
def test_clips_are_rejected_not_trained_on(tiny_model, tmp_path):
    folder = samples.folder(tmp_path / "in", num_images=20, num_clips=1)
    config = training(folder, tmp_path / "out", model=str(tiny_model), source=[{"path": str(folder)}], batch_size=4)
    config = config.model_copy(update={"max_reject_fraction": 0.2})
    report = train(config)
    assert (report.num_rejected, report.num_unpaired) == (1, 10)


@pytest.mark.medium
def test_items_that_are_all_without_a_caption_end_the_run(tiny_model, tmp_path):
    rows = [row | {"title": None} for row in train_samples.rows_of(range(30))]
    source = train_samples.table(tmp_path / "pairs.parquet", rows=rows)
    with pytest.raises(SourceError, match="0 of .* items with both"):
        train(training(source, tmp_path / "out", model=str(tiny_model)))


def test_a_fresh_model_without_any_caption_is_refused_in_a_line(tmp_path):
    rows = [row | {"title": None, "tags": []} for row in train_samples.rows_of(range(8))]
    source = train_samples.table(tmp_path / "pairs.parquet", rows=rows)
    with pytest.raises(SourceError, match="no item has a caption; name"):
        train(training(source, tmp_path / "out", architecture=ARCHITECTURE, tag_sets=["tags"]))


def test_a_tokeniser_that_is_no_text_is_named_in_a_line(pairs, tiny_model, tmp_path):
    bad, message = tmp_path / "tokenizer.json", r"tokenizer\.json: this is not UTF-8; give a tokenizer\.json"
    bad.write_bytes(b"\xff\xfe{")
    with pytest.raises(ModelError, match=message):
        train(training(pairs, tmp_path / "out", architecture=ARCHITECTURE, tokenizer=str(bad)))
    model = shutil.copytree(tiny_model, tmp_path / "model")
    shutil.copyfile(bad, model / "tokenizer.json")
    with pytest.raises(ModelError, match=message):
        open_model(str(model))


def test_captions_of_more_characters_than_the_vocabulary_name_the_key_to_raise(tmp_path):
    rows = [row | {"title": chr(0x4E00 + place)} for place, row in enumerate(train_samples.rows_of(range(80)))]
    source = train_samples.table(tmp_path / "pairs.parquet", rows=rows)
    config = training(source, tmp_path / "out", architecture=ARCHITECTURE, validation={"fraction": 0})
    with pytest.raises(ConfigError, match=r"text\.vocab_size = 60: .* 86 tokens .*; raise it to 86 at least"):
        train(config)


@pytest.mark.medium
def test_an_attempt_that_took_no_step_leaves_no_tokeniser_to_the_next(pairs, tmp_path):
    """It may have been killed while held-out items were decoded, and begun with other captions or another size."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}))
    config = training(pairs, tmp_path, architecture=ARCHITECTURE, train={"num_steps": 1, "warmup_steps": 0})
    train(config)
    assert "square" in (tmp_path / "tokenizer.json").read_text()


@pytest.mark.medium
def test_a_run_learns_and_keeps_the_model_that_was_best_on_held_out_pictures(tiny_model, tmp_path):
    source = train_samples.table(tmp_path / "pairs.parquet", 180)
    held_out = train_samples.table(tmp_path / "held_out.parquet", rows=train_samples.rows_of(range(1000, 1060)))
    columns = {"id": "sku", "image": "photo", "caption": "title"}
    sources = [{"path": str(path), "name": name, "columns": columns} for path, name in ((source, "a"), (held_out, "b"))]
    config = training(
        source,
        tmp_path / "out",
        model=str(tiny_model),
        source=sources,
        concept="colour",
        batch_size=30,
        train={"num_steps": 90, "warmup_steps": 10, "learning_rate": 3e-3, "ema_decay": 0.9},
        validation={"source": "b", "every_steps": 15},
    )
    report = train(config)
    assert (report.num_items, report.num_held_out) == (180, 60)
    assert report.best["num_queries"] == 6, "a text counts once a concept"
    assert report.best["r_at_1"] >= 0.8
    validations = [line for line in metrics(tmp_path / "out") if line["kind"] == "validation"]
    assert max(line["r_at_10"] for line in validations) == report.best["r_at_10"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["best"] == report.best
    with Image.open(tmp_path / "out" / "curves.png") as picture:
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 20

    run = load_config(
        overrides={
            "model": report.model,
            "store": str(tmp_path / "store"),
            "source": [{"path": str(held_out), "columns": columns}],
            "engine": "local",
        }
    )
    assert embed(run).published
    hits = embedder.open_store(run.store).search("a blue square", k=5)
    blue = {row["sku"] for row in train_samples.rows_of(range(1000, 1060)) if row["colour"] == "blue"}
    assert {hit.item_id for hit in hits} <= blue


@pytest.mark.medium
@pytest.mark.parametrize(("what", "num_runs"), [("all", 384), ("projections", 96)])
def test_projections_only_runs_each_image_through_the_towers_once(tmp_path, monkeypatch, what, num_runs):
    """Whence an epoch is many times faster."""
    from embedder.plugins.train.trainer import trainer

    rows = []
    run = trainer.image_features
    monkeypatch.setattr(
        trainer, "image_features", lambda towers, *rest: rows.append(len(rest[0])) or run(towers, *rest)
    )
    source = train_samples.table(tmp_path / "pairs.parquet", 96)
    settings = {"num_steps": 12, "warmup_steps": 0, "what": what}
    out = tmp_path / "out"
    # It would be measured on held-out images, too.
    held_out = {"fraction": 0.0}
    train(training(source, out, architecture=ARCHITECTURE, batch_size=32, train=settings, validation=held_out))
    assert sum(rows) == num_runs
    assert [line["num_images"] for line in metrics(out)] == [32] * 12


@pytest.mark.medium
def test_a_resumption_with_other_settings_or_items_is_refused(pairs, tiny_model, tmp_path):
    options = {"model": str(tiny_model), "train": {"num_steps": 2, "warmup_steps": 0}}
    train(training(pairs, tmp_path / "out", **options))
    with pytest.raises(ConfigError, match="a run is there already; continue with --resume"):
        train(training(pairs, tmp_path / "out", **options))
    with pytest.raises(ConfigError, match="batch_size = 16, and now it is 8"):
        train(training(pairs, tmp_path / "out", **options | {"batch_size": 8}), resume=True)
    train_samples.table(pairs, 61)
    with pytest.raises(ConfigError, match="items"):
        train(training(pairs, tmp_path / "out", **options), resume=True)
    with pytest.raises(ConfigError, match="no checkpoint to resume"):
        train(training(pairs, tmp_path / "new", **options), resume=True)


def test_a_column_or_a_layer_that_is_not_there_is_named(pairs, tiny_model, tmp_path):
    with pytest.raises(SourceError, match="color"):
        train(training(pairs, tmp_path / "out", model=str(tiny_model), concept="color"))
    layers = {"what": "layers", "vision_layers": [3, 40]}
    with pytest.raises(ConfigError, match=r"vision_layers = \[3, 40\].*has 4 such layers"):
        train(training(pairs, tmp_path / "out", model=str(tiny_model), train=layers))
    with pytest.raises(SourceError, match="single value"):
        train(training(pairs, tmp_path / "out", model=str(tiny_model), concept="tags"))
    assert not (tmp_path / "out").exists()


def test_items_without_an_own_concept_column_value_stay_apart(tmp_path):
    rows = train_samples.rows_of(range(4))
    rows[0]["colour"] = rows[1]["colour"] = None
    rows[2]["colour"] = rows[3]["colour"] = "item-000"
    source = train_samples.table(tmp_path / "pairs.parquet", rows=rows)
    concepts = list_items(training(source, tmp_path / "out", model="m", concept="colour")).concepts
    assert concepts[2] == concepts[3]
    by_caption = list_items(training(source, tmp_path / "out", model="m", concept="caption")).concepts
    assert len(set(by_caption.tolist())) == 4
    assert len(set(concepts.tolist())) == 3
    assert isinstance(concepts.tolist()[0], int)
    assert pa.array(concepts).type == pa.int64()


@pytest.mark.parametrize("value", ["", " ", float("nan")])
def test_items_whose_concept_is_blank_or_not_a_number_stay_apart(tmp_path, value):
    concepts = list_items(training(concept_table(tmp_path, [value] * 3), tmp_path / "out", model="m", concept="set"))
    assert len(set(concepts.concepts.tolist())) == 3


def test_concepts_that_are_no_text_are_refused_in_a_line(tmp_path):
    source = concept_table(tmp_path, [b"\xff\xfe", b"\xfe\xff"])
    with pytest.raises(SourceError, match="concept column 'set' is binary; name one with a single value in each row"):
        list_items(training(source, tmp_path / "out", model="m", concept="set"))


def concept_table(folder, values):
    """A table of pairs with the column `set`."""
    rows = pa.Table.from_pylist(train_samples.rows_of(range(len(values))), train_samples.SCHEMA)
    pq.write_table(rows.append_column("set", pa.array(values)), folder / "pairs.parquet")
    return folder / "pairs.parquet"


CONFIG = """
model = "{model}"
out = "{out}"
batch_size = 8
engine = "local"
num_threads = 1
checkpoint_every_s = 1000.0
[train]
num_steps = 100000
[validation]
every_steps = 100000
[[source]]
path = "{source}"
columns = {{ id = "sku", image = "photo", caption = "title" }}
"""


@pytest.mark.slow
def test_ctrl_c_on_the_command_line_leaves_a_model_that_other_commands_accept(
    pairs, tiny_model, tmp_path, run_embedder
):
    out = tmp_path / "out"
    (tmp_path / "train.toml").write_text(CONFIG.format(model=tiny_model, out=out, source=pairs))
    command = [sys.executable, "-m", "embedder", "train", str(tmp_path / "train.toml"), "--set", "train.seed=5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped on request after step" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert {path.name for path in out.iterdir()} >= {"model", "last", "checkpoint.pt", "curves.png", "metrics.jsonl"}
    code, info, stderr = run_embedder("model", "info", out / "model", "--json")
    assert code == 0, stderr
    assert info["config"]["trained"] is True
    num_steps = max(line["step"] for line in metrics(out))
    settings = ["--set", "train.seed=5", "--set", "train.num_steps=200000"]
    code, _, stderr = run_embedder("train", tmp_path / "train.toml", "--resume", *settings)
    assert (code, num_steps > 0) == (2, True)
    assert "began with train.num_steps = 100_000, and now it is 200_000" in stderr
