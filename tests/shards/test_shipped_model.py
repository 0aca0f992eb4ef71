"""The model that the package ships: complete, small, and better than chance on images that it has never seen."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.retrieval.rank_metrics import retrieval_at
from embedder.steps.caption_encoder import CaptionEncoder
from shards.activations import Batch, TowerState
from shards.fingerprint import model_fingerprint
from shards.model_config import load_model_config
from shards.plan import plan_shards
from shards.shard import load_shard
from shards.shard_specs import whole_model
from shards.tokenizer import check_tokenizer, parse_tokenizer

PACKAGE = Path(__file__).resolve().parents[2] / "embedder"
FOLDER = PACKAGE / "demo_model"

pytestmark = pytest.mark.skipif(not (FOLDER / "model.safetensors").exists(), reason="no model is shipped here")


def test_the_shipped_model_is_small_trained_and_says_where_it_comes_from():
    config = load_model_config(FOLDER)
    assert config.trained
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 12_000_000
    check_tokenizer(parse_tokenizer((FOLDER / "tokenizer.json").read_text(), "shipped"), config.text, "shipped")
    assert len(model_fingerprint(FOLDER)) == 16
    assert len(plan_shards(config, 3).stages) == 3
    card = (FOLDER / "MODEL_CARD.md").read_text()
    for word in (
        "CC-BY-SA",
        "CC-BY 4.0",
        "MIT",
        "Twemoji",
        "OpenMoji",
        "Fluent",
        "train_demo_model.py",
        "Noto",
        "seed",
    ):
        assert word in card


@pytest.mark.medium
def test_the_shipped_model_finds_images_of_a_style_that_it_never_saw():
    config = load_model_config(FOLDER)
    fit = ResizeSpec(config.preprocess.image_size, config.preprocess.resize, config.preprocess.interpolation)
    encoder = CaptionEncoder((FOLDER / "tokenizer.json").read_text(), config.preprocess.max_caption_tokens)
    with tarfile.open(PACKAGE / "demo_data" / "noto.tar") as tar, SandboxedDecoder() as decoder:
        members = {member.name: member for member in tar.getmembers()}
        names = sorted(name.removesuffix(".png") for name in members if name.endswith(".png"))[::19]
        read = lambda name: tar.extractfile(members[name]).read()  # noqa: E731 - one line in only this test
        captions = [json.load(io.BytesIO(read(f"{name}.json")))["caption"] for name in names]
        pixels = torch.from_numpy(np.stack([decoder.image(read(f"{name}.png"), fit) for name in names]))
    ids = [torch.from_numpy(encoder.encode(caption)) for caption in captions]
    ones, lengths = torch.ones(len(names), dtype=torch.int64), torch.tensor([len(each) for each in ids])
    found = load_shard(FOLDER, whole_model(config))(
        Batch(TowerState(pixels, ones), TowerState(torch.cat(ids), lengths))
    )
    places = np.arange(len(names))
    recall = retrieval_at(found.text.values.numpy(), places, found.vision.values.numpy(), places)
    assert len(names) > 90
    assert recall[1] >= 0.6  # of about 100 images; chance is 0.01
    assert recall[10] >= 0.85
