"""`[teacher]`: a store's vectors are joined by item and content, and what is missing or stale is left out and said."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import train_samples
from train_samples import metrics, training, weights

import embedder
from embedder.config import RunConfig, load_config
from embedder.errors import ConfigError, SourceError, StoreError
from embedder.executors.job import decode_spec
from embedder.ingest.embed import embed
from embedder.models.model_folder import open_model
from embedder.plugins.train import teacher as teacher_module
from embedder.plugins.train.batches import ExampleCounts, SamplerConfig
from embedder.plugins.train.examples import ExampleSpec
from embedder.plugins.train.items import list_items
from embedder.plugins.train.rank_batches import cut_shares, decode_share, take_share
from embedder.plugins.train.sampler import epoch_order
from embedder.plugins.train.teacher import COLUMNS, join_teacher
from embedder.plugins.train.train_command import train_parts
from embedder.plugins.train.train_run import train
from shards.model_config import load_model_config

COLUMN_NAMES = {"id": "sku", "image": "photo", "caption": "title"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return train_samples.table(tmp_path_factory.mktemp("pairs") / "pairs.parquet")


def embedded(source, store, model):
    """A store of the pairs' vectors."""
    config = load_config(
        overrides={
            "model": str(model),
            "store": str(store),
            "source": [{"path": str(source), "columns": COLUMN_NAMES}],
            "engine": "local",
            "device": "cpu",
            "index": {"build": False},
        }
    )
    embed(config)
    return store


@pytest.fixture(scope="module")
def store(pairs, tiny_model, tmp_path_factory):
    """The vectors of all 60 pairs."""
    return embedded(pairs, tmp_path_factory.mktemp("teacher") / "store", tiny_model)


@pytest.mark.medium
def test_the_teacher_alone_trains_a_pruned_student_the_same_each_time_and_resumed(store, pairs, tiny_model, tmp_path):
    options = {
        "model": str(tiny_model),
        "layers": "every 2nd",
        "teacher": {"store": str(store), "pairs": 0},
        "train": {"num_steps": 4},
        "validation": {"every_steps": 4},
    }
    whole = train(training(pairs, tmp_path / "a" / "run", **options))
    assert (whole.teacher.num_joined, whole.teacher.num_missing, whole.teacher.num_stale) == (whole.num_items, 0, 0)
    assert whole.teacher.dim == 24
    lines = [line for line in metrics(tmp_path / "a" / "run") if line["kind"] == "train"]
    assert all(line["loss"] == pytest.approx(line["vector_loss"] + line["similarity_loss"]) for line in lines)
    assert load_model_config(tmp_path / "a" / "run" / "last").num_layers == {"vision": 2, "text": 2}
    assert "learnt from the vectors of" in str(train_parts(whole)[0])

    config = training(pairs, tmp_path / "b" / "run", **options, checkpoint_every_s=1e-9)

    def crash(step):
        if step == 2:
            raise MemoryError("the machine went down")

    with pytest.raises(MemoryError):
        train(config, show_steps=train_samples.calling(crash))
    train(config, resume=True)
    assert weights(tmp_path / "b" / "run" / "last") == weights(tmp_path / "a" / "run" / "last")
    other = config.model_copy(update={"teacher": config.teacher.model_copy(update={"vectors": 3.0})})
    with pytest.raises(ConfigError, match=r"began with teacher\.vectors = 1"):
        train(other, resume=True)


@pytest.mark.medium
def test_items_that_the_teacher_lacks_or_has_of_another_content_are_left_out_and_counted(store, tiny_model, tmp_path):
    rows = train_samples.rows_of(range(66))  # six are new
    for row in rows[:4]:
        row["title"] = f"{row['title']}, again"  # four have changed
    source = train_samples.table(tmp_path / "pairs.parquet", rows=rows)
    options = {"model": str(tiny_model), "teacher": {"store": str(store)}, "validation": {"fraction": 0.0}}
    report = train(training(source, tmp_path / "run", **options, batch_size=20, train={"num_steps": 3}))
    found = report.teacher
    assert (found.num_joined, found.num_missing, found.num_stale) == (60, 6, 4)
    assert (report.num_items, report.num_rejected) == (60, 0)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["teacher"] == found.model_dump()


