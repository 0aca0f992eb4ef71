"""Figures of each family of two towers, printed as rows of a table: differences, cuts, tokens, int8, throughput.

    pytest -m slow -s tests/embedder/test_family_figures.py

The rows of docs/models.md are from here.
"""

import io
import statistics
import time

import numpy as np
import pytest
import torch
from picture_decoders import INSTRUCTION, decode, save_checkpoint
from picture_decoders import pictures as picture_samples
from PIL import Image
from test_library_features import PAIRS
from tower_checks import check_every_cut, make_batch, randomise, vectors
from tower_families import FAMILIES, MAX_TOKENS, beside_default, captions_for, save_random_model, tiny
from transformers import (
    AutoConfig,
    AutoModel,
    AutoProcessor,
    EmbeddingGemma2Model,
    Qwen3VLForConditionalGeneration,
)

from embedder.encoders.query_encoder import QueryEncoder
from embedder.models.model_folder import open_model
from embedder.plugins.verify.verify import LIMITS
from embedder.steps.caption_encoder import CaptionEncoder
from shards.activations import Batch, TowerState
from shards.convert import import_checkpoint
from shards.model_config import load_model_config
from shards.reference import load_towers
from shards.shard import load_shard
from shards.shard_specs import whole_model
from shards.towers.tower_kinds import VisionTower

NUM = 64
SIDES_PX = [(1, 1), (1600, 300), (300, 1600), (1, 50), (63, 1), (224, 224), (640, 480), (17, 11)]
WORDS = [
    *("a", "red", "car", "two", "cats", "sleep", "Straße", "café", "naïve", "2026", "3.5", "don't", "e-mail", "x", "I"),
    *("красная", "машина", "猫", "日本語", "赤い", "한국어", "नमस्ते", "مرحبا", "שלום", "γάτα", "🙂", "Ünïcode", "RED"),
]
LEAST_THROUGHPUT = 0.95
BIG = {
    "image_size": 112, "patch_size": 14, "max_patches": 64, "width": 384, "hidden_size": 384, "depth": 4,
    "num_heads": 6, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 1536, "head_dim": 64,
    "embedding_size": 128, "max_position_embeddings": 66, "num_key_value_heads": 6, "num_position_embeddings": 64,
}  # fmt: skip
"""Sizes of towers that are timed; a smaller one measures calls, not layers."""
ROUNDS = 15
FEWER_ROUNDS = 7  # of towers with more layers


def pictures():
    generator = np.random.default_rng(0)
    sizes = [*SIDES_PX, *((int(w), int(h)) for w, h in generator.integers(1, 400, (NUM - len(SIDES_PX), 2)))]
    found = []
    for width, height in sizes:
        smooth = Image.fromarray(generator.integers(0, 256, (5, 4, 3), dtype=np.uint8)).resize((width, height))
        noise = Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        found.append(Image.blend(smooth, noise, 0.3))
    return found


def texts(num, longest=40):
    """Texts of one to `longest` words of all scripts."""
    generator = np.random.default_rng(1)
    return [" ".join(generator.choice(WORDS, 1 + number % longest)) for number in range(num)]


def as_png(image):
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


def captions_of(model):
    preprocess = model.config.preprocess
    end_id = model.config.required_text.end_id
    return CaptionEncoder(model.tokenizer_json, preprocess.max_caption_tokens, end_id, preprocess.caption_prompt)


def as_state(ids):
    lengths = torch.tensor([len(each) for each in ids])
    return TowerState(torch.from_numpy(np.concatenate([np.asarray(each, np.int32) for each in ids])), lengths)


def library_ids(folder, given, length):
    """Token ids by the checkpoint's own tokeniser, padded to a length if there is one."""
    if (folder / "open_clip_config.json").is_file():
        import open_clip

        tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
        own = getattr(tokenizer, "tokenizer", None)  # of transformers, where texts have a tower of its
        padding_id = 0 if own is None else own.pad_token_id
        return [trimmed(each.tolist(), padding_id) for each in tokenizer(given)]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    padding = {} if length is None else {"padding": "max_length", "max_length": length}
    return tokenizer(given, truncation=True, **padding)["input_ids"]


