"""open_clip: its checkpoints against its own features and preprocessing, every cut, every part."""

import json
import re

import numpy as np
import open_clip
import pytest
import torch
from open_clip.push_to_hf_hub import save_for_hf
from PIL import Image
from safetensors.torch import load_file
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from tower_checkpoints import CAPTIONS, END, NUM_TOKENS, byte_level_bpe
from tower_checks import check_against, check_every_cut, check_every_part_matters, make_batch, randomise
from transformers import AutoConfig, PreTrainedTokenizerFast

from embedder.media.images import resize_image
from embedder.media.resize import ResizeSpec
from embedder.steps.caption_encoder import CaptionEncoder
from shards.convert.open_clip_model import import_open_clip
from shards.layouts import Normalise
from shards.model_config import load_model_config
from shards.model_errors import ModelError

SIZE, CONTEXT = 32, 16
VISION = {"image_size": SIZE, "patch_size": 8, "layers": 2, "width": 48, "head_width": 12, "mlp_ratio": 2.0}
TEXT = {"context_length": CONTEXT, "vocab_size": NUM_TOKENS, "width": 32, "heads": 4, "layers": 2, "mlp_ratio": 2.0}


@register_model
def vit_of_the_open_clip_test(pretrained=False, **settings):
    del pretrained
    for key in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        settings.pop(key, None)
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4, "mlp_ratio": 2}
    model = VisionTransformer(**(sizes | settings))
    model.default_cfg = {}
    return model


HF = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
WHOLE = {"timm_model_name": "test_convnext", "image_size": SIZE}
TIMM = {"timm_model_name": "vit_of_the_open_clip_test", "image_size": SIZE}
TANH = {"norm_kwargs": {"eps": 1e-3}, "act_kwargs": {"approximate": "tanh"}}


def sides_cfg(vision=None, text=None, **top):
    """Changes of the plain model's configuration."""
    sides = {"vision_cfg": vision and VISION | vision, "text_cfg": text and TEXT | text}
    return {name: each for name, each in sides.items() if each} | top


def timm_cfg(pool, projection, text=None, **top):
    vision = {"vision_cfg": TIMM | {"timm_pool": pool, "timm_proj": projection}, "custom_text": True}
    return sides_cfg(text=text, **vision, **top)


def hf_cfg(name, pooler, **more):
    named = {"hf_model_name": name, "hf_tokenizer_name": name, "context_length": CONTEXT, "hf_pooler_type": pooler}
    return {"text_cfg": named | more}


MODELS = {
    "plain": {},
    "quick gelu, layer scale, nonscalar": sides_cfg(
        {"ls_init_value": 1e-4, "patch_dropout": 0.5}, quick_gelu=True, nonscalar_logit_scale=True, init_logit_bias=-10
    ),
    "no norm in front, mean, norm after it": sides_cfg(
        {"no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True}
    ),
    "mean after the norm, tanh, eps, own text": sides_cfg(
        {"pool_type": "avg"} | TANH, {"proj_bias": True, "pool_type": "eos", "eos_id": END} | TANH, custom_text=True
    ),
    "timm, linear": timm_cfg("avg", "linear"),
    "timm, classifier": timm_cfg("token", None),
    "MobileCLIP": sides_cfg(text={"no_causal_mask": True}, vision_cfg=WHOLE | {"timm_proj": None}, custom_text=True),
    "a whole ConvNeXt, two layers": {"vision_cfg": WHOLE | {"timm_pool": "", "timm_proj": "mlp"}, "custom_text": True},
    "a whole ConvNeXt, two layers, all biases": sides_cfg(
        text={"proj_bias": True}, vision_cfg=WHOLE | {"timm_proj": "mlp", "timm_proj_bias": True}, custom_text=True
    ),
    "SigLIP": timm_cfg(
        "map",
        "none",
        {"hf_tokenizer_name": "timm/ViT-B-16-SigLIP", "tokenizer_kwargs": {"clean": "canonicalize"}}
        | {"no_causal_mask": True, "pool_type": "last", "proj_bias": True, "norm_kwargs": {"eps": 1e-6}},
        embed_dim=48,
        init_logit_bias=-10,
    ),
    "RoBERTa, mean, two layers": hf_cfg("roberta", "mean_pooler"),
    "BERT, pooler, one layer": hf_cfg("bert", "cls_pooler", hf_proj_type="linear"),
    "CLIPA": sides_cfg(
        text={"hf_tokenizer_name": "bert-base-uncased", "tokenizer_kwargs": {"strip_sep_token": True}}
        | {"no_causal_mask": True, "pool_type": "last"}
    ),
}


def build(cfg):
    """Make open_clip's model of a configuration, which its factory would take from a folder."""
    settings = dict(cfg)
    is_custom = settings.pop("custom_text", False) or "hf_model_name" in settings["text_cfg"]
    torch.manual_seed(0)
    kind = open_clip.CustomTextCLIP if is_custom else open_clip.CLIP
    return randomise(kind(**settings))


def save(folder, model_cfg, model, **preprocess):
    """Save a model as open_clip's folders on the hub look; its pickle next to it is left out."""
    cfg = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)} | preprocess
    model.visual.image_mean, model.visual.image_std, model.visual.preprocess_cfg = cfg["mean"], cfg["std"], cfg

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(),
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        sep_token="<|endoftext|>",
        pad_token=byte_level_bpe().id_to_token(1),
    )
    save_for_hf(model, tokenizer, model_cfg, folder, safe_serialization=True)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("open_clip") / "checkpoint"
    model_cfg = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": TEXT} | MODELS[request.param]
    text_cfg = model_cfg["text_cfg"]
    if "hf_model_name" in text_cfg:
        named = folder.parent / text_cfg["hf_model_name"]
        AutoConfig.for_model(named.name, **HF).save_pretrained(named)
        model_cfg["text_cfg"] = text_cfg | {"hf_model_name": str(named), "hf_model_pretrained": False}
    model = build(model_cfg)
    return save(folder, model_cfg, model), model


