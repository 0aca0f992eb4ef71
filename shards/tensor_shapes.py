"""Names and shapes of all tensors of a model and of a shard; arithmetic only, no torch.

Keys of model.safetensors: `vision.` + timm's `VisionTransformer` name, `text.` + transformers' `AlbertModel` name (its
pooler included), `vision_head.` and `text_head.` the projection heads. Shapes follow torch: a linear layer's
weight is (out, in).

Source: timm 1.0.31 vision_transformer.py, transformers 5.23 modeling_albert.py; a test compares with both.
"""

from shards.config import CONV_STEM_STRIDE_PX, ModelConfig, TextConfig, VisionConfig
from shards.ranges import ShardSpec, whole_model

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

# Optional, and not needed by any shard: log of the inverse temperature that training ended with.
LOGIT_SCALE = "logit_scale"
OPTIONAL_SHAPES: Shapes = {LOGIT_SCALE: ()}

# Suffix of the name of a quantised weight's scales, one for each output channel.
SCALE_SUFFIX = "_scale"

PARTS = ("vision front", "vision layers", "vision head", "text front", "text layers", "text head")

_PREFIXES = (
    ("vision.blocks.", "vision layers"),
    (("vision.norm.", "vision.fc_norm.", "vision_head."), "vision head"),
    ("vision.", "vision front"),
    ("text.encoder.albert_layer_groups.", "text layers"),
    (("text.pooler.", "text_head."), "text head"),
    ("text.", "text front"),
)


def part_of(name: str) -> str:
    """Find which of `PARTS` a tensor belongs to."""
    return next(part for prefix, part in _PREFIXES if name.startswith(prefix))


def model_shapes(config: ModelConfig) -> Shapes:
    """Compute the shapes of all tensors that the model must have, by name."""
    return shard_shapes(config, whole_model(config))


def shard_shapes(config: ModelConfig, spec: ShardSpec) -> Shapes:
    """Compute the shapes of all tensors that a shard owns, by name."""
    shapes: Shapes = {}
    if spec.vision.holds_front():
        shapes |= _vision_front(config.vision)
    for layer in range(spec.vision.start, spec.vision.stop):
        shapes |= _vision_block(config.vision, f"vision.blocks.{layer}")
    if spec.text.holds_front():
        shapes |= _text_front(config.text)
    for group in sorted({config.text.group_of(layer) for layer in range(spec.text.start, spec.text.stop)}):
        shapes |= _text_group(config.text, f"text.encoder.albert_layer_groups.{group}")
    if spec.vision.holds_head(config.vision.depth):
        shapes |= _vision_head(config)
    if spec.text.holds_head(config.text.num_hidden_layers):
        shapes |= _text_head(config)
    return shapes


def held_dtype(name: str, shape: Shape, dtype: str) -> str:
    """Choose the dtype that a tensor of the model is held in.

    The heads stay in float32, and so does the conv stem: its maps, rounded to bfloat16, turned a demo image's vector by
    4 degrees, and the six layers after it by a quarter of one. With int8, the weights of linear layers are int8: all
    matrices but the embedding tables, of which a lookup reads a few rows only; the rest is float32.

    Args:
        name: name of the tensor.
        shape: its shape.
        dtype: compute dtype.
    """
    if part_of(name) in ("vision head", "text head") or name.startswith("vision.patch_embed.backbone."):
        return "float32"
    if dtype == "int8" and (len(shape) != 2 or name.startswith("text.embeddings.")):
        return "float32"
    return dtype


def _vision_front(vision: VisionConfig) -> Shapes:
    width = vision.width
    shapes = _patches(vision)
    if vision.class_token:
        shapes["vision.cls_token"] = (1, 1, width)
    if vision.num_reg_tokens:
        shapes["vision.reg_token"] = (1, vision.num_reg_tokens, width)
    if vision.pos_embed == "learn":
        num_positions = vision.num_patches if vision.no_embed_class else vision.num_tokens
        shapes["vision.pos_embed"] = (1, num_positions, width)
    # timm leaves out the patch bias where a norm follows directly.
    return shapes | (_norm("vision.norm_pre", width) if vision.pre_norm else {"vision.patch_embed.proj.bias": (width,)})


