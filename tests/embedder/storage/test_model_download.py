"""From a model's name to a local folder: paths, hub ids and buckets."""

import shutil
import threading

import pytest

from embedder.storage.model_download import download_model, resolve_model
from shards.errors import ModelError
from shards.fingerprint import model_fingerprint


@pytest.fixture
def model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "own")


def test_a_local_folder_is_used_as_it_is(model, monkeypatch):
    assert resolve_model(model) == model
    monkeypatch.chdir(model.parent)
    assert resolve_model("own").resolve() == model
    with pytest.raises(ModelError, match="this is a file"):
        resolve_model(model / "config.json")


@pytest.mark.parametrize("uri", ["nowhere", "/nowhere/at/all", "./a/b", ""])
def test_a_folder_that_is_not_there_is_refused_without_asking_the_network(uri, monkeypatch):
    monkeypatch.setattr(
        "embedder.storage.model_download._download_hub", lambda hub_id: pytest.fail("asked the network")
    )
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model(uri)


@pytest.mark.parametrize("uri", ["org/name", "hf://org/name", "hf-hub:org/name"])
def test_hub_ids_download_data_files_only(uri, monkeypatch, tmp_path):
    asked = []

    def fetch(name, **options):
        asked.append((name, options["revision"]))
        assert set(options["allow_patterns"]) == {"*.safetensors", "*.json", "spiece.model", "vocab.txt", "merges.txt"}
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_model(uri) == tmp_path
    assert resolve_model(uri + "@v2") == tmp_path
    assert asked == [("org/name", None), ("org/name", "v2")]


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="no such folder here, and the Hugging Face hub gave none") as caught:
        resolve_model("no-such-org/no-such-model")
    assert "\n" not in str(caught.value)


def test_a_model_in_an_object_store_is_downloaded_once_for_each_version(model, tmp_path):
    import obstore
    from obstore.store import MemoryStore

    store, cache = MemoryStore(), tmp_path / "cache"
    for path in model.iterdir():
        obstore.put(store, path.name, path.read_bytes())
    obstore.put(store, "evil.py", b"raise SystemExit")
    obstore.put(store, "deeper/config.json", b"{}")
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(download_model(store, "s3://bucket/model", cache)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    folder = found[0]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert model_fingerprint(folder) == model_fingerprint(model)
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert download_model(store, "s3://bucket/model", cache) == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    obstore.put(store, "config.json", (model / "config.json").read_bytes() + b" ")
    assert download_model(store, "s3://bucket/model", cache) != folder


def test_an_empty_place_in_an_object_store_is_refused(tmp_path):
    from obstore.store import MemoryStore

    with pytest.raises(ModelError, match="found no model files"):
        download_model(MemoryStore(), "s3://bucket/nothing", tmp_path)
