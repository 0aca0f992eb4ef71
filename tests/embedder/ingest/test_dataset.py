"""`embed_dataset`: rows of any Ray dataset in a store, each once, and what is left of them."""

import os
import re
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from embedding_runs import assert_same_vectors, embedded
from refresh_runs import items_of, rows_of

import embedder
from embedder.config import load_config
from embedder.errors import ArgumentTypeError, ConfigError, RunFailedError, SourceError

NUM = 10
IMAGE = {"id": "sku", "image": "photo", "caption": "title"}


@pytest.fixture
def settings(tiny_model, tmp_path):
    """A configuration without a source."""

    def make(store="store", **changes):
        keys = {"model": str(tiny_model), "store": str(tmp_path / store), "engine": "local", "rows_per_part": 3}
        return load_config(overrides=keys | changes)

    return make


def records(numbers=range(NUM), **changed):
    """Rows of a catalogue: pictures by number, every second one with a caption; changed values by number."""
    rows = []
    for number in numbers:
        title = samples.SENTENCES[number] if number % 2 == 0 else None
        row = {
            "sku": number,
            "photo": samples.image_bytes(number),
            "title": title,
            "price": number / 2,
            "page": b"p" * 99,
        }
        rows.append(row | changed.get(f"n{number}", {}))
    return rows


def of(ray, rows, blocks=3):
    return ray.data.from_arrow(pa.Table.from_pylist(rows)).repartition(blocks)


def left_in(config):
    """Files of pictures that runs have left in the store."""
    return list(Path(config.store).glob("runs/*/input/*"))


@pytest.mark.medium
def test_rows_of_a_dataset_get_the_vectors_that_those_of_a_table_get(settings, make_run, tmp_path, ray_cluster):
    config = settings()
    report = embedder.embed_dataset(of(ray_cluster, records()), config, **IMAGE, carryover=["price"], name="shop")
    found = rows_of(config)
    assert (report.num_new, report.num_vectors, report.published) == (NUM, NUM, True)
    pq.write_table(pa.Table.from_pylist(records()), tmp_path / "shop.parquet")
    source = {"path": str(tmp_path / "shop.parquet"), "name": "shop", "columns": IMAGE, "carryover": ["price"]}
    _, expected = embedded(make_run([source], store=str(tmp_path / "other")))
    assert_same_vectors(found, expected, same=("caption", "modality", "content_version"))
    for (item_id, _), row in found.items():
        number = int(item_id.removeprefix("shop:"))
        assert (row["price"], row["uri"]) == (number / 2, f"dataset:shop/{number}")
        assert "page" not in row, "no column is carried that is not asked for"
        assert "photo" not in row
    assert {item["source"] for item in items_of(config).values()} == {"shop"}
    assert left_in(config) == []
    (hit,) = embedder.open_store(config.store).search(np.array(found["shop:7", 0]["image_embedding"]), k=1)
    assert hit.item_id == "shop:7"


@pytest.mark.medium
def test_a_later_call_embeds_what_changed_and_only_retires_what_it_may(settings, make_run, tmp_path, ray_cluster):
    config = settings(max_retire_fraction=0.5)
    folder = samples.folder(tmp_path / "in", num_images=3)
    embedder.embed(make_run([{"path": str(folder), "name": "folder"}]))
    shop = {**IMAGE, "carryover": ["price"], "name": "shop"}
    with pytest.raises(Exception, match="price"):  # the store's table has no such column
        embedder.embed_dataset(of(ray_cluster, records()), config, **shop)
    shop = {**IMAGE, "name": "shop"}
    assert embedder.embed_dataset(of(ray_cluster, records()), config, **shop).num_new == NUM
    before = rows_of(config)
    again = embedder.embed_dataset(of(ray_cluster, records()[::-1], blocks=5), config, **shop)
    assert (again.num_unchanged, again.num_new, again.published) == (NUM, 0, False)
    rows = records(range(1, NUM), n3={"photo": samples.image_bytes(77)}, n4={"title": "a new title"})
    report = embedder.embed_dataset(of(ray_cluster, rows), config, **shop)
    after = rows_of(config)
    assert (report.num_changed, report.num_new, report.num_retired) == (2, 0, 0)
    assert after.keys() == before.keys(), "what the dataset lacks stays"
    changed = {key for key in before if after[key] != before[key]}
    assert changed == {("shop:3", 0), ("shop:4", 0)}
    assert embedder.embed_dataset(of(ray_cluster, rows), config, **shop, retire=True).num_retired == 1
    assert before.keys() - rows_of(config).keys() == {("shop:0", 0)}, "and none of the folder's"
    with pytest.raises(RunFailedError, match="guard retire"):
        embedder.embed_dataset(of(ray_cluster, rows[:1]), config, **shop, retire=True)
    assert left_in(config) == []