def test_a_teacher_of_other_content_alone_is_refused_with_its_cure(store, tiny_model, tmp_path):
    rows = train_samples.rows_of(range(60))
    for row in rows:
        row["title"] += ", again"
    source = train_samples.table(tmp_path / "pairs.parquet", rows=rows)
    options = {"model": str(tiny_model), "teacher": {"store": str(store)}, "validation": {"fraction": 0.0}}
    with pytest.raises(SourceError, match=r"0 of 60 items can be trained on: of \d+ the teacher's .* again"):
        train(training(source, tmp_path / "run", **options))


def test_a_teacher_that_knows_none_of_the_items_is_refused_and_leaves_nothing(store, tiny_model, tmp_path):
    source = train_samples.table(tmp_path / "pairs.parquet", rows=train_samples.rows_of(range(100, 130)))
    with pytest.raises(SourceError, match=r"none of \d+ items to train on .*'item-.*embed the same sources"):
        train(training(source, tmp_path / "run", model=str(tiny_model), teacher={"store": str(store)}))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_model_as_the_teacher_embeds_the_items_once_and_gives_the_same_student(store, pairs, tiny_model, tmp_path):
    options = {"model": str(tiny_model), "layers": [0, 3], "train": {"num_steps": 4}, "validation": {"every_steps": 4}}
    train(training(pairs, tmp_path / "a" / "run", **options, teacher={"store": str(store)}))
    config = training(pairs, tmp_path / "b" / "run", **options, teacher={"model": str(tiny_model)})
    report = train(config)
    assert report.teacher.store == str(tmp_path / "b" / "run" / "teacher")
    assert_equal_losses(metrics(tmp_path / "b" / "run"), metrics(tmp_path / "a" / "run"))  # but for last bits
    assert train(config, resume=True).teacher.version == report.teacher.version  # nothing is embedded again


@pytest.mark.slow
def test_two_workers_learn_what_one_learns_from_the_teacher(store, pairs, tiny_model, tmp_path, ray_cluster):
    options = {"model": str(tiny_model), "layers": [0, 3], "teacher": {"store": str(store)}, "train": {"num_steps": 4}}
    alone = training(pairs, tmp_path / "one", **options)
    train(alone)
    together = {"engine": "auto", "num_workers": 2, "decode": {"num_cpus": 0.5}, "no_progress_timeout_s": 150}
    train(training(pairs, tmp_path / "two", **options, **together))
    found, expected = metrics(tmp_path / "two"), metrics(tmp_path / "one")
    assert_equal_losses(found, expected)


def assert_equal_losses(found, expected):
    for name in ("loss", "vector_loss", "similarity_loss", "pair_loss"):
        values = [[line[name] for line in lines if name in line] for lines in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-5), name
    assert all(line["vector_loss"] > 1e-3 for line in expected if "vector_loss" in line), "so that the test can fail"


class ChangedStore:
    """A store whose table was changed."""

    def __init__(self, opened, change):
        self.opened, self.change = opened, change
        self.columns = [name for name in opened.columns if name in change(opened.to_arrow()).schema.names]

    def __getattr__(self, name):
        return getattr(self.opened, name)

    def to_arrow(self, columns):
        return self.change(self.opened.to_arrow(columns))


def with_first_vector(values):
    def change(table):
        vectors = table["image_embedding"].to_pylist()
        vectors[0] = values if values is None else (values + vectors[0])[: len(vectors[0])]
        place = table.schema.get_field_index("image_embedding")
        return table.set_column(place, "image_embedding", pa.array(vectors, pa.list_(pa.float32())))

    return change


