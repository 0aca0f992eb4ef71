"""Query towers of every family: what ONNX Runtime computes is what torch does, for every length and batch size."""

import io
import json
import logging

import library_checkpoints as checkpoints
import numpy as np
import pytest
from command_runs import run_here
from PIL import Image
from tower_families import FAMILIES, MAX_TOKENS, SIDE_PX, captions_of_every_length, save_random_model, tiny

from embedder.encoders.onnx_encoder import OnnxQueryEncoder
from embedder.encoders.query_encoder import QueryEncoder
from embedder.encoders.query_tower_export import export_query_towers
from embedder.errors import ConfigError
from embedder.models.model_folder import open_model
from embedder.store.files import StoreFiles
from embedder.store.layout import StoreInfo
from embedder.store.publish.query_towers import find_towers, towers_path
from shards.fingerprint import preprocess_fingerprint
from shards.model_config import ModelConfig
from shards.preprocess import PreprocessConfig
from shards.towers.albert import AlbertTower
from shards.towers.bert import RobertaTower
from shards.towers.clip import ClipTextTower
from shards.towers.distilbert import DistilBertTower
from shards.towers.eva import EvaTower
from shards.towers.modernbert import ModernBertTower
from shards.towers.naflex import NaFlexTower
from shards.towers.siglip import SiglipTextTower
from shards.towers.tower_kinds import VisionTower
from shards.towers.vit import VitTower

TOLERANCE = 1e-5
BATCHES = (1, 2, 33, 64)
SIZES = [(32, 32), (150, 90), (90, 151), (47, 231), (300, 11), (400, 64), (60, 60), (33, 70)]
"""Widths and heights; none gives a grid one patch wide, whose positions torch 2.15 resizes wrongly."""

VARIANTS = [
    tiny(AlbertTower, num_hidden_groups=2, inner_group_num=2, pool="mean"),
    tiny(AlbertTower, pool="cls"),
    tiny(RobertaTower, pool="mean", pad_token_id=1),
    tiny(DistilBertTower, pool="cls"),
    tiny(AlbertTower, pool="last"),
    tiny(RobertaTower, pool=("max", "last", "weighted_mean", "mean_sqrt_len"), pad_token_id=1),
    tiny(ModernBertTower, local_attention=6, pool="cls"),
    tiny(ModernBertTower, local_attention=40, global_attn_every_n_layers=2, pool="mean"),
    tiny(ClipTextTower, hidden_act="gelu"),
    tiny(VitTower, stem="conv", stem_blocks=(0, 1, 0), class_token=False, pool="avg"),
    tiny(VitTower, pooler="tanh", norm="rms", mlp="swiglu_packed", num_reg_tokens=2, init_values=0.1),
    tiny(VitTower, pool="map", pre_norm=True, qk_norm=True, activation="quick_gelu"),
    tiny(VitTower, pool="avgmax", fc_norm=True, embed_norm=True, no_embed_class=True),
    tiny(EvaTower, pool="avg", mlp="swiglu", init_values=0.1),
    tiny(NaFlexTower, pos_embed_interp_mode="bilinear", pool="avg"),
    tiny(NaFlexTower, pos_embed_ar_preserving=True, class_token=True, num_reg_tokens=2, pool="token"),
    tiny(NaFlexTower, pos_embed_antialias=False, pos_embed_align_corners=True),
    tiny(NaFlexTower, factorized_pos_embed=True),
    tiny(NaFlexTower, pos_embed="none"),
]
PROJECTIONS = [{}, {"text_projection": "mlp", "vision_projection": "mlp"}, {"projection_bias": True}]
PROJECTIONS += [{"text_projection": name} for name in ("tanh", "relu", "gelu")]


def config_of(tower, **top):
    """A model of one tower."""
    is_vision = isinstance(tower, VisionTower)
    resize = "patches" if is_vision and tower.patch_px is not None else "crop"
    length = tower.max_tokens if isinstance(tower, SiglipTextTower) else MAX_TOKENS
    preprocess = PreprocessConfig(image_size=SIDE_PX, max_caption_tokens=length, resize=resize, mean=(0.4, 0.5, 0.6))
    towers = {"vision": tower, "text": None} if is_vision else {"vision": None, "text": tower}
    return ModelConfig(name="tiny", trained=False, embedding_dim=24, preprocess=preprocess, **towers, **top)


def encoders(folder, store):
    """Torch's encoder of a model folder, and the one of its query towers in a store."""
    model, files = open_model(str(folder)), StoreFiles(store)
    tokenizer = (model.tokenizer_json or "").encode()
    info = StoreInfo(
        model=model.uri,
        model_fingerprint=model.fingerprint,
        preprocess_fingerprint=preprocess_fingerprint(model.config.preprocess, tokenizer, 5.0, 1),
        segment_s=5.0,
        frames_per_segment=1,
        dtype="float32",
    )
    assert export_query_towers(files, info, force=True) == towers_path(info)
    (manifest,) = (store / towers_path(info)).rglob("manifest.json")
    named = set(json.loads(manifest.read_text())["files"])
    assert named == {each.name for each in manifest.parent.iterdir()} - {"manifest.json"} >= {"config.json"}
    by_torch = QueryEncoder(model)
    return by_torch, OnnxQueryEncoder(find_towers(files, info), model.uri, lambda: by_torch)


