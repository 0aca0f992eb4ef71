"""SigLIP and SigLIP 2 (fixed resolution): their captions and logits; their features are in test_transformers."""

import json
from functools import partial

import pytest
from siglip_checkpoints import CAPTIONS, LENGTH, WIDTH, save_siglip, save_siglip2
from tower_checkpoints import edit_json
from tower_checks import check_refused, make_batch

from embedder.plugins.train.trainer.train_settings import TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer
from embedder.steps.caption_encoder import CaptionEncoder
from shards.convert import import_transformers
from shards.loading import read_tensor
from shards.model_config import ModelConfig, load_model_config
from shards.model_errors import ModelError
from shards.shard import load_shard
from shards.shard_specs import whole_model
from shards.weights import find_weights

HARD_CAPTIONS = [
    *CAPTIONS,
    "",
    "!",
    "! a car",
    "  a\tred\u00a0car ",
    "A-RED_car's",
    "ÉΣ ΣΑΣ. σ",
    "▁a ▁▁car",
    "a red car</s>",
    "<pad> \U0001f600\U0001f600",
    "two cats on a sofa " * 5,
]


@pytest.fixture(scope="module", params=[save_siglip, save_siglip2])
def imported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("siglip")
    request.param(folder / "checkpoint")
    import_transformers(folder / "checkpoint", folder / "model")
    return folder / "model"


def encoder_of(folder):
    config = load_model_config(folder)
    tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
    return CaptionEncoder(tokenizer_json, config.preprocess.max_caption_tokens, config.text.end_id)


def library_ids(folder, captions):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer(caption, padding="max_length", truncation=True, max_length=LENGTH)["input_ids"]
        for caption in captions
    ]


def test_captions_that_are_not_padded_are_refused(imported):
    config = load_model_config(imported)
    shard = load_shard(imported, whole_model(config))
    with pytest.raises(ModelError, match="captions of 3 to 5 tokens.*padded to one length"):
        shard(make_batch(config, [[4, 5, 1], [4, 5, 6, 7, 1]]))


def test_scale_and_bias_of_the_logits_are_kept(imported):
    config, files = load_model_config(imported), find_weights(imported)
    assert [read_tensor(files, name, ()).item() for name in ("logit_scale", "logit_bias")] == [1.25, 1.25]
    assert (config.embedding_dim, config.vision_projection, config.text_projection) == (WIDTH, "none", "linear")
    assert (config.vision.pool, config.vision.class_token, config.projection_bias) == ("map", False, True)
    assert (config.text.family, config.preprocess.max_caption_tokens) == ("siglip_text", LENGTH)


def test_training_goes_on_with_the_scale_and_bias_of_the_logits(imported):
    weights = Trainer(imported, TrainSettings(loss="siglip", num_steps=1, warmup_steps=0)).weights()
    assert (weights["logit_scale"], weights["logit_bias"]) == (1.25, 1.25)
    assert set(weights) == set(find_weights(imported))


def test_a_tower_without_a_projection_has_vectors_of_the_embeddings_width(imported):
    tree = json.loads((imported / "config.json").read_text())
    with pytest.raises(ValueError, match=r'vision_projection is "none".*of 48 values are no vectors of embedding_dim'):
        ModelConfig.model_validate(tree | {"embedding_dim": WIDTH + 1})


@pytest.mark.parametrize(
    "save", [save_siglip, save_siglip2, partial(save_siglip2, side="left")], ids=["siglip", "right", "left"]
)
def test_captions_have_the_ids_of_the_checkpoints_own_tokeniser(tmp_path, save):
    if save is save_siglip:
        pytest.importorskip("sentencepiece")
    folder = tmp_path / "checkpoint"
    save(folder)
    import_transformers(folder, tmp_path / "model")
    encoder = encoder_of(tmp_path / "model")
    assert [encoder.encode(each).tolist() for each in HARD_CAPTIONS] == library_ids(folder, HARD_CAPTIONS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: edit_json(folder / "config.json", vision_config__vision_use_head=False),
            "vision_use_head = False; only True can be imported",
        ),
        (lambda folder: edit_json(folder / "config.json", text_config__hidden_size=40), r"text_model\.\S+ has shape"),
        (
            lambda folder: (folder / "spiece.model").unlink(),
            "spiece.model: No such file or directory; a SiglipTokenizer needs it",
        ),
        (
            lambda folder: (folder / "spiece.model").write_bytes(b"\x00\xffno model"),
            "spiece.model: this is no SentencePiece model; fetch it again",
        ),
    ],
)
def test_a_bad_checkpoint_is_refused_in_one_line(tmp_path, damage, message):
    folder = tmp_path / "checkpoint"
    save_siglip(folder)
    damage(folder)
    check_refused(import_transformers, folder, tmp_path / "model", message)