def trimmed(ids, padding_id):
    kept = list(ids)
    while kept and kept[-1] == padding_id:
        kept.pop()
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("save", PAIRS, ids=lambda save: save.__name__)
@torch.no_grad()
def test_a_family_has_its_librarys_vectors_tokens_and_cuts(save, tmp_path, capsys):
    images, captions = pictures(), texts(NUM)
    library = save(tmp_path / "checkpoint")
    import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
    model = open_model(str(tmp_path / "model"))
    config, encoder = model.config, captions_of(open_model(str(tmp_path / "model")))
    shard = load_shard(model.folder, whole_model(config))
    found = {
        "images": torch.from_numpy(QueryEncoder(model).encode_image([as_png(image) for image in images])),
        "texts": shard(Batch(None, as_state([encoder.encode(each) for each in captions]))).text.values,
    }
    theirs = {"images": torch.cat([library.images([each]) for each in images]), "texts": library.texts(captions)}
    differences = {
        side: float((rows - torch.nn.functional.normalize(theirs[side], dim=-1)).abs().max())
        for side, rows in found.items()
    }
    given = texts(1000)
    is_fixed, padding = config.required_text.has_fixed_length, config.required_text.padding_id
    own = [list(encoder.encode(each)) for each in given]
    theirs = library_ids(tmp_path / "checkpoint", given, config.preprocess.max_caption_tokens if is_fixed else None)
    ends = padding if is_fixed else None  # open_clip pads all alike
    num_equal = sum(trimmed(ours, ends) == trimmed(ids, ends) for ours, ids in zip(own, theirs, strict=True))
    batch = make_batch(config, [encoder.encode(each).tolist() for each in captions[:9]])
    check_every_cut(model.folder, batch)
    num_cuts = int(np.prod([config.num_layers[side] + 1 for side in ("vision", "text")])) + 1
    exact, int8 = (
        vectors(load_shard(model.folder, whole_model(config), dtype=each)(batch)) for each in ("float32", "int8")
    )
    cosine = min(float((exact[side] * int8[side]).sum(-1).min()) for side in exact)
    with capsys.disabled():
        print(
            f"\n| {save.__name__} | {differences['images']:.0e} | {differences['texts']:.0e} | {num_cuts} | "
            f"{num_equal:,} of {len(given):,} | {cosine:.4f} |"
        )
    assert max(differences.values()) < 1e-5
    assert num_equal == len(given)
    assert cosine >= LIMITS["int8"].min_cosine


def spent(call):
    """CPU seconds of a call."""
    started = time.thread_time()
    call()
    return time.thread_time() - started


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [each for each in FAMILIES if not {"decoder", "mrope_section"} & set(each.model_fields)],
    ids=lambda family: family.model_fields["family"].default,
)  # fmt: skip
@torch.inference_mode()
def test_a_family_computes_as_fast_as_its_library(family, tmp_path, capsys):
    """CPU time of one thread, in turns; the library is given the same pixels and ids."""
    config = beside_default(family)
    side = "vision" if issubclass(family, VisionTower) else "text"
    tower = tiny(family, **BIG)
    keep = {"vision": None, "text": None, side: tower}
    preprocess = config.preprocess.model_copy(
        update={"image_size": BIG["image_size"], "max_caption_tokens": MAX_TOKENS}
    )
    config = config.model_copy(update=keep | {"preprocess": preprocess, "embedding_dim": 256})
    save_random_model(config, tmp_path)
    batch = make_batch(config, [] if side == "vision" else 4 * captions_for(config), num_images=8)
    ours, theirs = load_shard(tmp_path, whole_model(config)), load_towers(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for model in (ours, theirs):
            model(batch)
        ratios = [spent(lambda: theirs(batch)) / spent(lambda: ours(batch)) for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(before)
    ratio = statistics.median(ratios)
    with capsys.disabled():
        print(f"\n| {tower.label}, {side} | {ratio:.2f} |")
    assert ratio >= LEAST_THROUGHPUT


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "embedding_gemma2"])
@torch.inference_mode()
def test_a_decoder_with_eyes_computes_as_fast_as_its_library(family, tmp_path, capsys):
    """CPU time of one thread, in turns, of pictures of one size; the library is given the same patches."""
    checkpoint = save_checkpoint(tmp_path / "checkpoint", family)
    config = AutoConfig.from_pretrained(checkpoint)
    vision = {"hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "out_hidden_size": 512}
    text = {"hidden_size": 512, "intermediate_size": 1024}
    if family == "embedding_gemma2":
        vision = {"hidden_size": 384, "intermediate_size": 1024, "head_dim": 128, "use_clipped_linears": False}
        text |= {"embedding_dim": 512, "hidden_size_per_layer_input": 128}
    for section, changes in ((config.vision_config, vision), (config.text_config, text)):
        for key, value in changes.items():
            setattr(section, key, value)
    torch.manual_seed(0)
    kind = EmbeddingGemma2Model if family == "embedding_gemma2" else Qwen3VLForConditionalGeneration
    randomise(kind(config)).save_pretrained(checkpoint)
    import_checkpoint(checkpoint, tmp_path / "model")
    library, processor = AutoModel.from_pretrained(checkpoint).eval(), AutoProcessor.from_pretrained(checkpoint)
    model = load_model_config(tmp_path / "model")
    images = picture_samples([(100, 80)] * 4)
    if family == "embedding_gemma2":
        given = processor(images=[[each] for each in images], return_tensors="pt")
    else:
        given = conversations(processor, images)
    ours, batch = load_shard(tmp_path / "model", whole_model(model)), Batch(decode(model, images), None)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for call in (lambda: ours(batch), lambda: library(**given)):
            call()
        ratios = [spent(lambda: library(**given)) / spent(lambda: ours(batch)) for _ in range(FEWER_ROUNDS)]
    finally:
        torch.set_num_threads(before)
    ratio = statistics.median(ratios)
    with capsys.disabled():
        print(f"\n| {model.vision.label}, pictures | {ratio:.2f} |")
    assert ratio >= LEAST_THROUGHPUT


def conversations(processor, images):
    """Inputs of a conversation around each picture, as the processor makes them."""
    system = {"role": "system", "content": [{"type": "text", "text": INSTRUCTION}]}
    messages = [system, {"role": "user", "content": [{"type": "image", "image": ""}]}]
    form = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return processor(text=[form] * len(images), images=images, return_tensors="pt")
