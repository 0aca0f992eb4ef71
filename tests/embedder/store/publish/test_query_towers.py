"""Query towers in a store: written, found by fingerprint, checked, vacuumed; and a search that needs no torch."""

import json
import logging
import os
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from command_runs import run_here
from safetensors.torch import load_file, save_file
from store_samples import row, table
from tower_families import save_random_model, tiny

from embedder.encoders.query_encoder import QueryEncoder
from embedder.encoders.query_tower_export import export_query_towers, preprocessing_of
from embedder.errors import ConfigError, StoreError
from embedder.models.model_folder import open_model
from embedder.plugins.maintain.purge.audit import is_free_text
from embedder.plugins.maintain.vacuum import vacuum
from embedder.retrieval.store_api import open_store
from embedder.storage.user_cache import cache_folder
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.journal.runs import start_run
from embedder.store.layout import StoreInfo
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import PublishIntent, publish
from embedder.store.publish.query_towers import TOWERS_FOLDER, find_towers, towers_path, write_manifest
from embedder.store.store_info import bind_store
from shards.model_config import ModelConfig
from shards.preprocess import PreprocessConfig
from shards.towers.albert import AlbertTower
from shards.towers.vit import VitTower

SEARCH = """
import json, sys
import embedder
store = embedder.open_store(sys.argv[1])
found = [hit.item_id for hit in store.search("w5 w6 w7")]
heavy = sorted({"torch", "transformers", "timm", "ray"} & set(sys.modules))
print(json.dumps({"found": found, "kind": store.encoder.kind, "heavy": heavy}))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two model folders whose vectors lie in a plane."""
    preprocess = PreprocessConfig(image_size=32, max_caption_tokens=16)
    config = ModelConfig(
        name="tiny",
        trained=False,
        embedding_dim=2,
        vision=tiny(VitTower),
        text=tiny(AlbertTower),
        preprocess=preprocess,
    )
    root = tmp_path_factory.mktemp("models")
    return [save_random_model(config, root / f"model {seed}", seed) for seed in (1, 2)]


def info_of(folder):
    model = open_model(str(folder))
    info = StoreInfo(
        model=model.uri,
        model_fingerprint=model.fingerprint,
        preprocess_fingerprint="",
        segment_s=5.0,
        frames_per_segment=1,
        dtype="float32",
    )
    return info.model_copy(update={"preprocess_fingerprint": preprocessing_of(model, info)})


def publish_model(address, folder):
    """Publish two images as vectors of a model, in the place of all that was."""
    files, info = StoreFiles(address), info_of(folder)
    bind_store(files, info, may_change=True)
    run = start_run(files, info, pa.schema({}))
    stamp = RunMetadata(run.run_id, run.session, info.model_fingerprint, info.preprocess_fingerprint, pa.schema({}))
    write_part(files, stamp, 0, table(row("a"), row("b", image_embedding=[0.0, 1.0])))
    publish([ModelWork(run, stamp, PublishIntent(kind="refresh", info=info, replaces_all=True))])
    return files, info


def expected(folder, text="w5 w6 w7"):
    return QueryEncoder(open_model(str(folder))).encode_text([text])


@pytest.mark.medium
def test_a_store_without_them_searches_by_torch_and_names_the_command_that_writes_them(models, tmp_path, caplog):
    files, _ = publish_model(tmp_path / "store", models[0])
    with caplog.at_level(logging.INFO):
        assert open_store(files.address).encoder.kind == "torch"
    assert f"embedder export-query-towers --store {files.address}" in caplog.text
    ended = run_here("export-query-towers", "--store", files.address)
    assert (ended.code, "query towers written" in ended.stdout) == (0, True), ended.stderr
    again = run_here("export-query-towers", "--store", files.address)
    assert (again.code, "are there already" in again.stdout) == (0, True)
    store = open_store(files.address)
    assert store.encoder.kind == "onnx"
    assert np.abs(store.encode_text(["w5 w6 w7"]) - expected(models[0])).max() < 1e-5


@pytest.mark.medium
def test_a_fresh_process_searches_without_torch_and_without_the_model_folder(models, tmp_path):
    folder = shutil.copytree(models[0], tmp_path / "model")
    files, info = publish_model(tmp_path / "store", folder)
    export_query_towers(files, info)
    shutil.rmtree(folder)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    ended = subprocess.run(
        [sys.executable, "-c", SEARCH, files.address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    x, y = expected(models[0])[0]
    assert found == {"found": ["a", "b"] if x > y else ["b", "a"], "kind": "onnx", "heavy": []}
    assert not list((tmp_path / "cache").rglob("*deviceid*")), "ONNX Runtime sends nothing to its maker"


@pytest.mark.medium
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "manifest.json"])
def test_what_is_damaged_is_told_and_torch_answers(models, tmp_path, caplog, name):
    files, info = publish_model(tmp_path / "store", models[0])
    export_query_towers(files, info)
    path = files.folder / towers_path(info) / name
    path.write_bytes(path.read_bytes()[:-9])
    caplog.set_level(logging.INFO)
    store = open_store(files.address)
    assert store.encoder.kind == "torch"
    assert np.array_equal(store.encode_text(["w5 w6 w7"]), expected(models[0]))
    assert "torch encodes queries" in caplog.text
    assert run_here("export-query-towers", "--force", "--store", files.address).code == 0
    assert open_store(files.address).encoder.kind == "onnx"


