"""From a model's name to a local folder: paths, hub ids and buckets."""

import hashlib
import shutil
import threading
from fnmatch import fnmatch

import pytest
import torch
from safetensors.torch import load_file
from sentence_folders import save_sentence_model
from tower_checkpoints import save_clip
from typer.testing import CliRunner

from embedder.cli import app
from embedder.storage.model_download import FETCHED_FILES, download_model, model_name, resolve_checkpoint, resolve_model
from shards.convert import import_checkpoint
from shards.fingerprint import model_fingerprint
from shards.model_config import load_model_config
from shards.model_errors import ModelError


@pytest.fixture
def model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "own")


@pytest.mark.parametrize("uri", ["nowhere", "/nowhere/at/all", "./a/b", ""])
def test_a_folder_that_is_not_there_is_refused_without_asking_the_network(uri, monkeypatch):
    monkeypatch.setattr("embedder.storage.model_download._download_hub", lambda *_: pytest.fail("asked the network"))
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model(uri)


SCHEMES = ["", "hf:", "hf://", "hf-hub:"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_hub_ids_download_data_files_only(scheme, monkeypatch, tmp_path):
    asked = []

    def fetch(name, **options):
        asked.append((name, options["revision"]))
        assert set(options["allow_patterns"]) == {"*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"}
        assert options["ignore_patterns"] == ["*/*"]
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_model(f"{scheme}org/name") == tmp_path
    assert resolve_model(f"{scheme}org/name@v2") == tmp_path
    assert asked == [("org/name", None), ("org/name", "v2")]


def test_pickles_are_downloaded_for_an_import_without_safetensors_only(monkeypatch, tmp_path):
    asked = []

    def fetch(name, **options):
        asked.append(options["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    (tmp_path / "model.safetensors").touch()
    resolve_checkpoint("hf:org/name")
    assert asked == [[*FETCHED_FILES]]
    (tmp_path / "model.safetensors").unlink()
    resolve_checkpoint("hf:org/name")
    assert asked[1:] == [[*FETCHED_FILES], [*FETCHED_FILES, "*pytorch_model*.bin"]]
    resolve_checkpoint(tmp_path)
    assert len(asked) == 3


@pytest.fixture
def hub_cache(monkeypatch, tmp_path):
    """The hub's cache, empty, without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


COMMITS = {"main": "a" * 40, "v2": "b" * 40}


def put_in_cache(cache, repository, folder, revision="main"):
    """Lay out a repository as the library does: links by commit to the content of each file, by its hash."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMITS[revision]
    for directory in (root / "refs", root / "blobs", snapshot):
        directory.mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(COMMITS[revision])
    for path in folder.iterdir():
        blob = hashlib.sha256(path.read_bytes()).hexdigest()
        (root / "blobs" / blob).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    return snapshot


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cached_model_is_found_without_a_network_by_revision_too(scheme, model, hub_cache):
    first = put_in_cache(hub_cache, "org/name", model)
    config = model / "config.json"
    config.write_text(config.read_text().replace('"trained": false', '"trained": true'))
    second = put_in_cache(hub_cache, "org/name", model, "v2")
    assert resolve_model(f"{scheme}org/name") == first
    assert resolve_model(f"{scheme}org/name@v2") == second
    assert resolve_model(f"{scheme}org/name@{COMMITS['main']}") == first
    assert model_fingerprint(first) == model_fingerprint(model)
    assert first.resolve() != second.resolve()


@pytest.mark.parametrize("pickled", [False, True])
def test_a_cached_checkpoint_is_imported_by_its_id(pickled, hub_cache, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    save_clip(checkpoint)
    if pickled:
        weights = checkpoint / "model.safetensors"
        torch.save(load_file(weights), checkpoint / "pytorch_model.bin")
        weights.unlink()
    put_in_cache(hub_cache, "org/clip", checkpoint, "v2")
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["model", "import", "hf:org/clip@v2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert load_model_config(out).name == "clip"
    names = ["config.json", "import.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in out.iterdir()) == names


@pytest.mark.parametrize("uri", ["hf:org/other", "org/other", "hf:org/name@v3", f"hf:org/name@{'c' * 40}", "hf:bert"])
def test_an_id_that_is_not_cached_is_one_line_with_the_cure(uri, model, hub_cache):
    put_in_cache(hub_cache, "org/name", model)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set; .*run `hf download ") as caught:
        resolve_model(uri)
    assert str(caught.value).startswith(f"hf:{uri.removeprefix('hf:')}: there is no such folder here")
    assert str(hub_cache) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["hf:", "hf:a/b/c", "hf:../name", "hf:org/name@../../x", "hf:org/na me", "hf:/etc"])
def test_what_is_no_hub_id_is_refused_without_asking_the_network(uri, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the network"))
    with pytest.raises(ModelError, match="this is no id of the Hugging Face hub; give hf:org/name"):
        resolve_model(uri)


def test_a_hub_that_refuses_is_one_line(monkeypatch):
    from huggingface_hub.errors import HTTPError

    def fetch(*_, **__):
        raise HTTPError("no such repository\n\nlog in")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(ModelError, match=r"gave none \(no such repository log in\); correct the path or id"):
        resolve_model("hf:org/name")


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("hf:org/name@refs/pr/1", "name"),
        ("org/name@v2", "name"),
        ("hf:bert", "bert"),
        ("hf://org/name", "name"),
        ("s3://bucket/models/mine", "mine"),
        ("/data/odd@name", "odd@name"),
    ],
)
def test_a_models_name_is_the_last_part_of_its_address(uri, name):
    assert model_name(uri) == name


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


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """A folder of sentence-transformers, whose Dense has pickled weights."""
    folder = tmp_path_factory.mktemp("sentences") / "own"
    settings = {"in_features": 32, "out_features": 8, "bias": True}
    save_sentence_model(folder, "mean", version=3, dense=settings)
    return folder


def test_the_modules_of_sentence_transformers_are_downloaded_from_an_object_store(sentences, tmp_path):
    import obstore
    from obstore.store import MemoryStore

    store = MemoryStore()
    for path in sentences.rglob("*.*"):
        obstore.put(store, str(path.relative_to(sentences)), path.read_bytes())
    obstore.put(store, "onnx/model.onnx", b"another program's")
    obstore.put(store, "1_Pooling/evil.py", b"raise SystemExit")
    folder = download_model(store, "s3://bucket/sentences", tmp_path / "cache")
    names = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    assert names == {str(path.relative_to(sentences)) for path in sentences.rglob("*.*")}
    import_checkpoint(folder, tmp_path / "found")
    import_checkpoint(sentences, tmp_path / "expected")
    assert model_fingerprint(tmp_path / "found") == model_fingerprint(tmp_path / "expected")
    obstore.put(store, "1_Pooling/config.json", b"{}")
    assert download_model(store, "s3://bucket/sentences", tmp_path / "cache") != folder


def test_the_modules_of_sentence_transformers_are_downloaded_from_the_hub(sentences, monkeypatch, tmp_path):
    asked, snapshot = [], tmp_path / "c0ffee"

    def fetch(name, *, revision, allow_patterns, ignore_patterns):
        asked.append((name, revision))
        for path in sentences.rglob("*.*"):
            found = str(path.relative_to(sentences))
            if any(fnmatch(found, each) for each in allow_patterns) and not any(
                fnmatch(found, each) for each in ignore_patterns
            ):
                (snapshot / found).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, snapshot / found)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    folder = resolve_checkpoint("hf:org/sentences@v2")
    assert asked[0] == ("org/sentences", "v2")
    assert {*asked[1:]} == {("org/sentences", "c0ffee")}
    names = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    assert names == {str(path.relative_to(sentences)) for path in sentences.rglob("*.*")}


def test_an_empty_place_in_an_object_store_is_refused(tmp_path):
    from obstore.store import MemoryStore

    with pytest.raises(ModelError, match="found no model files"):
        download_model(MemoryStore(), "s3://bucket/nothing", tmp_path)