@pytest.mark.medium
def test_a_column_that_changed_alone_is_written_anew_and_its_vectors_stay(settings, ray_cluster):
    config = settings()
    shop = {**IMAGE, "carryover": ["price"]}
    embedder.embed_dataset(of(ray_cluster, records()), config, **shop, uri=None)
    before = rows_of(config)
    report = embedder.embed_dataset(of(ray_cluster, records(n5={"price": 99.0})), config, **shop)
    after = rows_of(config)
    assert (report.num_equal, report.num_changed, report.num_unchanged) == (1, 1, NUM - 1)
    assert after == before | {("5", 0): before["5", 0] | {"price": 99.0}}


@pytest.mark.medium
def test_arrays_addresses_and_captions_alone_are_items_too(settings, tmp_path, ray_cluster):
    arrays = [np.asarray(samples.make_image(number)) for number in range(4)]
    config = settings("arrays")
    dataset = ray_cluster.data.from_numpy(np.stack(arrays)).add_column("sku", lambda batch: [0] * len(batch))
    numbered = ray_cluster.data.from_items([{"sku": str(n), "photo": array} for n, array in enumerate(arrays)])
    embedder.embed_dataset(numbered, config, id="sku", image="photo")
    of_arrays = rows_of(config)
    by_content = settings("content")
    embedder.embed_dataset(dataset, by_content, image="data")
    vectors = [row["image_embedding"] for row in rows_of(by_content).values()]
    assert sorted(vectors) == sorted(row["image_embedding"] for row in of_arrays.values())
    paths = []
    for number in range(4):
        paths.append(tmp_path / f"{number}.png")
        paths[-1].write_bytes(samples.image_bytes(number))
    config = settings("addresses")
    rows = [{"where": str(path), "title": None} for path in paths]
    rows += [{"where": None, "title": "two cats sleep in the sun"}]
    embedder.embed_dataset(ray_cluster.data.from_items(rows), config, image="where", caption="title")
    found = rows_of(config)
    by_path = {row["uri"]: row for row in found.values()}
    for number, path in enumerate(paths):
        assert by_path[str(path)]["item_id"] == str(path)
        assert np.allclose(
            by_path[str(path)]["image_embedding"], of_arrays[str(number), 0]["image_embedding"], atol=1e-6
        )
    (text,) = [row for row in found.values() if row["modality"] == "text"]
    assert (text["caption"], text["image_embedding"]) == ("two cats sleep in the sun", None)
    (shown,) = embedder.open_store(config.store).search(paths[2], k=1).thumbnails()
    assert shown.shape[-1] == 3, "of addresses, hits can be shown"


@pytest.mark.medium
def test_a_column_of_addresses_is_what_hits_show(settings, tmp_path, ray_cluster):
    rows = [row | {"at": f"https://shop.example/{row['sku']}.png"} for row in records(range(3))]
    config = settings()
    embedder.embed_dataset(of(ray_cluster, rows), config, **IMAGE, uri="at")
    assert {row["uri"] for row in rows_of(config).values()} == {row["at"] for row in rows}
    assert {row["uri"] for row in items_of(config).values()} == {row["at"] for row in rows}