def _patches(vision: VisionConfig) -> Shapes:
    if vision.stem == "patch":
        return {"vision.patch_embed.proj.weight": (vision.width, 3, vision.patch_size, vision.patch_size)}
    shapes: Shapes = {}
    num_in, layer = 3, 0
    for num_out, num_blocks in zip(vision.conv_channels, vision.stem_blocks, strict=True):
        name = f"vision.patch_embed.backbone.{layer}"
        shapes |= _conv(f"{name}.conv", f"{name}.bn", num_in, num_out)
        for block in range(1, num_blocks + 1):
            name = f"vision.patch_embed.backbone.{layer + block}"
            shapes |= _conv(f"{name}.conv1", f"{name}.bn1", num_out, num_out)
            shapes |= _conv(f"{name}.conv2", f"{name}.bn2", num_out, num_out)
        num_in, layer = num_out, layer + 1 + num_blocks
    side = vision.patch_size // CONV_STEM_STRIDE_PX
    return shapes | {"vision.patch_embed.proj.weight": (vision.width, num_in, side, side)}


def _conv(conv: str, batch_norm: str, num_in: int, num_out: int) -> Shapes:
    # Running statistics are buffers: training updates them, evaluation normalises with them.
    statistics: Shapes = {f"{batch_norm}.running_mean": (num_out,), f"{batch_norm}.running_var": (num_out,)}
    return {f"{conv}.weight": (num_out, num_in, 3, 3)} | _norm(batch_norm, num_out) | statistics


def _vision_block(vision: VisionConfig, name: str) -> Shapes:
    width = vision.width
    scales = {f"{name}.ls1.gamma": (width,), f"{name}.ls2.gamma": (width,)} if vision.init_values else {}
    return (
        _norm(f"{name}.norm1", width)
        | _linear(f"{name}.attn.qkv", width, 3 * width, bias=vision.qkv_bias)
        | _linear(f"{name}.attn.proj", width, width)
        | _norm(f"{name}.norm2", width)
        | _linear(f"{name}.mlp.fc1", width, vision.mlp_width)
        | _linear(f"{name}.mlp.fc2", vision.mlp_width, width)
        | scales
    )


def _vision_head(config: ModelConfig) -> Shapes:
    vision = config.vision
    norm = _norm("vision.fc_norm" if vision.fc_norm else "vision.norm", vision.width) if vision.final_norm else {}
    pooler = _linear("vision_head.pooler", vision.width, vision.width) if vision.pooler == "tanh" else {}
    projection = _linear("vision_head.projection", vision.width, config.embedding_dim, bias=config.projection_bias)
    return norm | pooler | projection


def _text_front(text: TextConfig) -> Shapes:
    return (
        {
            "text.embeddings.word_embeddings.weight": (text.vocab_size, text.embedding_size),
            "text.embeddings.position_embeddings.weight": (text.max_position_embeddings, text.embedding_size),
            "text.embeddings.token_type_embeddings.weight": (text.type_vocab_size, text.embedding_size),
        }
        | _norm("text.embeddings.LayerNorm", text.embedding_size)
        | _linear("text.encoder.embedding_hidden_mapping_in", text.embedding_size, text.hidden_size)
    )


def _text_group(text: TextConfig, name: str) -> Shapes:
    shapes: Shapes = {}
    for inner in range(text.inner_group_num):
        layer = f"{name}.albert_layers.{inner}"
        shapes |= _norm(f"{layer}.full_layer_layer_norm", text.hidden_size)
        for part in ("query", "key", "value", "dense"):
            shapes |= _linear(f"{layer}.attention.{part}", text.hidden_size, text.hidden_size)
        shapes |= _norm(f"{layer}.attention.LayerNorm", text.hidden_size)
        shapes |= _linear(f"{layer}.ffn", text.hidden_size, text.intermediate_size)
        shapes |= _linear(f"{layer}.ffn_output", text.intermediate_size, text.hidden_size)
    return shapes


def _text_head(config: ModelConfig) -> Shapes:
    hidden = config.text.hidden_size
    pooler = _linear("text.pooler", hidden, hidden) if config.text.pool == "pooler" else {}
    return pooler | _linear("text_head.projection", hidden, config.embedding_dim, bias=config.projection_bias)


def _linear(name: str, num_in: int, num_out: int, *, bias: bool = True) -> Shapes:
    weight: Shapes = {f"{name}.weight": (num_out, num_in)}
    return weight | ({f"{name}.bias": (num_out,)} if bias else {})


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
