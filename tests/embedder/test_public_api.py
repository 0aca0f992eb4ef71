"""The names that `embedder` offers: each importable, documented, and its module imported only when it is used."""

import inspect
import logging
import subprocess
import sys
from importlib.metadata import version

import pytest
import samples

import embedder

OFFERED = {
    "BatchPredictor",
    "FollowingStore",
    "RemoteStore",
    "SearchOptions",
    "Stage",
    "Store",
    "YesNoReranker",
    "build_index",
    "compare",
    "connect",
    "embed",
    "embed_dataset",
    "evaluate",
    "follow_store",
    "load_config",
    "load_train_config",
    "open_store",
    "plan",
    "refresh",
    "submit",
    "train",
}
FRESH = """
import sys
import embedder
assert [name for name in sys.modules if name.startswith("embedder.")] == ["embedder.version"], sys.modules
assert {"numpy", "pyarrow", "torch", "ray", "faiss", "PIL", "av"}.isdisjoint(sys.modules)
embedder.load_config
assert "embedder.config" in sys.modules and "embedder.retrieval" not in sys.modules
"""


def test_what_is_offered_is_listed():
    assert set(embedder.__all__) == OFFERED


@pytest.mark.parametrize("name", sorted(OFFERED))
def test_each_name_is_importable_and_documented(name):
    offered = getattr(embedder, name)
    assert offered.__name__ == name
    assert len(inspect.getdoc(offered)) > 20
    if inspect.isfunction(offered) and len(inspect.signature(offered).parameters) > 2:
        documented = inspect.getdoc(offered).partition("Args:")[2]
        for parameter in inspect.signature(offered).parameters:
            assert f"    {parameter}: " in documented


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'embedder' has no attribute 'tokenise'") as caught:
        _ = embedder.tokenise
    assert (caught.value.name, caught.value.obj) == ("tokenise", embedder)


def test_dir_shows_what_is_offered_and_the_version():
    shown = set(dir(embedder))
    assert OFFERED | {"__version__", "__doc__"} <= shown
    assert {name for name in shown if not name.startswith("_")} == OFFERED
    assert embedder.__version__ == version("embedder")


MISTAKES = [
    (lambda: embedder.open_store(5), "embedder.open_store: uri: found int; give the folder or address of a store"),
    (lambda: embedder.follow_store(None), "embedder.follow_store: uri: found NoneType"),
    (lambda: embedder.connect(8765), "embedder.connect: url: found int; give the address of a query service"),
    (lambda: embedder.embed_dataset(None, "run.toml"), "embedder.embed_dataset: config: found str; give one of"),
    (lambda: embedder.embed("run.toml"), "embedder.embed: config: found str; give one of embedder.load_config"),
    (lambda: embedder.refresh({"store": "s"}), "embedder.refresh: config: found dict"),
    (lambda: embedder.plan("run.toml"), "embedder.plan: config: found str"),
    (lambda: embedder.build_index("runs/s"), "embedder.build_index: config: found str"),
    (lambda: embedder.evaluate("runs/s"), "embedder.evaluate: store: found str; give a store, as embedder.open_store"),
    (lambda: embedder.train("train.toml"), "embedder.train: config: found str; give one of embedder.load_train_config"),
]


@pytest.mark.parametrize(("ask", "message"), MISTAKES, ids=[message.partition(":")[0] for _, message in MISTAKES])
def test_an_argument_of_another_type_is_told_with_what_is_expected(ask, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        ask()


def test_importing_the_package_imports_no_module_of_it_but_its_version():
    subprocess.run([sys.executable, "-c", FRESH], check=True, timeout=60)


@pytest.mark.medium
def test_a_store_is_embedded_refreshed_indexed_evaluated_and_searched_from_python(make_run, tmp_path, caplog):
    folder = samples.folder(tmp_path / "in", num_images=12, num_clips=0)
    config = make_run(folder)
    with caplog.at_level(logging.INFO, "embedder"):
        assert embedder.embed(config).num_vectors >= 12
    assert any(record.name.startswith("embedder.") for record in caplog.records)
    assert embedder.refresh(config, limit=1).num_vectors == 0
    number, manifest = embedder.build_index(config, kind="flat")
    store = embedder.open_store(config.store)
    assert store.current.index == number
    assert manifest.design == "Flat"
    found = embedder.evaluate(config, num_queries=5)
    assert 0 < found.queries.num_queries <= 5
    assert found.index.number == number
    assert embedder.evaluate(store, num_queries=5).model == found.model

    hits = store.search("red", embedder.SearchOptions(k=3))
    assert [hit.item_id for hit in hits] == [hit.item_id for hit in store.search("red", 3)]
    assert [hit.item_id for hit in hits] == [hit.item_id for hit in store.search("red", embedder.SearchOptions(), k=3)]
    image = hits[0].image(64)
    assert (image.size, image.mode) == ((64, 64), "RGB")
    assert hits[0].read() == (folder / hits[0].item_id).read_bytes()
    assert store.search(image=hits[0].read(), k=1)[0].score == pytest.approx(1, abs=1e-3)
    assert hits[0].item_id in str(hits[0])


def test_a_plan_is_made_from_python(make_run, tmp_path):
    found = embedder.plan(make_run(tmp_path, num_stages=3), devices="8xCPU", num_items=1000)
    assert (len(found.plan.stages), found.fixed_by) == (3, "num_stages")
    assert embedder.plan(make_run(tmp_path), devices="8xCPU").fixed_by is None
    assert found.what_if is not None
    assert found.comparison is None
