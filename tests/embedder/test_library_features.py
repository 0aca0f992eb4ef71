"""Checkpoints of each family, imported and run by `embedder embed`: vectors are the library's own features.

The library prepares the same files with its own processor and tokeniser.
"""

import library_checkpoints as checkpoints
import numpy as np
import pytest
import torch
from command_runs import run_here
from embedding_runs import embedded
from PIL import Image
from safetensors.torch import load_file

from shards.model_config import load_model_config

SIZES = [(32, 32), (150, 90), (90, 151), (47, 231), (17, 11), (400, 64), (60, 60)]
CAPTIONS = [
    "A RED CAR on the road",
    "Émile's café: two cats, 2 €! “It’s fine”",
    "\U0001f642 smile \U0001f408\u200d\u2b1b 红色的汽车，２",
    ".",
    "two cats sleep on a sofa in the rain, and a red car " * 12 + "far away",
    "fruit",
    "ΣΑΣ &amp; tail\n\tof   lines",
]
PAIRS = [
    checkpoints.clip,
    checkpoints.metaclip_2,
    checkpoints.siglip,
    checkpoints.siglip2,
    checkpoints.chinese_clip,
    checkpoints.altclip,
    checkpoints.aimv2,
    checkpoints.tipsv2,
    checkpoints.tipsv2_gated,
    checkpoints.videoprism,
    checkpoints.vit_and_bert,
    checkpoints.clip_and_xlm_roberta,
    checkpoints.dinov2_and_bert,
    checkpoints.open_clip_native,
    checkpoints.open_clip_with_timm,
    checkpoints.open_clip_with_roberta,
    checkpoints.open_clip_pe,
    checkpoints.open_clip_convnext,
    checkpoints.open_clip_mobileclip,
]
ALONE = [
    checkpoints.vit,
    checkpoints.deit,
    checkpoints.dinov2,
    checkpoints.dinov2_for_smaller_images,
    checkpoints.dinov2_with_registers,
    checkpoints.dinov3,
    checkpoints.timm_vit,
    checkpoints.timm_eva,
    checkpoints.timm_aimv2,
    checkpoints.timm_tipsv2,
    checkpoints.timm_pe,
    checkpoints.timm_convnext,
    checkpoints.timm_resnet,
    checkpoints.timm_swin,
    checkpoints.albert,
    checkpoints.bert,
    checkpoints.roberta,
    checkpoints.distilbert,
    checkpoints.modernbert,
    checkpoints.nomic_bert,
    checkpoints.jina_embeddings_v3,
    checkpoints.eurobert,
]
JOINED = [
    (checkpoints.timm_vit, checkpoints.albert),
    (checkpoints.timm_vit, checkpoints.bert),
    (checkpoints.timm_eva, checkpoints.roberta),
    (checkpoints.timm_eva, checkpoints.distilbert),
]
QUICK = [checkpoints.clip, checkpoints.siglip2, checkpoints.vit_and_bert, checkpoints.open_clip_with_timm]
"""Of the pairs, those that the whole command embeds; test_family_figures.py compares vectors, tokens, cuts of all."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Images of several proportions, the last one grey, with a caption next to each; nothing of them is lost."""
    root, generator = tmp_path_factory.mktemp("source"), np.random.default_rng(0)
    for number, (width, height) in enumerate(SIZES):
        smooth = Image.fromarray(generator.integers(0, 256, (5, 4, 3), dtype=np.uint8)).resize((width, height))
        noise = Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        image = Image.blend(smooth, noise, 0.3)
        (image.convert("L") if number == len(SIZES) - 1 else image).save(root / f"{number}.png")
        (root / f"{number}.txt").write_text(CAPTIONS[number], encoding="utf-8")
    return root


@pytest.fixture
def embedded_by_side(make_run, source, tmp_path):
    """Imports a checkpoint and embeds the folder, by one stage and by three; gives the vectors by side, in order.

    A tower for images that is held whole is one layer, so one stage holds it.
    """

    def embed(checkpoint, *options):
        ended = run_here("model", "import", checkpoint, "--out", tmp_path / "model", *options)
        assert ended.code == 0, ended.stderr
        found, num_layers = [], sum(load_model_config(tmp_path / "model").num_layers.values())
        for stages in (1, min(3, num_layers)):
            store = tmp_path / f"store of {stages}"
            _, rows = embedded(
                make_run(source, model=str(tmp_path / "model"), store=str(store), num_stages=stages, batch_size=3)
            )
            ordered = [rows[f"{number}.png", 0] for number in range(len(SIZES))]
            found.append({side: [row[f"{side}_embedding"] for row in ordered] for side in ("image", "text")})
        for side, vectors in found[0].items():
            assert (vectors[0] is None) == (found[1][side][0] is None)
            assert vectors[0] is None or np.abs(np.array(vectors) - found[1][side]).max() < 1e-6
        return found[0]

    return embed


def check(vectors, features):
    """Check vectors against a library's features, both of length 1; None where its model has no such tower."""
    if features is None:
        assert vectors == [None] * len(SIZES)
        return
    theirs = torch.nn.functional.normalize(features, dim=-1).numpy()
    differences = np.abs(np.array(vectors) - theirs).max(1)
    assert differences.max() < 1e-5, differences
    assert np.abs(theirs[1:] - theirs[0]).max(1).min() > 1e-2, "inputs that differ must matter"


@torch.no_grad()
def features_of(library, source):
    """The library's own features by side."""
    images = [Image.open(source / f"{number}.png").convert("RGB") for number in range(len(SIZES))]
    return {
        "image": library.images and library.images(images),
        "text": library.texts and library.texts(CAPTIONS),
    }


@pytest.mark.medium
@pytest.mark.parametrize(
    "save",
    [*QUICK, *(pytest.param(save, marks=pytest.mark.slow) for save in ALONE)],
    ids=lambda save: save.__name__,
)
def test_vectors_are_the_librarys_own_features(embedded_by_side, source, tmp_path, save):
    features = features_of(save(tmp_path / "checkpoint"), source)
    found = embedded_by_side(tmp_path / "checkpoint")
    for side, vectors in found.items():
        check(vectors, features[side])


@pytest.mark.slow
@pytest.mark.parametrize(("save_vision", "save_text"), JOINED, ids=lambda save: save.__name__)
def test_towers_that_are_joined_keep_their_librarys_features(
    embedded_by_side, source, tmp_path, save_vision, save_text
):
    features = features_of(save_vision(tmp_path / "vision"), source) | {
        "text": features_of(save_text(tmp_path / "text"), source)["text"]
    }
    found = embedded_by_side(tmp_path / "vision", "--text", tmp_path / "text", "--embedding-dim", 24)
    weights = load_file(tmp_path / "model/model.safetensors")
    for side, head in (("image", "vision_head"), ("text", "text_head")):
        check(found[side], features[side] @ weights[f"{head}.projection.weight"].T)
