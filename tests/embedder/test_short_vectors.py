"""Search on a quarter of the dimensions, ordered by all of them: what is lost of R@10 on the shipped emoji."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from safetensors.torch import load_file, save_file

import embedder
from embedder.config import load_config
from embedder.encoders.query_encoder import QueryEncoder
from embedder.ingest.embed import embed
from embedder.models.model_folder import open_model
from embedder.sources.demo_source import shipped_source
from index.build import build_index
from index.search import open_index

SHIPPED = Path(embedder.__file__).parent / "demo_model"
WIDTH, QUARTER, K = 192, 48, 10


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Captions and vectors of the shipped emoji: texts, images (N, E), texts (N, E)."""
    with shipped_source(()) as source:
        given = {"model": str(SHIPPED), "store": str(tmp_path_factory.mktemp("demo") / "store"), "engine": "local"}
        config = load_config(overrides=given).model_copy(update={"source": (source,)})
        embed(config)
    rows = embedder.open_store(config.store).to_arrow()
    rows = rows.filter(pc.is_valid(rows["image_embedding"]))
    columns = [np.stack(rows[name].to_pylist()).astype(np.float32) for name in ("image_embedding", "text_embedding")]
    return rows["caption"].to_pylist(), *columns


@pytest.fixture(scope="module")
def projected(shipped, tmp_path_factory):
    """The shipped model with its space turned, so that the first values carry the most, and that turn (E, E)."""
    _, images, captions = shipped
    moment = sum(each.T.astype(np.float64) @ each / len(each) for each in (images, captions))
    turn = np.linalg.eigh(moment)[1][:, ::-1].T.astype(np.float32)
    folder = shutil.copytree(SHIPPED, tmp_path_factory.mktemp("projected") / "model")
    weights = load_file(folder / "model.safetensors")
    for name in ("vision_head.projection.weight", "text_head.projection.weight"):
        weights[name] = torch.from_numpy(turn) @ weights[name].float()
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"matryoshka": [QUARTER]}))
    return folder, turn


def recall(rows):
    """Share of queries whose own item is among the first K, given rows (N, K) of the hits."""
    return float(np.mean([number in found[:K] for number, found in enumerate(rows)]))


def exact(queries, items):
    return np.argsort(-(queries @ items.T), axis=1)[:, :K]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quarter_of_the_dimensions_with_the_order_of_all_keeps_recall(shipped, projected, tmp_path, capsys):
    texts, images, captions = shipped
    folder, turn = projected
    whole, items = captions @ turn.T, images @ turn.T
    cut = QueryEncoder(open_model(f"{folder}#dimensions={QUARTER}")).encode_text(texts)
    expected = whole[:, :QUARTER] / np.linalg.norm(whole[:, :QUARTER], axis=1, keepdims=True)
    assert np.abs(cut - expected).max() < 1e-4, "the model with dimensions = 48 gives the cut vectors"
    short = items[:, :QUARTER] / np.linalg.norm(items[:, :QUARTER], axis=1, keepdims=True)
    ids = pa.table({"item_id": [str(number) for number in range(len(items))], "segment": [0] * len(items)})
    build_index(
        items, ids, tmp_path / "index", model_fingerprint="0" * 16, embeddings_version=1, queries=whole[::4],
        kind=f"First{QUARTER},HNSW32,Flat",
    )  # fmt: skip
    found = open_index(tmp_path / "index").search(whole, K)
    figures = {
        "whole": recall(exact(whole, items)), "a quarter": recall(exact(cut, short)),
        "a quarter, ordered by all": recall(found.rows),
    }  # fmt: skip
    with capsys.disabled():
        print("\nR@10 of", len(texts), "captions:", {name: round(value, 4) for name, value in figures.items()})
    assert figures["a quarter, ordered by all"] >= 0.99 * figures["whole"]
    assert figures["a quarter"] < figures["a quarter, ordered by all"]
    assert figures["whole"] > 0.85
