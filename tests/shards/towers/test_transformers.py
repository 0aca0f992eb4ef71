"""Checkpoints as transformers saves them, imported: the library's own features, every cut, every part."""

import shutil

import library_checkpoints as checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_tokenizers import ODD_CAPTIONS, padded
from tower_checks import check_against, check_every_cut, check_every_part_matters, check_refused, make_batch

from embedder.steps.caption_encoder import CaptionEncoder
from shards.convert import import_checkpoint
from shards.fingerprint import model_fingerprint
from shards.model_config import load_model_config

SAVERS = [
    checkpoints.clip,
    checkpoints.metaclip_2,  # its captions end with the id that CLIP's rule takes for an old mistake
    checkpoints.siglip,
    checkpoints.siglip2,
    checkpoints.altclip,
    checkpoints.aimv2,
    checkpoints.tipsv2,
    checkpoints.vit,
    checkpoints.albert,
    checkpoints.distilbert,
    checkpoints.nomic_bert,
    checkpoints.jina_embeddings_v3,
    checkpoints.eurobert,
]


@pytest.fixture(scope="module", params=SAVERS, ids=lambda save: save.__name__)
def imported(request, tmp_path_factory):
    """Folder with a `checkpoint` and the `model` made of it."""
    folder = tmp_path_factory.mktemp("imported")
    request.param(folder / "checkpoint")
    import_checkpoint(folder / "checkpoint", folder / "model")
    return folder


@pytest.fixture
def batch(imported):
    config = load_model_config(imported / "model")
    if config.text is None:
        return make_batch(config, [])
    tokenizer_json = (imported / "model/tokenizer.json").read_text(encoding="utf-8")
    encoder = CaptionEncoder(tokenizer_json, config.preprocess.max_caption_tokens, config.text.end_id)
    return make_batch(config, [encoder.encode(caption).tolist() for caption in ODD_CAPTIONS])


def library_features(folder, config):
    """The library's features of a state, by side."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder).eval()
    mean, std = torch.tensor(config.preprocess.mean), torch.tensor(config.preprocess.std)

    def images(state):
        pixels = ((state.values / 255 - mean) / std).permute(0, 3, 1, 2)
        return (model if config.text is None else model.get_image_features)(pixels).pooler_output

    def captions(state):
        inputs = padded(state, 0)
        if config.text.has_fixed_length:
            del inputs["attention_mask"]  # such towers attend to the padding
        found = (model if config.vision is None else model.get_text_features)(**inputs)
        if getattr(found, "pooler_output", None) is not None:
            return found.pooler_output
        mask = inputs["attention_mask"][:, :, None]
        return (found.last_hidden_state * mask).sum(1) / mask.sum(1)

    return {side: {"vision": images, "text": captions}[side] for side in config.towers}


def test_an_imported_model_gives_transformers_own_features(imported, batch):
    config = load_model_config(imported / "model")
    check_against(imported / "model", batch, library_features(imported / "checkpoint", config))


def test_names_of_the_classes_and_those_of_published_files_give_the_same_model(imported, tmp_path):
    """transformers writes the names that a model was published with, and reads both."""
    from transformers import AutoModel

    tensors = AutoModel.from_pretrained(imported / "checkpoint").state_dict()
    own = shutil.copytree(imported / "checkpoint", tmp_path / "own")
    save_file({name: each.contiguous() for name, each in tensors.items()}, own / "model.safetensors")
    import_checkpoint(own, tmp_path / "model")
    assert model_fingerprint(tmp_path / "model") == model_fingerprint(imported / "model")


@pytest.mark.parametrize("imported", [checkpoints.tipsv2], indirect=True)
def test_a_temperature_becomes_the_scale_of_the_logits(imported, tmp_path):
    temperature = load_file(imported / "checkpoint/model.safetensors")["temperature"]
    scale = load_file(imported / "model/model.safetensors")["logit_scale"]
    assert scale.exp() * temperature == pytest.approx(1, abs=1e-6)
    own = shutil.copytree(imported / "checkpoint", tmp_path / "own")
    tensors = load_file(own / "model.safetensors")
    for bad, message in ((torch.tensor(-0.1), "temperature = -0.1.*above 0"), (torch.tensor(float("nan")), "NaN|nan")):
        save_file(tensors | {"temperature": bad}, own / "model.safetensors")
        check_refused(import_checkpoint, own, tmp_path / "model", message)
    del tensors["temperature"]  # as published
    save_file(tensors, own / "model.safetensors")
    import_checkpoint(own, tmp_path / "model")
    assert "logit_scale" not in load_file(tmp_path / "model/model.safetensors")


def test_every_cut_gives_the_bits_of_the_unsplit_towers(imported, batch):
    check_every_cut(imported / "model", batch)


@pytest.mark.medium
def test_no_part_can_be_left_out(imported, batch, tmp_path):
    check_every_part_matters(imported / "model", batch, tmp_path)
