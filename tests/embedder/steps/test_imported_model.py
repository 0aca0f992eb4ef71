"""A checkpoint of transformers, imported and run through the whole pipeline, gives transformers' own features."""

from io import BytesIO

import numpy as np
import pytest
import samples
import torch
from embedding_runs import embedded
from library_versions import skip_where_torch_rounds_otherwise
from PIL import Image
from tokenizers import Tokenizer

from shards.convert import import_transformers
from shards.train_tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random ViT + ALBERT with poolers, as `save_pretrained` writes it, and its model and processors."""
    from transformers import (
        AlbertConfig,
        PreTrainedTokenizerFast,
        VisionTextDualEncoderConfig,
        VisionTextDualEncoderModel,
        ViTConfig,
        ViTImageProcessor,
    )

    vit = ViTConfig(
        image_size=64, patch_size=16, hidden_size=48, num_hidden_layers=5, num_attention_heads=4, intermediate_size=96
    )
    albert = AlbertConfig(
        vocab_size=300,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
    )
    torch.manual_seed(3)
    config = VisionTextDualEncoderConfig.from_vision_text_configs(vit, albert, projection_dim=24)
    model = VisionTextDualEncoderModel(config).eval()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    backend = Tokenizer.from_str(train_tokenizer(samples.SENTENCES, 300))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    processor = ViTImageProcessor(size={"height": 64, "width": 64})
    folder = tmp_path_factory.mktemp("hf") / "dual-encoder"
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)
    return folder, model, tokenizer, processor


def normalised(features):
    pooled = features.pooler_output
    return (pooled / pooled.norm(dim=-1, keepdim=True)).numpy()


@pytest.mark.parametrize(("form", "size"), [("PNG", (64, 64)), ("PNG", (150, 90)), ("JPEG", (640, 480))])
def test_the_pipeline_gives_the_features_of_transformers(make_run, checkpoint, tmp_path, form, size):
    if size != (64, 64):
        skip_where_torch_rounds_otherwise()
    folder, model, tokenizer, processor = checkpoint
    imported = tmp_path / "model"
    import_transformers(folder, imported)
    source = tmp_path / "in"
    source.mkdir()
    images = [samples.make_image(seed, *size) for seed in range(6)]
    captions = samples.SENTENCES[:6]
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        file = BytesIO()
        image.save(file, form)
        (source / f"{number}.{form.lower()}").write_bytes(file.getvalue())
        (source / f"{number}.txt").write_text(caption)
        images[number] = Image.open(file).convert("RGB")
    _, rows = embedded(make_run(source, model=str(imported)))
    found = [rows[f"{number}.{form.lower()}", 0] for number in range(6)]
    with torch.inference_mode():
        pixels = processor(images, return_tensors="pt")
        expected_images = normalised(model.get_image_features(**pixels))
        tokens = tokenizer(captions, padding=True, return_tensors="pt")
        inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        expected_texts = normalised(model.get_text_features(**inputs))
    assert np.abs(np.array([row["image_embedding"] for row in found]) - expected_images).max() < 1e-5
    assert np.abs(np.array([row["text_embedding"] for row in found]) - expected_texts).max() < 1e-5
