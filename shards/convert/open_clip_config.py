"""open_clip's configuration of a model, `open_clip_config.json`: its keys, restricted to what can be imported.

Source: open_clip 3.3, `CLIPVisionCfg`, `CLIPTextCfg`, `CLIP`, `PreprocessCfg`. A key that could ask for something that
can't be imported only accepts its other value, so that the message names the key.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from shards.convert.preprocessing import Interpolation, Resize
from shards.file_schema import ModelSection, describe, read_json
from shards.model_errors import ModelError
from shards.preprocess import PreprocessConfig

OPEN_CLIP_CONFIG_FILE = "open_clip_config.json"

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_RESIZE: dict[str, Resize] = {"shortest": "crop", "squash": "squash", "longest": "pad_black"}
# Without the random choice, which is for training.
_INTERPOLATION: dict[str, Interpolation] = {"bicubic": "bicubic", "bilinear": "bilinear", "random": "bicubic"}


class _Activation(ModelSection):
    approximate: Literal["none", "tanh"] = "none"


class _Norm(ModelSection):
    eps: float = Field(1e-5, gt=0)


class _Blocks(ModelSection):
    """Keys of a transformer of open_clip's own, of images or of captions."""

    layers: int = Field(12, ge=1)
    mlp_ratio: float = Field(4.0, gt=0)
    act_kwargs: _Activation | None = None
    norm_kwargs: _Norm | None = None
    block_type: Literal["default", "custom"] | None = None
    qk_norm: Literal[False] = False
    scaled_cosine_attn: Literal[False] = False
    scale_heads: Literal[False] = False
    scale_attn_inner: Literal[False] = False
    scale_attn: Literal[False] = False
    scale_fc: Literal[False] = False
    output_tokens: bool = False

    @property
    def norm_eps(self) -> float:
        """Epsilon of all norms."""
        return (self.norm_kwargs or _Norm()).eps

    @property
    def is_tanh_gelu(self) -> bool:
        """Whether GELU is approximated by tanh."""
        return self.act_kwargs is not None and self.act_kwargs.approximate == "tanh"


class VisionSection(_Blocks):
    """`vision_cfg`: open_clip's own ViT, or a model of timm."""

    width: int = Field(768, ge=1)
    head_width: int = Field(64, ge=1)
    patch_size: int | tuple[int, int] = 16
    image_size: int | tuple[int, int] = 224
    ls_init_value: float | None = Field(None, gt=0)
    patch_dropout: float = 0.0
    attentional_pool: Literal[False] = False
    attn_pooler_queries: int = 256
    attn_pooler_heads: int = 8
    no_ln_pre: bool = False
    pos_embed_type: Literal["learnable", "sin_cos_2d"] = "learnable"  # either way a table in the checkpoint
    final_ln_after_pool: bool = False
    pool_type: Literal["tok", "avg"] = "tok"
    timm_model_name: str | None = None
    timm_model_pretrained: bool = False
    timm_pool: str = "avg"
    timm_proj: Literal["linear", "mlp", "none", "", None] = "linear"
    timm_proj_bias: bool = False
    timm_drop: float = 0.0
    timm_drop_path: float | None = None


class TextSection(_Blocks):
    """`text_cfg`: open_clip's own text transformer, or a model of transformers."""

    context_length: int = Field(77, ge=2)
    vocab_size: int = Field(49408, ge=1)
    hf_tokenizer_name: str | None = None
    tokenizer_mode: Literal["", None] = None
    tokenizer_kwargs: dict[str, Any] | None = None
    width: int = Field(512, ge=1)
    heads: int = Field(8, ge=1)
    ls_init_value: None = None
    embed_cls: Literal[False] = False
    pad_id: int = 0
    eos_id: int = 2
    no_causal_mask: bool = False
    final_ln_after_pool: bool = False  # open_clip's text transformer has the key but ignores it
    pool_type: Literal["argmax", "eos", "last"] = "argmax"
    proj_bias: bool = False
    proj_type: Literal["linear", "none"] = "linear"
    hf_model_name: str | None = None
    hf_model_pretrained: bool = True
    hf_proj_type: Literal["linear", "mlp", None] = "mlp"
    hf_pooler_type: Literal["mean_pooler", "cls_pooler", "cls_last_hidden_state_pooler"] | None = "mean_pooler"


class OpenClipConfig(ModelSection):
    """`model_cfg`."""

    embed_dim: int = Field(ge=1)
    vision_cfg: VisionSection
    text_cfg: TextSection
    custom_text: bool = False
    quick_gelu: bool = False
    init_logit_scale: float = 0.0
    init_logit_bias: float | None = None
    nonscalar_logit_scale: bool = False
    multimodal_cfg: None = Field(None, description="of CoCa")
    output_dict: bool | None = None


class PreprocessSection(ModelSection):
    """`preprocess_cfg`: how open_clip prepares an image."""

    size: int | tuple[int, int] | list[int] | None = None  # open_clip uses that of the vision tower
    mode: Literal["RGB"] = "RGB"
    mean: tuple[float, float, float] = _MEAN
    std: tuple[float, float, float] = _STD
    interpolation: Literal["bicubic", "bilinear", "random"] = "bicubic"
    resize_mode: Literal["shortest", "squash", "longest"] = "shortest"
    fill_color: Literal[0] = 0


OTHERWISE = "import another model, or run this one next to a main model (docs/servables.md)"


def read_open_clip_config(folder: Path) -> tuple[OpenClipConfig, PreprocessSection]:
    """Read a folder's `open_clip_config.json`; raises a ModelError if it is missing or can't be imported."""
    path = folder / OPEN_CLIP_CONFIG_FILE
    tree = read_json(path, "give the folder of a model that open_clip saved")
    sections: dict[str, dict[str, Any]] = {}
    for key in ("model_cfg", "preprocess_cfg"):
        section = tree.get(key, {} if key == "preprocess_cfg" else None)
        if not isinstance(section, dict):
            raise ModelError(f"{path}: found no {key}; save the model with open_clip.push_to_hf_hub.save_for_hf")
        sections[key] = section
    vision = sections["model_cfg"].get("vision_cfg")
    if isinstance(vision, dict) and isinstance(vision.get("layers"), list):
        raise ModelError(
            f"{path}: vision_cfg.layers = {vision['layers']}: a ResNet of open_clip's own, which isn't built here; its "
            f"ViTs and towers of timm are: {OTHERWISE}"
        )
    try:
        config = OpenClipConfig.model_validate(sections["model_cfg"])
        return config, PreprocessSection.model_validate(_without_none(sections["preprocess_cfg"]))
    except ValidationError as error:
        raise ModelError(
            f"{path}: {describe(error)}; other settings of open_clip aren't built here: {OTHERWISE}"
        ) from None


def read_open_clip_preprocess(section: PreprocessSection, image_size: int, max_caption_tokens: int) -> PreprocessConfig:
    """Convert open_clip's preprocessing; its images are PIL images, so Pillow resizes them."""
    return PreprocessConfig(
        image_size=image_size,
        resize=_RESIZE[section.resize_mode],
        interpolation=_INTERPOLATION[section.interpolation],
        resampler="pillow",
        mean=section.mean,
        std=section.std,
        reduced_decode=False,  # so that pixels equal those of the training
        max_caption_tokens=max_caption_tokens,
    )


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys without a value, as open_clip does when it merges them with its defaults."""
    return {key: value for key, value in tree.items() if value is not None}