@pytest.mark.medium
def test_a_broken_row_is_a_reject_of_its_own(settings, ray_cluster):
    rows = records(
        n1={"photo": b"no picture"},
        n3={"photo": None, "title": None},
        n5={"sku": None},
        n8={"sku": 9},  # twice: n9 has it, too
    )
    config = settings(max_reject_fraction=0.9)
    report = embedder.embed_dataset(of(ray_cluster, rows), config, **IMAGE)
    items = items_of(config)
    assert (report.num_rejected, len(items)) == (4, NUM)
    errors = {item["error_type"]: item["item_id"] for item in items.values() if item["error_type"]}
    assert errors.keys() == {"UnknownKind", "Empty", "NullId", "DuplicateId"}
    assert (errors["UnknownKind"], errors["Empty"], errors["DuplicateId"]) == ("1", "3", "9#duplicate-1")
    assert sorted(int(key[0]) for key in rows_of(config)) == [0, 2, 4, 6, 7, 9]
    again = embedder.embed_dataset(of(ray_cluster, rows[::-1], blocks=7), config, **IMAGE)
    assert (again.num_new, again.num_changed) == (0, 0), "of the two, it is always the same one"


@pytest.mark.medium
def test_equal_content_is_one_item_where_nothing_else_tells_rows_apart(settings, ray_cluster):
    config = settings()
    rows = [*records(range(4)), *records([1, 2])]
    report = embedder.embed_dataset(of(ray_cluster, rows), config, image="photo")
    assert (report.num_new, len(rows_of(config))) == (4, 4)
    assert embedder.embed_dataset(of(ray_cluster, rows[::-1]), config, image="photo").num_unchanged == 4


@pytest.mark.medium
def test_a_dataset_that_gives_other_pictures_the_second_time_loses_none_silently(settings, ray_cluster):
    config = settings(max_reject_fraction=1.0)
    dataset = of(ray_cluster, [{"sku": 1, "salt": 0}]).map(lambda row: row | {"photo": secrets.token_bytes(99)})
    report = embedder.embed_dataset(dataset, config, id="sku", image="photo")
    assert (report.num_rejected, report.num_vectors) == (1, 0)
    (item,) = items_of(config).values()
    assert (item["error_type"], item["state"]) == ("DatasetChanged", "rejected")
    assert "dataset.materialize()" in item["error"]


