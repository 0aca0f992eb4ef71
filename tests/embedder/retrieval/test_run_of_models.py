"""What one run of three models publishes: searched by each model's own text tower, with conditions over the others."""

import numpy as np
import pytest
import samples
from model_runs import classifier, other_towers

from embedder.encoders.query_encoder import QueryEncoder
from embedder.errors import StoreError
from embedder.ingest.embed import embed
from embedder.models.model_folder import open_model
from embedder.plugins.evaluate.evaluate import evaluate
from embedder.plugins.maintain.purge.purge import purge
from embedder.retrieval.store_api import open_store
from embedder.store.lock import write_lock
from embedder.store_index.keep_index import index_choice

TEXT = "a red car"


@pytest.fixture
def published(make_run, tiny_model, tmp_path):
    """Address of a store of images with captions by two towers and a classifier; and the second towers' folder."""
    second = other_towers(tmp_path)
    source = samples.folder(tmp_path / "in", num_images=10)
    models = [{"uri": str(tiny_model)}, {"name": "other", "uri": second}, classifier(tmp_path)]
    config = make_run(source, model=models)
    assert embed(config).published
    return config.store, second


def test_each_model_is_searched_evaluated_and_purged_with_its_own_vectors(published):
    address, second = published
    store = open_store(address)
    assert store.models == ("other", "shades")
    other = store.of_model("other")
    (query,) = QueryEncoder(open_model(second)).encode_text([TEXT])
    assert other.encoder.kind == "onnx", "its query towers are in its folder"
    assert np.allclose(other.encode_text([TEXT])[0], query, atol=1e-5)
    rows = [row for row in other.to_arrow().to_pylist() if row["image_embedding"] is not None]
    cosines = {row["item_id"]: float(np.dot(row["image_embedding"], query)) for row in rows}
    hits = other.search(TEXT, k=4)
    assert [hit.item_id for hit in hits] == sorted(cosines, key=cosines.__getitem__, reverse=True)[:4]
    assert hits.version.partition("/")[2].startswith("other index"), "a run makes each model's index"

    bright = {row["item_id"] for row in rows if row["shades.top"] == "bright"}
    for each in (store, other):
        found = {hit.item_id for hit in each.search(TEXT, k=20, where="shades.top = 'bright'")}
        assert found == bright
    assert evaluate(other, num_queries=5).run_id == store.publication.run_id
    with pytest.raises(StoreError, match="model shades has no vectors"):
        evaluate(store.of_model("shades"))

    gone = hits[0].item_id
    with write_lock(store.files):
        done = purge(store.files, [gone], index_choice(store.files, reuse=False))
    assert done.scan.found_in == ()
    for name in ("main", "other", "shades"):
        assert gone not in open_store(address, model=name).to_arrow(["item_id"])["item_id"].to_pylist()
    assert gone not in {hit.item_id for hit in open_store(address, model="other").search(TEXT, k=20)}
