"""What an index of a store is tuned with: captions, else queries made from words that its model knows."""

import numpy as np
import pytest
import samples
from index_stores import indexed_store
from refresh_runs import refreshed
from store_states import build_store_index

from embedder.encoders.query_encoder import QueryEncoder
from embedder.models.model_folder import open_model
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.store_info import read_store_info
from embedder.store_index.index_versions import list_manifests
from embedder.store_index.indexed_rows import IndexRows
from embedder.store_index.recall_queries import recall_queries


@pytest.fixture
def without_captions(make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in", num_images=12, captions=False))
    refreshed(config)
    return StoreFiles(config.store)


def found(files: StoreFiles, **other):
    rows = IndexRows(files, read_current(files).embeddings)
    return recall_queries(rows, read_store_info(files).model_copy(update=other))


def test_captions_count_first(tmp_path):
    files = indexed_store(tmp_path / "store", number=20, kind="flat")
    queries, kind = found(files)
    assert (len(queries), kind) == (20, "text")
    assert list_manifests(files)[-1][1].recall_query_kind == "text"


def test_pictures_without_captions_get_queries_that_lie_as_the_models_texts_do(without_captions):
    queries, kind = found(without_captions)
    assert (queries.shape[0], kind) == (12, "text-like")
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1, atol=1e-5)
    rows = IndexRows(without_captions, read_current(without_captions).embeddings)
    pictures = np.concatenate(list(rows.vectors()))
    encoder = QueryEncoder(open_model(read_store_info(without_captions).model))
    texts = encoder.encode_text(["a red house", "two dogs on the beach", "night", "a plate of food"]).mean(axis=0)
    assert np.mean(queries @ texts) > np.mean(pictures @ texts) + 0.1
    for other in ({"model_fingerprint": "of other weights"}, {"model": "/nowhere/at/all"}):
        assert found(without_captions, **other) == (None, "sampled"), "vectors of the table have to do"
    _, manifest = build_store_index(without_captions)
    assert manifest.recall_query_kind == "text-like"