def of_videos(table):
    place = table.schema.get_field_index("modality")
    return table.set_column(place, "modality", pa.array(["video"] * table.num_rows))


BAD = {
    "not a number": (with_first_vector([float("nan")]), r"image_embedding of item 'item-\d+' is not finite"),
    "zero": (with_first_vector([0.0] * 24), r"image_embedding of item 'item-\d+' is zero"),
    "videos": (of_videos, "no vector of an image or a caption to learn from, its rows are of: video"),
    "column": (lambda table: table.drop_columns(["text_embedding"]), "has no column text_embedding"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_store_that_can_teach_nothing_is_refused_in_one_line(store, pairs, tiny_model, tmp_path, monkeypatch, kind):
    change, message = BAD[kind]
    opened = ChangedStore(embedder.open_store(str(store)), change)
    monkeypatch.setattr(teacher_module, "open_store", lambda *_, **__: opened)
    options = {"model": str(tiny_model), "teacher": {"store": str(store)}, "validation": {"fraction": 0.0}}
    config = training(pairs, tmp_path / "run", **options)
    with pytest.raises((SourceError, StoreError), match=message) as error:
        train(config)
    assert "\n" not in str(error.value)


def test_vectors_are_unit_rows_beside_the_items_and_not_a_number_where_there_is_none(
    store, pairs, tiny_model, tmp_path, monkeypatch
):
    opened = ChangedStore(embedder.open_store(str(store)), with_first_vector(None))
    monkeypatch.setattr(teacher_module, "open_store", lambda *_, **__: opened)
    config = training(pairs, tmp_path / "run", model=str(tiny_model), teacher={"store": str(store)})
    joined = join_teacher(list_items(config), str(store), config.teacher).items
    table = {row["item_id"]: row for row in opened.to_arrow(list(COLUMNS)).to_pylist()}
    for item_id, row in zip(joined.listing["item_id"].to_pylist(), joined.teacher, strict=True):
        of_item = table[item_id]
        assert row.version == of_item["content_version"]
        np.testing.assert_allclose(row.caption, of_item["text_embedding"], atol=1e-6)
        assert np.isnan(row.of_caption(1)).all()
        if of_item["image_embedding"] is None:
            assert np.isnan(row.image).all()
        else:
            np.testing.assert_allclose(row.image, of_item["image_embedding"], atol=1e-6)


def test_the_share_of_a_worker_brings_the_vectors_of_its_items_and_leaves_stale_ones_out(
    store, pairs, tiny_model, tmp_path
):
    config = training(pairs, tmp_path / "run", model=str(tiny_model), teacher={"store": str(store)})
    items = join_teacher(list_items(config), str(store), config.teacher).items
    versions = items.teacher.versions.to_pylist()
    items = replace(items, teacher=replace(items.teacher, versions=pa.array(["another", *versions[1:]])))
    spec = ExampleSpec(decode_spec(RunConfig().rows, open_model(str(tiny_model))))
    order = epoch_order(items.keys, 3, 0)
    counts, found = ExampleCounts(len(items)), {}
    for number, block in enumerate(cut_shares(items, SamplerConfig(20, 1, 3), 2, epoch=0, first=0, num_epochs=1)):
        pairs_of_share = take_share(decode_share(block, spec=spec), (0, *divmod(number, 2)), 32, counts)
        found |= {pair.key: pair.teacher for pair in pairs_of_share}
    expected = dict(zip(items.keys[order].tolist(), items.take(order).teacher, strict=True))
    stale = int(items.keys[items.teacher.rows == 0][0])
    assert found.keys() == expected.keys() - {stale}
    assert len(counts.stale) == 1
    for key, row in found.items():
        np.testing.assert_array_equal(row.image, expected[key].image)
        np.testing.assert_array_equal(row.caption, expected[key].caption)