def check_texts(by_torch, by_onnx, texts):
    """Check that both give the same vectors, of single texts and of batches."""
    expected = by_torch.encode_text(texts)
    assert np.abs(expected[1:] - expected[0]).max(1).min() > 1e-3, "texts that differ must matter"
    for text, vector in zip(texts, expected, strict=True):
        assert np.abs(by_onnx.encode_text([text])[0] - vector).max() < TOLERANCE
    for size in BATCHES:
        repeated = [texts[number % len(texts)] for number in range(size)]
        found = by_onnx.encode_text(repeated)
        assert np.abs(found - by_torch.encode_text(repeated)).max() < TOLERANCE
        assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-5


def check_images(by_torch, by_onnx):
    """Check that both give the same vectors of images of many proportions, one by one and in batches."""
    images = [png(size, seed) for seed, size in enumerate(SIZES)]
    for size in BATCHES:
        repeated = [images[number % len(images)] for number in range(size)]
        found, expected = by_onnx.encode_image(repeated), by_torch.encode_image(repeated)
        assert np.abs(found - expected).max() < TOLERANCE
    assert np.abs(expected[1 : len(SIZES)] - expected[0]).max(1).min() > 1e-3, "images that differ must matter"


def check_encoders(by_torch, by_onnx, texts):
    """Check both towers, as far as the model has them, and that none of them came from torch."""
    if by_torch.model.config.text is not None:
        check_texts(by_torch, by_onnx, texts)
    if by_torch.model.config.vision is not None:
        check_images(by_torch, by_onnx)
    assert "_torch_encoder" not in vars(by_onnx)
    assert by_onnx.probability(0.2) == pytest.approx(by_torch.probability(0.2))


def png(size, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize(size).save(buffer, "PNG")
    return buffer.getvalue()


# A tower that ends in the text tower's layers isn't exported: `tests/shards/towers/test_qwen3_vl.py`.
EXPORTED = [each for each in map(tiny, FAMILIES) if getattr(each, "shared_decoder", None) is None]


@pytest.mark.medium
@pytest.mark.parametrize("tower", [*EXPORTED, *VARIANTS], ids=lambda tower: type(tower).model_fields["family"].default)
def test_every_family_encodes_as_torch_does(tower, tmp_path):
    config = config_of(tower)
    folder = save_random_model(config, tmp_path / "model")
    check_encoders(
        *encoders(folder, tmp_path / "store"), captions_of_every_length(config.preprocess.max_caption_tokens)
    )


@pytest.mark.medium
@pytest.mark.parametrize("top", PROJECTIONS, ids=lambda top: "-".join(map(str, top.values())) or "linear")
def test_projections_are_inside(top, tmp_path):
    for tower in (tiny(AlbertTower), tiny(VitTower)):
        folder = save_random_model(config_of(tower, **top), tmp_path / tower.family)
        check_encoders(*encoders(folder, tmp_path / "store"), captions_of_every_length(5))


LIBRARY = [
    *(checkpoints.siglip2, checkpoints.chinese_clip, checkpoints.altclip, checkpoints.tipsv2),
    *(checkpoints.jina_embeddings_v3, checkpoints.dinov2_and_bert, checkpoints.open_clip_with_timm),
    *(checkpoints.timm_eva, checkpoints.dinov3, checkpoints.modernbert),
]
"""Of those that test_library_features.py and test_family_figures.py import: each family is exported above, too."""
CAPTIONS = [
    "A RED CAR on the road",
    "Émile's café: two cats, 2 €!",
    "two cats sleep on a sofa in the rain, and a red car " * 12 + "far away",
    "fruit",
]


@pytest.mark.slow
@pytest.mark.parametrize("save", LIBRARY, ids=lambda save: save.__name__)
def test_imported_checkpoints_encode_as_torch_does(save, tmp_path):
    save(tmp_path / "checkpoint")
    ended = run_here("model", "import", tmp_path / "checkpoint", "--out", tmp_path / "model")
    assert ended.code == 0, ended.stderr
    check_encoders(*encoders(tmp_path / "model", tmp_path / "store"), CAPTIONS)


def test_a_side_without_a_tower_is_refused_in_the_same_words(tmp_path):
    by_torch, by_onnx = encoders(save_random_model(config_of(tiny(AlbertTower)), tmp_path / "m"), tmp_path / "store")
    for query in (lambda each: each.encode_image([b"x"]), lambda each: each.encode_text([" "])):
        with pytest.raises(ConfigError) as expected:
            query(by_torch)
        with pytest.raises(ConfigError, match=str(expected.value).replace("(", r"\(").replace(")", r"\)")):
            query(by_onnx)


def test_a_damaged_tower_is_told_and_torch_runs_in_its_place(tmp_path, caplog):
    by_torch, by_onnx = encoders(save_random_model(config_of(tiny(AlbertTower)), tmp_path / "m"), tmp_path / "store")
    (weights,) = (tmp_path / "store").rglob("text.onnx.data")
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with caplog.at_level(logging.INFO):
        found = by_onnx.encode_text(["w5 w6"])
    assert np.array_equal(found, by_torch.encode_text(["w5 w6"]))
    assert "text.onnx.data: it is missing, or not of the" in caplog.text
    assert "export-query-towers --force" in caplog.text
