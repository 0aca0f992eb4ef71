"""A hit's probability: that of the model's own library where the family defines one, else none."""

import numpy as np
import pytest
import samples
import torch
from command_runs import run_here
from embedding_runs import embedded
from PIL import Image
from siglip_checkpoints import save_siglip2

from embedder.retrieval.store_api import open_store
from shards.convert import import_checkpoint

TEXT = "two cats sleep"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A SigLIP 2 as transformers saves it, and the model."""
    folder = tmp_path_factory.mktemp("siglip") / "checkpoint"
    return folder, save_siglip2(folder)


@pytest.fixture
def source(tmp_path):
    return samples.folder(tmp_path / "in", num_images=6)


@pytest.fixture
def store(checkpoint, source, make_run, tmp_path):
    """A store of that model, with images and captions."""
    import_checkpoint(checkpoint[0], tmp_path / "model")
    run = make_run(source, model=str(tmp_path / "model"))
    embedded(run)
    return open_store(run.store)


def probabilities_of_the_library(checkpoint, images):
    from transformers import AutoImageProcessor, AutoTokenizer

    folder, model = checkpoint
    pixels = AutoImageProcessor.from_pretrained(folder)(images, return_tensors="pt")["pixel_values"]
    length = model.config.text_config.max_position_embeddings
    tokens = AutoTokenizer.from_pretrained(folder)([TEXT], padding="max_length", max_length=length, return_tensors="pt")
    with torch.no_grad():
        return model(input_ids=tokens["input_ids"], pixel_values=pixels).logits_per_image.sigmoid()[:, 0].tolist()


def test_a_sigmoid_models_probability_is_the_librarys(store, checkpoint, source):
    for hits in (store.search(TEXT, k=6), store.search(TEXT, k=6, hybrid=True), store.search([TEXT], k=6)[0]):
        assert len(hits) == 6
        images = [Image.open(source / hit.item_id).convert("RGB") for hit in hits]
        expected = probabilities_of_the_library(checkpoint, images)
        assert max(expected) - min(expected) > 1e-3, "images that the model distinguishes"
        assert [hit.probability for hit in hits] == pytest.approx(expected, abs=1e-5)


def test_an_image_or_a_vector_is_no_text_and_gives_no_probability(store, source):
    by_image = store.search(image=source / "pictures" / "0003.png", k=3)
    by_vector = store.search(store.encode_text([TEXT]), k=3)[0]
    assert [hit.probability for hit in [*by_image, *by_vector]] == [None] * 6


def test_the_command_shows_it_where_there_is_one(store, source):
    (hit,) = store.search(TEXT, k=1)
    options = ["--store", store.files.address, "-k", "1"]
    (found,) = run_here("search", TEXT, *options, "--json").found["hits"]
    assert found["probability"] == hit.probability
    heading, row = run_here("search", TEXT, *options).stdout.splitlines()
    assert heading.split()[-1] == "probability" and row.split()[-1] == f"{hit.probability:.3g}"
    assert "probability" not in run_here("search", "--image", source / hit.item_id, *options).stdout


def test_a_model_without_a_bias_has_no_probability(make_run, source):
    run = make_run(source)
    embedded(run)
    assert [hit.probability for hit in open_store(run.store).search("a red car", k=2)] == [None, None]


def test_probabilities_of_any_logit_are_finite(store):
    encoder = store.encoder
    vars(encoder)["_sigmoid"] = 1e4, -10.0
    assert [encoder.probability(cosine) for cosine in (-1.0, 1.0)] == [0.0, 1.0]
    assert encoder.probability(0.0) == pytest.approx(1 / (1 + np.exp(10.0)))
