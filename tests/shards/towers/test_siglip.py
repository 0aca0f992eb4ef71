"""SigLIP and SigLIP 2 (fixed resolution): their checkpoints against their own features, every cut, every part."""

import json

import pytest
import torch
from siglip_checkpoints import CAPTIONS, LENGTH, PIECES, WIDTH, save_siglip, save_siglip2
from tower_checks import check_against, check_every_cut, check_every_part_matters, make_batch

from embedder.plugins.train.trainer.settings import TrainSettings
from embedder.plugins.train.trainer.trainer import Trainer
from embedder.steps.captions import CaptionEncoder
from shards.config import ModelConfig, load_model_config
from shards.convert import import_transformers
from shards.errors import ModelError
from shards.loading import read_tensor
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
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("siglip") / "checkpoint"
    return folder, request.param(folder)


@pytest.fixture(scope="module")
def imported(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "siglip"
    import_transformers(checkpoint[0], folder)
    return folder


@pytest.fixture
def batch(imported):
    encoder = encoder_of(imported)
    return make_batch(load_model_config(imported), [encoder.encode(caption).tolist() for caption in CAPTIONS])


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


def test_an_imported_model_gives_transformers_own_features(checkpoint, imported, batch):
    model, preprocess = checkpoint[1], load_model_config(imported).preprocess
    mean, std = torch.tensor(preprocess.mean), torch.tensor(preprocess.std)

    def images(state):
        return model.get_image_features(((state.values / 255 - mean) / std).permute(0, 3, 1, 2)).pooler_output

    def captions(state):
        return model.get_text_features(input_ids=state.values.long().view(-1, LENGTH)).pooler_output

    check_against(imported, batch, {"vision": images, "text": captions})


def test_every_cut_gives_the_bits_of_the_unsplit_towers(imported, batch):
    check_every_cut(imported, batch)


def test_no_part_can_be_left_out(imported, batch, tmp_path):
    check_every_part_matters(imported, batch, tmp_path)


def test_padding_is_attended_to(imported, batch):
    shard = load_shard(imported, whole_model(load_model_config(imported)))
    before = shard(batch).text.values
    encoder = encoder_of(imported)
    padding = int(encoder.encode("")[-1])
    ids = batch.text.values.clone()
    ids[ids == padding] = 5
    batch.text.values.copy_(ids)
    assert (shard(batch).text.values - before).abs().max() > 1e-3


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


def test_siglips_captions_have_the_ids_of_its_own_tokeniser(tmp_path):
    pytest.importorskip("sentencepiece")
    folder = tmp_path / "checkpoint"
    save_siglip(folder)
    import_transformers(folder, tmp_path / "model")
    encoder = encoder_of(tmp_path / "model")
    assert [encoder.encode(each).tolist() for each in HARD_CAPTIONS] == library_ids(folder, HARD_CAPTIONS)


@pytest.mark.parametrize(
    ("caption", "pieces"),
    [
        ("A red, CAR!", ["▁a", "▁red", "▁car"]),
        ("  red\ncar ", ["▁", "▁red", "▁car"]),
        ("cab Σ ΑΣ", ["▁", "c", "a", "b", "▁", "σ", "▁", "<unk>", "ς"]),
        ("", []),
    ],
)
def test_siglips_captions_are_canonical_and_padded(tmp_path, caption, pieces):
    save_siglip(tmp_path / "checkpoint")
    import_transformers(tmp_path / "checkpoint", tmp_path / "model")
    expected = [PIECES.index(piece) for piece in pieces]
    found = encoder_of(tmp_path / "model").encode(caption).tolist()
    assert found == expected + [PIECES.index("</s>")] * (LENGTH - len(expected))


@pytest.mark.parametrize("side", ["right", "left"])
def test_siglip2s_captions_have_the_ids_of_its_own_tokeniser(tmp_path, side):
    folder = tmp_path / "checkpoint"
    save_siglip2(folder, side)
    import_transformers(folder, tmp_path / "model")
    encoder = encoder_of(tmp_path / "model")
    assert [encoder.encode(each).tolist() for each in HARD_CAPTIONS] == library_ids(folder, HARD_CAPTIONS)


def change_json(path, change):
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def no_pooling(folder):
    change_json(folder / "config.json", lambda tree: tree["vision_config"].update(vision_use_head=False))


def other_width(folder):
    change_json(folder / "config.json", lambda tree: tree["text_config"].update(hidden_size=40))


def no_sentencepiece(folder):
    (folder / "spiece.model").unlink()


def broken_sentencepiece(folder):
    (folder / "spiece.model").write_bytes(b"\x00\xffno model")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_pooling, "vision_use_head = False; only True can be imported"),
        (other_width, r"text_model\.\S+ has shape"),
        (no_sentencepiece, "spiece.model: No such file or directory; a SiglipTokenizer needs it"),
        (broken_sentencepiece, "spiece.model: this is no SentencePiece model; fetch it again"),
    ],
)
def test_a_bad_checkpoint_is_refused_in_one_line(tmp_path, damage, message):
    folder = tmp_path / "checkpoint"
    save_siglip(folder)
    damage(folder)
    with pytest.raises(ModelError, match=message) as error:
        import_transformers(folder, tmp_path / "model")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "model").exists()