def test_another_models_folder_writes_none(models, tmp_path):
    files, info = publish_model(tmp_path / "store", models[0])
    with pytest.raises(ConfigError, match="its model fingerprint is .* give the model that made them with --model"):
        export_query_towers(files, info, str(models[1]))
    other = shutil.copytree(models[0], tmp_path / "crops otherwise")
    config = json.loads((other / "config.json").read_text())
    config["preprocess"]["resize"] = "squash"
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="its preprocess fingerprint is"):
        export_query_towers(files, info, str(other))
    assert find_towers(files, info) is None
    export_query_towers(files, info)
    assert open_store(files.address, model=str(other)).encoder.kind == "torch", "as it was asked for"
    assert open_store(files.address, model=str(models[0])).encoder.kind == "onnx"


@pytest.mark.medium
def test_vacuum_keeps_the_towers_of_every_publication_that_can_be_opened(models, tmp_path):
    address = tmp_path / "store"
    infos = []
    for folder in models:
        files, info = publish_model(address, folder)
        export_query_towers(files, info)
        infos.append(info)
    vacuum(files, keep_days=7, keep_versions=1)
    assert all(find_towers(files, info) for info in infos)
    planned = vacuum(files, keep_days=0, keep_versions=1, dry_run=True)
    assert any(each.path.startswith(towers_path(infos[0])) for each in planned.deleted)
    vacuum(files, keep_days=0, keep_versions=1)
    assert find_towers(files, infos[0]) is None
    assert not list((files.folder / towers_path(infos[0])).glob("*"))
    assert open_store(files.address).encoder.kind == "onnx"


def test_a_purge_takes_no_word_of_a_vocabulary_for_an_item(models, tmp_path):
    files, info = publish_model(tmp_path / "store", models[0])
    export_query_towers(files, info)
    towers = list(files.list(towers_path(info)))
    assert towers
    assert not any(map(is_free_text, towers))


@pytest.mark.medium
def test_in_a_bucket_a_tower_is_fetched_once_and_again_where_the_copy_is_damaged(models, bucket, tmp_path, monkeypatch):
    files, info = publish_model(f"{bucket}/store", models[0])
    export_query_towers(files, info)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fetched = []
    download = StoreFiles.download
    monkeypatch.setattr(
        StoreFiles, "download", lambda self, path, target: (fetched.append(path), download(self, path, target))[1]
    )
    for _ in range(2):
        store = open_store(files.address)
        assert np.abs(store.encode_text(["w5 w6 w7"]) - expected(models[0])).max() < 1e-5
    names = sorted(path.rpartition("/")[2] for path in fetched)
    assert names == ["config.json", "text.onnx", "text.onnx.data", "tokenizer.json"]
    (weights,) = cache_folder(TOWERS_FOLDER).rglob("text.onnx.data")
    weights.write_bytes(weights.read_bytes()[::-1])
    store = open_store(files.address)
    assert np.abs(store.encode_text(["w5 w6 w7"]) - expected(models[0])).max() < 1e-5
    assert store.encoder.kind == "onnx"


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["onnx", "torch"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_query_whose_vector_is_not_finite_is_refused_and_names_the_model(models, tmp_path, kind, value):
    folder = shutil.copytree(models[0], tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if name.startswith("text.") and "word_embeddings" in name)
    tensors[name][:] = value
    save_file(tensors, path)
    files, info = publish_model(tmp_path / "store", folder)
    if kind == "onnx":
        export_query_towers(files, info)
    store = open_store(files.address)
    assert store.encoder.kind == kind
    with pytest.raises(
        ConfigError, match=rf"model {folder}: its vector of a query has values that are NaN or infinite"
    ):
        store.search("w5 w6 w7")


@pytest.mark.parametrize("content", ["[" * 200_000, "{}", '["a", "b"]', "[1]"])
def test_a_hostile_sigmoid_of_query_towers_is_told_in_one_line(models, tmp_path, content):
    files, info = publish_model(tmp_path / "store", models[0])
    export_query_towers(files, info)
    folder = files.folder / towers_path(info)
    (folder / "sigmoid.json").write_text(content)
    write_manifest(folder, info)
    with pytest.raises(StoreError, match="it holds no scale and bias of a sigmoid; write the towers again with"):
        open_store(files.address).search("w5 w6 w7")
