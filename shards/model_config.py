"""Configuration of a model, its config.json: all constructor dimensions of both towers, and the preprocessing.

Enough to plan a cut without torch.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from shards.file_schema import ModelSection, describe, read_json
from shards.model_errors import ModelError
from shards.preprocess import PreprocessConfig
from shards.ranges import LayerRange
from shards.towers.base import Tower
from shards.towers.registry import AnyTextTower, AnyVisionTower
from shards.towers.tower_kinds import TextTower, VisionTower

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
SIGMOID_FILE = "sigmoid.json"  # next to exported towers: scale and bias of the logits, or null

Projection = Literal["linear", "mlp", "wide_mlp", "none", "tanh", "relu", "gelu"]
ACTIVATED = ("tanh", "relu", "gelu")
"""Linear projections with an activation behind."""


class ModelConfig(ModelSection):
    """Configuration of a model with one or two towers: everything but the weights and the tokeniser."""

    format_version: Literal[1] = 1
    name: str = Field(min_length=1)
    trained: bool = Field(description="false: the projections are fresh, and search means nothing yet")
    embedding_dim: int = Field(ge=1, description="size of the common space: `E`")
    dimensions: int | None = Field(
        None, ge=1, description="first values of a vector that are kept, then of length 1 again; none: all"
    )
    matryoshka: tuple[int, ...] | Literal["any"] | None = Field(
        None, description="dimensions that the model is trained to be cut to, as its checkpoint says"
    )
    projection_bias: bool = False
    vision_projection: Projection = Field(
        "linear",
        description="none: the vision tower's own vectors are the space; mlp: two layers around a GELU; wide_mlp: the "
        "same as timm has it, with twice embedding_dim values between them",
    )
    text_projection: Projection = Field(
        "linear",
        description="none: the text tower's own vectors are the space; mlp: two layers around a GELU; tanh, relu, "
        "gelu: linear, then that",
    )
    vision: AnyVisionTower | None
    text: AnyTextTower | None
    preprocess: PreprocessConfig

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.vision is None and self.text is None:
            raise ValueError("vision and text are both null; a model has one tower at least")
        if self.vision is not None and self.preprocess.image_size != self.vision.side_px:
            raise ValueError(
                f"preprocess.image_size ({self.preprocess.image_size}) is not the vision tower's "
                f"({self.vision.side_px}); make them equal"
            )
        if self.vision is not None and (self.preprocess.resize == "patches") != (self.vision.patch_px is not None):
            rule = '"patches"' if self.vision.patch_px is not None else 'another than "patches"'
            raise ValueError(
                f'preprocess.resize is "{self.preprocess.resize}"; a {self.vision.label} tower takes {rule}'
            )
        if self.text is not None and self.preprocess.max_caption_tokens > self.text.max_tokens:
            raise ValueError(
                f"preprocess.max_caption_tokens ({self.preprocess.max_caption_tokens}) exceeds "
                f"the {self.text.max_tokens} tokens that the text tower takes; lower it"
            )
        if self.dimensions is not None and self.dimensions >= self.embedding_dim:
            raise ValueError(f"dimensions ({self.dimensions}) is no part of the {self.embedding_dim} of embedding_dim")
        decoder = self.vision.shared_decoder if self.vision is not None else None
        if decoder is not None and decoder != self.text:
            raise ValueError(
                "vision.decoder is not the text tower, whose layers its images pass through; make them equal"
            )
        if self.preprocess.joins_captions and (self.vision is None or not self.vision.takes_text):
            raise ValueError(
                "preprocess.joins_captions is true, and the model takes no picture with a text; write false"
            )
        for side, tower in self.towers.items():
            if self.projections[side] == "none" and tower.pooled_dim != self.embedding_dim:
                raise ValueError(
                    f'{side}_projection is "none", and the tower\'s vectors of {tower.pooled_dim} values are no '
                    f'vectors of embedding_dim ({self.embedding_dim}); make them equal, or write "linear"'
                )
        return self

    @model_validator(mode="after")
    def _takes_clips(self) -> Self:
        clips, together = self.preprocess.clips, getattr(self.vision, "temporal_patch_size", 1)
        if clips is not None and (not self.is_one_tower or clips.frames_together != together):
            raise ValueError(
                f"preprocess.clips is for images that pass through a text tower, and for {together} frames_together; "
                "remove it, or import the checkpoint again"
            )
        return self

    @property
    def vector_dim(self) -> int:
        """Size of the vectors that are stored."""
        return self.embedding_dim if self.dimensions is None else self.dimensions

    @property
    def projections(self) -> dict[str, Projection]:
        """Projections into the common space, by side."""
        return {"vision": self.vision_projection, "text": self.text_projection}

    @property
    def towers(self) -> dict[str, Tower]:
        """The towers that the model has, by side."""
        sides = {"vision": self.vision, "text": self.text}
        return {side: tower for side, tower in sides.items() if tower is not None}

    @property
    def clip_frames(self) -> int | None:
        """Number of frames that a vector of a clip is made of at once; None where each frame has a vector."""
        return None if self.vision is None else self.vision.clip_frames

    @property
    def is_one_tower(self) -> bool:
        """Whether images pass through the layers of the text tower, too; both sides are then cut at the same layers."""
        return self.vision is not None and self.vision.shared_decoder is not None

    @property
    def num_end_tokens(self) -> int | None:
        """Number of tokens behind each caption, if pictures are embedded with theirs; else None."""
        return self.vision.num_end_tokens if self.vision is not None and self.preprocess.joins_captions else None

    def shared_layers(self, vision: LayerRange) -> LayerRange:
        """Return the layers of the text tower among a range of the vision tower's; empty for two towers."""
        return self.vision.shared_layers(vision) if self.vision is not None else LayerRange(0, 0)

    @property
    def num_layers(self) -> dict[str, int]:
        """Number of layers by side; 0 for a missing tower."""
        return {"vision": 0, "text": 0} | {side: tower.num_layers for side, tower in self.towers.items()}

    @property
    def required_vision(self) -> VisionTower:
        """The vision tower; raises a ModelError if the model has none."""
        if self.vision is None:
            raise ModelError(f"model {self.name!r} has no vision tower: it embeds only captions; give it texts")
        return self.vision

    @property
    def required_text(self) -> TextTower:
        """The text tower; raises a ModelError if the model has none."""
        if self.text is None:
            raise ModelError(f"model {self.name!r} has no text tower: it embeds only images; give it images")
        return self.text

    def at_patches(self, num_patches: int | None) -> Self:
        """Copy the configuration for images of so many patches, where the tower allows that; None changes nothing."""
        if self.vision is None or num_patches is None:
            return self
        return self.model_copy(update={"vision": self.vision.at_patches(num_patches)})

    def check_trainable(self) -> None:
        """Raise a ModelError if the model can't be trained: a single tower, or images that keep their proportions."""
        if len(self.towers) < 2:
            raise ModelError(
                f"model {self.name!r} has only a {next(iter(self.towers))} tower; training needs two towers, "
                "so give a model for images and captions"
            )
        if self.dimensions is not None:
            raise ModelError(
                f"model {self.name!r} keeps {self.dimensions} dimensions of its vectors; train it without "
                "`dimensions`, and cut the result"
            )
        if self.required_vision.is_whole:
            raise ModelError(
                f"model {self.name!r} has {self.required_vision.describe()}; training takes towers of layers, so "
                "give a model with another vision tower"
            )
        if self.required_vision.patch_px is not None:
            raise ModelError(
                f"model {self.name!r} has a {self.required_vision.label} tower, whose images keep their own "
                "proportions; training takes images of one size, so give a model with another vision tower"
            )

    def to_json(self) -> str:
        """Return the text of config.json, which older versions read, too, where it says nothing new."""
        unset: dict[str, Any] = {key: True for key in ("dimensions", "matryoshka") if getattr(self, key) is None}
        later = ("instruction_form", "joins_captions", "clips")
        unset["preprocess"] = {key for key in later if not getattr(self.preprocess, key)}
        return self.model_dump_json(indent=2, exclude=unset) + "\n"