@pytest.fixture(scope="module")
def imported(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "open_clip"
    import_open_clip(checkpoint[0], folder)
    return folder


@pytest.fixture
def batch(imported):
    config = load_model_config(imported)
    encoder = CaptionEncoder(
        (imported / "tokenizer.json").read_text(), config.preprocess.max_caption_tokens, config.text.end_id
    )
    return make_batch(config, [encoder.encode(caption).tolist() for caption in CAPTIONS])


def test_an_imported_model_gives_open_clips_own_features(checkpoint, imported, batch):
    folder, model = checkpoint
    preprocess = load_model_config(imported).preprocess
    mean, std = torch.tensor(preprocess.mean), torch.tensor(preprocess.std)
    text_cfg = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]["text_cfg"]
    # Where no tokeniser is named, open_clip takes its own, of another vocabulary.
    is_named = "hf_tokenizer_name" in text_cfg
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}") if is_named else padded_by_zeros

    def images(state):
        return model.encode_image(((state.values / 255 - mean) / std).permute(0, 3, 1, 2))

    check_against(imported, batch, {"vision": images, "text": lambda state: model.encode_text(tokenizer(CAPTIONS))})


def padded_by_zeros(captions):
    ids = torch.zeros(len(captions), CONTEXT, dtype=torch.long)
    for row, caption in zip(ids, captions, strict=True):
        found = byte_level_bpe().encode(caption).ids[: CONTEXT - 1]
        row[: len(found)] = torch.tensor(found)
        row[len(found) - 1] = END
    return ids


def test_scale_and_bias_of_the_logits_are_kept_as_scalars(checkpoint, imported):
    weights = load_file(imported / "model.safetensors")
    names = [name for name in ("logit_scale", "logit_bias") if getattr(checkpoint[1], name) is not None]
    assert {name: each.tolist() for name, each in weights.items() if name.startswith("logit_")} == dict.fromkeys(
        names, 1.25
    )


@pytest.mark.medium
def test_every_cut_gives_the_bits_of_the_unsplit_towers(imported, batch):
    check_every_cut(imported, batch)


@pytest.mark.slow
def test_no_part_can_be_left_out(imported, batch, tmp_path):
    check_every_part_matters(imported, batch, tmp_path)


HARD_CAPTIONS = [
    *CAPTIONS,
    "  It's\ta RED_car,   isn't it?! ",
    "(two) cats'n dogs & 3 fruits <br>",
    "été à Zürich",
    "",
    "“Curly” ‘quotes’, it’s ﬁne",
    "ＦＵＬＬ　ＷＩＤＴＨ，２！ 红色的汽车。",
    "cats &amp; dogs &quot;&lt;3&quot; &amp;amp; ﬂowers",
    "ΣΑΣ e\u0301 a\u0007b \ufeffc \U0001f642",
]


@pytest.mark.parametrize("clean", ["whitespace", "lower", "canonicalize"])
def test_captions_are_cleaned_as_open_clip_does(tmp_path, clean):
    text_cfg = TEXT | {"hf_tokenizer_name": "any", "tokenizer_kwargs": {"clean": clean}}
    model_cfg = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": text_cfg}
    folder = save(tmp_path / "checkpoint", model_cfg, build(model_cfg))
    import_open_clip(folder, tmp_path / "model")
    encoder = CaptionEncoder((tmp_path / "model" / "tokenizer.json").read_text(), CONTEXT, END)
    theirs = open_clip.get_tokenizer(f"local-dir:{folder}")(HARD_CAPTIONS).tolist()
    ours = [encoder.encode(caption).tolist() for caption in HARD_CAPTIONS]
    assert ours == [ids[: ids.index(END) + 1] for ids in theirs]