@pytest.mark.medium
def test_joined_captions_reach_the_rows_of_a_dataset(settings, tmp_path, ray_cluster):
    pq.write_table(pa.table({"sku": range(NUM), "text": [f"number {n}" for n in range(NUM)]}), tmp_path / "t.parquet")
    join = {"path": str(tmp_path / "t.parquet"), "on": {"id": "sku"}, "caption": "text", "source": "shop"}
    config = settings(join=[join])
    embedder.embed_dataset(of(ray_cluster, records()), config, **IMAGE, name="shop")
    found = {key[0]: row["caption"] for key, row in rows_of(config).items()}
    assert found == {f"shop:{number}": f"number {number}" for number in range(NUM)}
    assert all(row["image_embedding"] and row["text_embedding"] for row in rows_of(config).values())


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"id": "sku"}, ConfigError, "neither image nor caption names a column"),
        ({"image": "foto"}, SourceError, "image: there is no column 'foto'; it has sku, photo"),
        (
            {"image": "photo", "caption": "price"},
            SourceError,
            "caption='price' is a column of double; it must be strings",
        ),
        (
            {"image": "photo", "id": "price"},
            SourceError,
            "id='price' is a column of double; it must be strings or integers",
        ),
        ({"image": "photo", "carryover": ["caption"]}, SourceError, "carryover 'caption' is already a column"),
        ({"image": "photo", "carryover": ["price", "price"]}, SourceError, "carryover names 'price' twice"),
        ({"image": "photo", "carryover": "cost"}, SourceError, "carryover: there is no column 'cost'"),
        ({"image": "photo", "name": "a b"}, ConfigError, "name='a b': letters, digits"),
        ({"image": 3}, ArgumentTypeError, "embed_dataset: image: found int"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_a_store_is_made(settings, ray_cluster, columns, error, message):
    config = settings()
    with pytest.raises(error) as caught:
        embedder.embed_dataset(ray_cluster.data.from_items(records()), config, **columns)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path(config.store).exists()


def test_types_that_only_the_rows_tell_are_told_in_one_line_too(settings, ray_cluster):
    dataset = ray_cluster.data.from_items(records()).map(lambda row: row)  # its schema is not known
    with pytest.raises(SourceError, match=r"^dataset: caption='price' is a column of double"):
        embedder.embed_dataset(dataset, settings(), image="photo", caption="price")
    with pytest.raises(SourceError, match="dataset: it has no row"):
        embedder.embed_dataset(dataset.filter(lambda row: False), settings(), image="photo")
    with pytest.raises(ArgumentTypeError, match="a dataset of Ray Data"):
        embedder.embed_dataset(records(), settings(), image="photo")


KILLED = """
    import sys, ray, embedder
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = embedder.load_config(sys.argv[1])
    dataset = ray.data.read_parquet(sys.argv[2], override_num_blocks=4)
    report = embedder.embed_dataset(dataset, config, id="sku", image="photo", caption="title", carryover=["price"])
    print(report.num_vectors)
"""


@pytest.mark.slow
def test_a_killed_call_is_gone_on_with_by_the_same_call_exactly(settings, tiny_model, tmp_path, starts_ray):
    count, shop, store = 120, tmp_path / "shop.parquet", tmp_path / "killed"
    rows = [row | {"sku": sku} for sku, row in enumerate(records([sku % 24 for sku in range(count)]))]
    pq.write_table(pa.Table.from_pylist(rows), shop)
    pq.write_table(pa.table({"sku": range(count), "lang": [f"l{sku}" for sku in range(count)]}), tmp_path / "l.parquet")
    (tmp_path / "run.toml").write_text(
        f'model = "{tiny_model}"\nstore = "{store}"\nengine = "local"\nrows_per_part = 4\n'
        '[[join]]\npath = "l.parquet"\non = { id = "sku" }\ncolumns = ["lang"]\n'
    )
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "run.toml"), str(shop)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline_s = time.monotonic() + 150
    while len(list(store.glob("runs/*/journal/*.json"))) < 2:
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    entries = set(store.glob("runs/*/journal/*.json"))
    assert not (store / "CURRENT.json").exists()
    assert list(store.glob("runs/*/input/*")), "killed while its pictures lay there"
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.split()[-1] == str(count)
    assert entries <= set(store.glob("runs/*/journal/*.json")), "what was finished is kept"
    config = load_config(str(tmp_path / "run.toml"))
    rows = rows_of(config)
    assert {int(key[0]) for key in rows} == set(range(count))
    for (item_id, _), row in rows.items():
        assert (row["price"], row["lang"]) == (int(item_id) % 24 / 2, f"l{item_id}")
    assert len({row["run_id"] for row in rows.values()}) == 1
    assert not list(store.glob("runs/*/input/*"))


@pytest.mark.medium
def test_the_example_of_the_documentation_runs(settings, tiny_model, tmp_path, ray_cluster, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs" / "own-images.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.Table.from_pylist([row | {"price": row["sku"] * 4} for row in records()]), "catalogue.parquet")
    Path("run.toml").write_text(f'model = "{tiny_model}"\nengine = "local"\n')
    block = block.replace("catalogue.parquet", str(tmp_path / "catalogue.parquet"))  # this Ray began elsewhere
    exec(compile(block, "docs", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == "5\n"
    assert {key[0] for key in rows_of(load_config("run.toml", {"store": "runs/shop"}))} == {
        f"shop:{n}" for n in range(5)
    }
