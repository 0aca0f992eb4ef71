"""Configuration of a model, its config.json: all constructor dimensions of both towers, and the preprocessing.

Enough to plan a cut without torch. Names follow timm's `VisionTransformer` and transformers' `AlbertConfig` where the
meaning is the same.
"""

import json
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shards.errors import ModelError

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"

# Factor by which three convolutions of stride 2 shrink an image.
CONV_STEM_STRIDE_PX = 8

TextActivation = Literal[
    "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh"
]


VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]


class ModelSection(BaseModel):
    """Base of all sections: frozen, no unknown keys, no infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class VisionConfig(ModelSection):
    """A ViT as timm builds it; `depth` counts its layers."""

    image_size: int = Field(224, ge=1, description="side of the square image, px")
    patch_size: int = Field(16, ge=1, description="side of one patch, px")
    stem: Literal["patch", "conv"] = Field(
        "patch", description="conv: three 3x3 convolutions of stride 2 (BatchNorm, GELU) before the patches are cut"
    )
    stem_channels: tuple[int, int, int] | None = Field(
        None, description="output channels of the conv stem's convolutions; none: width / 4, width / 2, width"
    )
    stem_blocks: tuple[int, int, int] = Field((0, 0, 0), description="timm residual blocks after each of them")
    width: int = Field(384, ge=1, description="timm embed_dim")
    depth: int = Field(12, ge=1, description="transformer blocks")
    num_heads: int = Field(6, ge=1)
    mlp_ratio: float = Field(4.0, gt=0, description="hidden width of the MLP over width")
    qkv_bias: bool = True
    class_token: bool = True
    num_reg_tokens: int = Field(0, ge=0, description="timm reg_tokens")
    pos_embed: Literal["learn", "none"] = "learn"
    no_embed_class: bool = Field(False, description="class and register tokens have no position embedding")
    pre_norm: bool = Field(False, description="norm before the blocks, and no patch bias, as in CLIP")
    final_norm: bool = Field(True, description="norm after the blocks")
    fc_norm: bool = Field(False, description="the final norm comes after pooling")
    init_values: float | None = Field(None, gt=0, description="first value of LayerScale; none: no LayerScale")
    pool: Literal["token", "avg", "avgmax", "max"] = Field("token", description="timm global_pool")
    pooler: Literal["none", "tanh"] = Field("none", description="dense + tanh on the class token, as in HF's ViTModel")
    norm_eps: float = Field(1e-6, gt=0)
    activation: VisionActivation = "gelu"

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        _require_multiple("image_size", self.image_size, "patch_size", self.patch_size)
        _require_multiple("width", self.width, "num_heads", self.num_heads)
        if self.stem == "conv":
            _require_multiple("patch_size", self.patch_size, "the conv stem's stride", CONV_STEM_STRIDE_PX)
            if self.stem_channels is None:
                _require_multiple("width", self.width, "the conv stem's first narrowing", 4)
        elif self.stem_channels is not None or any(self.stem_blocks):
            raise ValueError('stem_channels and stem_blocks belong to stem = "conv"; write that, or leave them out')
        if min((*self.stem_blocks, *(number - 1 for number in self.stem_channels or ()))) < 0:
            raise ValueError(f"stem_channels {self.stem_channels} from 1 up, stem_blocks {self.stem_blocks} from 0 up")
        if not self.class_token and (self.pool == "token" or self.pooler != "none"):
            raise ValueError('pool "token" and a pooler need class_token = true; else write pool "avg"')
        if self.pooler != "none" and self.pool != "token":
            raise ValueError(f'a pooler works on the class token, and pool is "{self.pool}"; write pool "token"')
        if self.mlp_width < 1:
            raise ValueError(f"mlp_ratio {self.mlp_ratio} leaves the MLP without units; write a larger one")
        return self

    @property
    def num_patches(self) -> int:
        """Number of patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def conv_channels(self) -> tuple[int, int, int]:
        """Output channels of the conv stem's three convolutions."""
        return self.stem_channels or (self.width // 4, self.width // 2, self.width)

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class and register tokens."""
        return int(self.class_token) + self.num_reg_tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens of one image inside the blocks: `L`."""
        return self.num_patches + self.num_prefix_tokens

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP, rounded as timm rounds it."""
        return int(self.width * self.mlp_ratio)


class TextConfig(ModelSection):
    """An ALBERT as transformers builds it; `num_hidden_layers` counts applications of its shared groups."""

    vocab_size: int = Field(30000, ge=1)
    embedding_size: int = Field(
        128, ge=1, description="width of the token embeddings, before the mapping to hidden_size"
    )
    hidden_size: int = Field(768, ge=1)
    num_hidden_layers: int = Field(12, ge=1, description="layers, counted by application")
    num_hidden_groups: int = Field(1, ge=1, description="sets of weights that the applications share")
    inner_group_num: int = Field(1, ge=1, description="blocks inside one application")
    num_attention_heads: int = Field(12, ge=1)
    intermediate_size: int = Field(3072, ge=1)
    hidden_act: TextActivation = "gelu_new"
    max_position_embeddings: int = Field(512, ge=1, description="longest caption, in tokens")
    type_vocab_size: int = Field(2, ge=1)
    layer_norm_eps: float = Field(1e-12, gt=0)
    pad_token_id: int = Field(0, ge=0)
    pool: Literal["pooler", "cls", "mean"] = Field("pooler", description="dense + tanh on [CLS], [CLS], or token mean")

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        _require_multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if self.num_hidden_groups > self.num_hidden_layers:
            raise ValueError(
                f"num_hidden_groups ({self.num_hidden_groups}) exceeds num_hidden_layers "
                f"({self.num_hidden_layers}); a group without a layer is never applied"
            )
        if self.pad_token_id >= self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} is outside the vocabulary of {self.vocab_size}")
        return self

    def group_of(self, layer: int) -> int:
        """Number of the group of weights that one application uses.

        Source: transformers 5.23, `AlbertTransformer.forward`; the same float division, so that rounding agrees.
        """
        return int(layer / (self.num_hidden_layers / self.num_hidden_groups))


class PreprocessConfig(ModelSection):
    """Preprocessing: from images to pixels, from captions to token ids."""

    image_size: int = Field(224, ge=1, description="side of the square image, px")
    resize: Literal["squash", "crop", "pad"] = Field(
        "crop", description="squash: both sides to size; crop: shortest side, then centre; pad: whole image on white"
    )
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = Field("bicubic", description="filter of the resize")
    resampler: Literal["pillow", "torchvision"] = Field(
        "pillow", description="library whose resize gives the values, to the bit"
    )
    mean: tuple[float, float, float] = Field((0.5, 0.5, 0.5), description="of RGB scaled to [0, 1]")
    std: tuple[float, float, float] = Field((0.5, 0.5, 0.5), description="of RGB scaled to [0, 1]")
    reduced_decode: bool = Field(True, description="JPEGs may be decoded at 1/2, 1/4, 1/8 while >= 2x image_size")
    max_caption_tokens: int = Field(64, ge=2, description="longer captions are cut; counts [CLS] and [SEP]")

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if min(self.std) <= 0:
            raise ValueError(f"std is {self.std}; pixels are divided by it, so each must be positive")
        return self


class ModelConfig(ModelSection):
    """Configuration of a model: all but the weights and the tokeniser."""

    format_version: Literal[1] = 1
    name: str = Field(min_length=1)
    trained: bool = Field(description="false: the projections are fresh, and search means nothing yet")
    embedding_dim: int = Field(ge=1, description="size of the common space: `E`")
    projection_bias: bool = False
    vision: VisionConfig
    text: TextConfig
    preprocess: PreprocessConfig

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.preprocess.image_size != self.vision.image_size:
            raise ValueError(
                f"preprocess.image_size ({self.preprocess.image_size}) is not vision.image_size "
                f"({self.vision.image_size}); make them equal"
            )
        if self.preprocess.max_caption_tokens > self.text.max_position_embeddings:
            raise ValueError(
                f"preprocess.max_caption_tokens ({self.preprocess.max_caption_tokens}) exceeds "
                f"text.max_position_embeddings ({self.text.max_position_embeddings}); lower it"
            )
        return self

    def to_json(self) -> str:
        """Write the text of config.json."""
        return self.model_dump_json(indent=2) + "\n"


def find_model_folder(path: str | Path) -> Path:
    """Find a local model folder; its content is not checked.

    Raises:
        ModelError: there is no such folder.
    """
    folder = Path(path).expanduser()
    if str(path) and folder.is_dir():
        return folder
    if str(path) and folder.exists():
        raise ModelError(f"{path}: this is a file; give the model folder that it lies in")
    raise ModelError(f"{str(path)!r}: there is no such folder; give a model folder")


def load_model_config(folder: str | Path) -> ModelConfig:
    """Read `config.json` of a model folder.

    Raises:
        ModelError: the file is missing, is no JSON, is another library's, or breaks a rule.
    """
    path = Path(folder) / CONFIG_FILE
    tree = read_json(path, _cure(Path(folder)))
    if "format_version" not in tree and {"model_type", "architecture", "architectures"} & tree.keys():
        raise ModelError(
            f"{path}: this is a checkpoint of transformers or timm, not a model folder; "
            "turn it into one with `embedder model import SRC --out DIR`"
        )
    try:
        return ModelConfig.model_validate(tree)
    except ValidationError as error:
        raise ModelError(f"{path}: {describe(error)}") from None


def _cure(folder: Path) -> str:
    if (folder / "delta.json").is_file():
        return f"this is a delta; make a model of it with `embedder model apply-delta BASE {folder} --out DIR`"
    return "give a model folder (made by `embedder model import`)"


def read_json(path: Path, cure: str) -> dict[str, object]:
    """Read one JSON object.

    Args:
        path: the file.
        cure: advice for the message when it is missing.

    Raises:
        ModelError: the file is missing, is no JSON, or holds no object.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}; {cure}") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError both are
        raise ModelError(f"{path}: this is no valid JSON ({error}); repair or fetch it again") from None
    if not isinstance(tree, dict):
        raise ModelError(f"{path}: found {type(tree).__name__}, expected a JSON object; repair or fetch it again")
    return tree


def describe(error: ValidationError) -> str:
    """Describe each broken rule in one clause: the key, the value, the rule."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or 'configuration'}: {item['msg'].removeprefix('Value error, ')}"
        f"{_found(item['input'])}"
        for item in error.errors()
    )


def _found(value: object) -> str:
    """The offending value, unless it is a whole section."""
    return "" if isinstance(value, BaseModel | dict) else f" (found {value!r:.60})"


def _require_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name} ({value}) is no multiple of {divisor_name} ({divisor})")