@pytest.mark.medium
def test_a_folder_without_a_tokeniser_gets_open_clips_own(tmp_path):
    model_cfg = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": TEXT | {"vocab_size": 49408}}
    folder = save(tmp_path / "checkpoint", model_cfg, build(model_cfg))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    config = import_open_clip(folder, tmp_path / "model")
    assert config.text.eos_token_id == 49407
    encoder = CaptionEncoder((tmp_path / "model" / "tokenizer.json").read_text(), CONTEXT, 49407)
    # CLIP's names of its marks are text like other to open_clip's tokeniser.
    captions = [*HARD_CAPTIONS, "<|startoftext|>a cat<|endoftext|>", "<start_of_text>a dog"]
    theirs = open_clip.SimpleTokenizer(context_length=CONTEXT)(captions)
    for caption, ids in zip(captions, theirs.tolist(), strict=True):
        found = encoder.encode(caption).tolist()
        assert found + [0] * (CONTEXT - len(found)) == ids, caption


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "random"])
@pytest.mark.parametrize("resize_mode", ["shortest", "squash", "longest"])
def test_images_are_prepared_to_the_bit_as_open_clip_does(tmp_path, resize_mode, interpolation):
    model_cfg = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": TEXT}
    settings = {"resize_mode": resize_mode, "interpolation": interpolation}
    folder = save(tmp_path / "checkpoint", model_cfg, build(model_cfg), **settings)
    preprocess = import_open_clip(folder, tmp_path / "model").preprocess
    assert (preprocess.resampler, preprocess.reduced_decode) == ("pillow", False)
    rule = ResizeSpec(SIZE, preprocess.resize, preprocess.interpolation, preprocess.reduced_decode)
    prepare = open_clip.image_transform(SIZE, False, preprocess.mean, preprocess.std, **settings)
    normalise = Normalise(preprocess)
    generator = np.random.default_rng(0)
    for size in ((33, 47), (200, 61), (32, 32), (7, 19), (500, 333), (900, 20)):
        image = Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
        pixels = torch.frombuffer(bytearray(resize_image(image, rule).data), dtype=torch.uint8).view(1, SIZE, SIZE, 3)
        assert torch.equal(normalise(pixels, torch.float32)[0], prepare(image)), size


def changed(folder, **keys):
    path = folder / "open_clip_config.json"
    tree = json.loads(path.read_text())
    for key, value in keys.items():
        *sections, last = key.split("__")
        section = tree["model_cfg"]
        for each in sections:
            section = section[each]
        section[last] = value
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vision_cfg__attentional_pool": True}, "vision_cfg.attentional_pool: Input should be False"),
        (
            {"vision_cfg__layers": [3, 4, 6, 3]},
            "a ResNet of open_clip's own, which isn't built here; its ViTs and towers of timm are: import another "
            "model, or run this one next to a main model (docs/servables.md)",
        ),
        ({"vision_cfg__timm_model_name": "vit_of_nobody"}, "timm_model_name = 'vit_of_nobody'"),
        ({"vision_cfg__timm_model_name": "convnext_atto"}, "which a timm model + CLIP text of that"),
        ({"vision_cfg__timm_model_name": "convnext_atto", "vision_cfg__timm_pool": "rot_attn"}, "'rot_attn'"),
        ({"vision_cfg__image_size": 40}, "visual.positional_embedding has shape"),
        ({"multimodal_cfg": {}}, "multimodal_cfg"),
        ({"text_cfg__embed_cls": True}, "text_cfg.embed_cls"),
        ({"text_cfg__new_key": 1}, "text_cfg.new_key: Extra inputs are not permitted (found 1); other settings of "),
        (
            {"text_cfg__no_causal_mask": True, "text_cfg__pool_type": "eos"},
            "mask = True with pool_type 'eos'",
        ),
        ({"text_cfg__hf_model_name": "nobody/nothing"}, "hf download nobody/nothing config.json"),
        ({"text_cfg__tokenizer_kwargs": {"language": "de"}}, "text_cfg.tokenizer_kwargs"),
        ({"text_cfg__pool_type": "eos"}, "without the end token 2"),
        ({"text_cfg__layers": 1}, "found the tensor transformer.resblocks.1"),
        ({"text_cfg__layers": 3}, "lack the tensor transformer.resblocks.2"),
        ({"quick_gelu": True, "text_cfg__act_kwargs": {}}, "quick_gelu takes no text_cfg.act_kwargs"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(tmp_path, keys, message):
    model_cfg = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": TEXT}
    folder = save(tmp_path / "checkpoint", model_cfg, build(model_cfg))
    changed(folder, **keys)
    with pytest.raises(ModelError, match=re.escape(message)) as raised:
        import_open_clip(folder, tmp_path / "model")
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "model").exists()
