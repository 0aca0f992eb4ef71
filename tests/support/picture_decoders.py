"""Random small checkpoints of decoders with eyes, saved by transformers with its own processor, and their inputs."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tower_checks import randomise
from transformers import (
    AutoModel,
    AutoProcessor,
    EmbeddingGemma2Config,
    EmbeddingGemma2Model,
    EmbeddingGemma2Processor,
    Gemma4AudioFeatureExtractor,
    Gemma4ImageProcessor,
    GemmaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.embedding_gemma2 import EmbeddingGemma2VideoProcessor

from embedder.media.patches import pixel_columns
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.steps.caption_encoder import CaptionEncoder
from embedder.steps.item_decoder import DecodeLimits, bmp
from shards.activations import Batch, TowerState
from shards.model_config import load_model_config

SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
INSTRUCTION = "Represent the user's input."
QUERY_INSTRUCTION = "Retrieve images or text relevant to the user's query."
# The published models' template, for the parts that an embedding needs.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for content in message.content %}"
    "{%- if content.type == 'image' or 'image' in content %}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif content.type == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- elif 'text' in content %}{{- content.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GEMMA_MARKS = {
    **{"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"},
    **{"boa_token": "<|audio>", "audio_token": "<|audio|>", "eoa_token": "<audio|>", "video_token": "<|video|>"},
}
WIDTH = 32
SIZES = [(1, 1), (3, 2), (40, 30), (64, 64), (160, 30), (7, 90), (300, 200), (199, 1), (1, 150), (33, 48), (1600, 300)]
TEXTS = [
    *("a red car", "two cats on a sofa\n", "\n\nx", "  spaces   inside ", "it's 2026", "<|im_end|> as text", "a"),
    *("日本語の文", "русский текст", "नमस्ते", "مرحبا", "👩‍👩‍👧 🙂", "e\u0301 and é", "word " * 300),
]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level tokeniser with the published models' splitting and special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(__import__("tokenizers").Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [INSTRUCTION, "system user assistant", "a red car in the snow", "two cats on a sofa\n\n"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )


def make_processor(family: str = "qwen3_vl", **size: int) -> Qwen3VLProcessor:
    """Make a family's processor of images of 4 px patches; `size` has shortest_edge and longest_edge, in pixels."""
    settings = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    settings |= {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.4]}
    images = Qwen2VLImageProcessor(size={"shortest_edge": 256, "longest_edge": 4096} | size, **settings)
    kinds = {"qwen2_vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor)}
    kinds |= {"qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor)}
    kind, videos = kinds.get(family, (Qwen3VLProcessor, Qwen3VLVideoProcessor))
    clips = videos(size={"shortest_edge": 256, "longest_edge": 8192}, cap_pixels_per_frame=True, **settings)
    return kind(images, byte_tokenizer(), clips, chat_template=CHAT_TEMPLATE)


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Give a configuration's ids of special tokens."""
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {f"vision_{end}_token_id": f"<|vision_{end}|>" for end in ("start", "end")}
    return {key: ids[token] for key, token in names.items()}


def make_older(family: str, tokenizer: PreTrainedTokenizerFast) -> torch.nn.Module:
    """Make a small Qwen2-VL or Qwen2.5-VL; windows of the latter are of 4 x 4 patches, 2 x 2 tokens."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    text = {"vocab_size": 400, "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "intermediate_size": 56, "max_position_embeddings": 4096}
    text |= {"rope_parameters": rope}
    vision = {"depth": 4, "num_heads": 2, "patch_size": 4}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 24, "hidden_size": WIDTH, "mlp_ratio": 3}
        config = Qwen2VLConfig(vision_config=vision, text_config=text, **special_ids(tokenizer))
        return Qwen2VLForConditionalGeneration(config)
    vision |= {"hidden_size": 24, "out_hidden_size": WIDTH, "intermediate_size": 40, "window_size": 16}
    vision |= {"fullatt_block_indexes": [1, 3]}
    config = Qwen2_5_VLConfig(vision_config=vision, text_config=text, **special_ids(tokenizer))
    return Qwen2_5_VLForConditionalGeneration(config)


def make_config(tokenizer: PreTrainedTokenizerFast, **text: object) -> Qwen3VLConfig:
    """Make a small configuration in which no two sizes are equal by chance."""
    vision = {"depth": 4, "hidden_size": 24, "num_heads": 2, "intermediate_size": 40, "patch_size": 4}
    vision |= {"out_hidden_size": WIDTH, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 2, 1], "mrope_interleaved": True}
    return Qwen3VLConfig(
        vision_config=vision,
        text_config={
            "vocab_size": 400,
            "hidden_size": WIDTH,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 56,
            "max_position_embeddings": 4096,
            "rope_parameters": rope,
        }
        | text,
        **special_ids(tokenizer),
    )


def gemma_tokenizer() -> GemmaTokenizer:
    """Make a tokeniser of Gemma's kind, which falls back to bytes and puts a token at both ends."""
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *GEMMA_MARKS.values(), *[f"<0x{n:02X}>" for n in range(256)]]
    tokenizer = Tokenizer(models.BPE(fuse_unk=True, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trainer = trainers.BpeTrainer(vocab_size=390, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator([INSTRUCTION, "a red car in the snow", "two cats on a sofa"] * 4, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(each) for each in model["merges"]]
    made = GemmaTokenizer(vocab=model["vocab"], merges=merges, model_max_length=4096, **GEMMA_MARKS)
    ends = [("<bos>", 2), ("<eos>", 1)]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing("<bos> $A <eos>", special_tokens=ends)
    return made


def gemma_config(tokenizer: GemmaTokenizer, **changes: object) -> EmbeddingGemma2Config:
    """Make a small configuration in which no two sizes are equal by chance; windows are of 41 tokens."""
    text = {"vocab_size": 400, "hidden_size": WIDTH, "intermediate_size": 56, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "global_head_dim": 16}
    text |= {"num_global_key_value_heads": 1, "sliding_window_pattern": 2, "sliding_window": 20}
    text |= {"hidden_size_per_layer_input": 10, "embedding_dim": 28, "max_position_embeddings": 4096}
    vision = {"model_type": "gemma4_vision", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8, "patch_size": 4}
    vision |= {"position_embedding_size": 256, "use_clipped_linears": True, "standardize": True}
    ids = {
        f"{key.removesuffix('_token')}_token_id": tokenizer.convert_tokens_to_ids(each)
        for key, each in GEMMA_MARKS.items()
    }
    return EmbeddingGemma2Config(**{"text_config": text, "vision_config": vision, **ids} | changes)


def save_gemma(folder: Path, **changes: object) -> Path:
    """Save a random EmbeddingGemma 2 with its processor, as transformers does; `changes` are of its configuration."""
    tokenizer, sizes = gemma_tokenizer(), {"patch_size": 4, "max_soft_tokens": 70}
    torch.manual_seed(3)
    model = randomise(EmbeddingGemma2Model(gemma_config(tokenizer, **changes)))
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.fill_(1.5 if name.endswith("max") else -1.5)  # so that some values are cut
        elif name.endswith(("layer_scalar", "std_bias", "std_scale")):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    model.save_pretrained(folder)
    images, videos = Gemma4ImageProcessor(**sizes), EmbeddingGemma2VideoProcessor(**sizes)
    EmbeddingGemma2Processor(Gemma4AudioFeatureExtractor(), images, tokenizer, videos).save_pretrained(folder)
    return folder


def save_reranker(folder: Path, *, is_tied: bool = True) -> Path:
    """Save a random re-ranker, whose tokeniser knows both answers; with `is_tied` logits are of the table of words."""
    processor = make_processor()
    processor.tokenizer.add_tokens(["yes", "no"])
    torch.manual_seed(5)
    config = make_config(processor.tokenizer)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = is_tied
    randomise(Qwen3VLForConditionalGeneration(config)).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def save_checkpoint(folder: Path, family: str = "qwen3_vl", **size: int) -> Path:
    """Save a random model with its processor, as transformers does."""
    if family == "embedding_gemma2":
        return save_gemma(folder)
    processor = make_processor(family, **size)
    torch.manual_seed(3)
    is_newest = family == "qwen3_vl"
    model = (
        Qwen3VLForConditionalGeneration(make_config(processor.tokenizer))
        if is_newest
        else make_older(family, processor.tokenizer)
    )
    randomise(model).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_library(checkpoint):
    """Make a function that gives transformers' vector of an item, and the inputs that its processor makes.

    Qwen's are items of a conversation, with an instruction; EmbeddingGemma 2's stand alone.
    """
    theirs, processor = AutoModel.from_pretrained(checkpoint).eval(), AutoProcessor.from_pretrained(checkpoint)
    if isinstance(theirs, EmbeddingGemma2Model):
        return gemma_library(theirs, processor)

    @torch.no_grad()
    def embed(text=None, image=None, instruction=INSTRUCTION):
        content = [{"type": "image", "image": image}] * (image is not None)
        content += [{"type": "text", "text": text}] * (text is not None)
        system = {"role": "system", "content": [{"type": "text", "text": instruction}]}
        messages = [system, {"role": "user", "content": content}]
        form = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = processor(text=[form], images=None if image is None else [image], return_tensors="pt")
        return torch.nn.functional.normalize(theirs(**inputs).last_hidden_state[0, -1], dim=-1), inputs

    return embed


def gemma_library(theirs, processor):
    """Make the same of an EmbeddingGemma 2."""

    @torch.no_grad()
    def embed(text=None, image=None, instruction=None):
        del instruction
        given = {"text": text, "images": image}
        inputs = processor(**{key: [each] for key, each in given.items() if each is not None}, return_tensors="pt")
        return torch.nn.functional.normalize(theirs(**inputs).last_hidden_state[0].mean(0), dim=-1), inputs

    return embed


def decode(config, images):
    """Patches and grids of images, as a run decodes them."""
    rule = ResizeSpec.of(config.preprocess, config.vision)
    decoder = SandboxedDecoder(DecodeLimits())
    columns = [pixel_columns(decoder.image(bmp(np.asarray(image)), rule)[None], rule) for image in images]
    grids = torch.tensor(np.stack([each["image_grid"] for each in columns]))
    return TowerState(
        torch.from_numpy(np.concatenate([each["pixels"] for each in columns])), grids.long().prod(1), grids
    )


def tokenise(folder, texts, prompt=None):
    """Token ids of texts, as a run makes them."""
    rule = load_model_config(folder).preprocess
    encoder = CaptionEncoder(
        (folder / "tokenizer.json").read_text("utf-8"),
        rule.max_caption_tokens,
        prompt=rule.caption_prompt if prompt is None else prompt,
    )
    return as_state([encoder.encode(text) for text in texts])


def as_state(ids):
    """Pack lists of token ids."""
    flat = np.concatenate([np.asarray(each, np.int32) for each in ids])
    return TowerState(torch.from_numpy(flat), torch.tensor([len(each) for each in ids]))


def sample_batch(model, grids, captions):
    """Random patches of pictures with these grids (frames, rows, columns of patches), and captions of these ids."""
    config, generator, grids = load_model_config(model), torch.Generator().manual_seed(0), torch.tensor(grids).int()
    shape = int(grids.prod(1).sum()), config.vision.patch_values
    patches = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return Batch(TowerState(patches, grids.long().prod(1), grids), as_state(captions))


def pictures(sizes=SIZES):
    """Make noise of several sizes (width, height)."""
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