def find_model_folder(path: str | Path) -> Path:
    """Return a local model folder, without checking its content; raises a ModelError if it doesn't exist."""
    folder = Path(path).expanduser()
    if str(path) and folder.is_dir():
        return folder
    if str(path) and folder.exists():
        raise ModelError(f"{path}: this is a file; give the model folder that it lies in")
    raise ModelError(f"{str(path)!r}: there is no such folder; give a model folder")


def load_model_config(folder: str | Path) -> ModelConfig:
    """Read a model folder's `config.json`; raises a ModelError if it is missing, invalid, or another library's."""
    path = Path(folder) / CONFIG_FILE
    tree = read_json(path, _cure(Path(folder)))
    if "format_version" not in tree and {"model_type", "architecture", "architectures"} & tree.keys():
        raise ModelError(
            f"{path}: this is a checkpoint of transformers or timm, not a model folder; "
            "turn it into one with `embedder model import SRC --out DIR` (for a plan, `--config-only` is enough)"
        )
    try:
        return ModelConfig.model_validate(tree)
    except ValidationError as error:
        raise ModelError(f"{path}: {describe(error)}") from None


def _cure(folder: Path) -> str:
    if (folder / "delta.json").is_file():
        return f"this is a delta; make a model of it with `embedder model apply-delta BASE {folder} --out DIR`"
    return "give a model folder (made by `embedder model import`)"
