"""Settings of a training run, and what follows from them: rate of each step, tensors that learn. Pure; no torch."""

import math
import re
from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from shards.file_schema import ModelSection
from shards.model_config import ModelConfig
from shards.ranges import LayerRange
from shards.shard_specs import NOTHING
from shards.tensor_shapes import LOGIT_BIAS, LOGIT_SCALE, is_table

Loss = Literal["clip", "siglip", "concepts"]
What = Literal["all", "vision_frozen", "text_frozen", "projections", "layers"]

MAX_WARMUP_STEPS = 100  # if none are set

# Parameters of the losses, trained next to the towers, with the temperature and SigLIP's bias.
PROTOTYPES = "prototypes"
TEACHER_MAP = "teacher_map"

LayerChoice = str | tuple[int, ...]
"""Layers to keep: "all", "every 2nd", "first 6", or their numbers."""

_EVERY = re.compile(r"every (\d+)(?:st|nd|rd|th)")
_FIRST = re.compile(r"first (\d+)")
_RULE = 'write "all", "every 2nd", "first 6", or a list of numbers, which rise and begin at 0, as [0, 2, 5]'


class AugmentSettings(ModelSection):
    """Augmentation of images; each value is the largest change, 0 turns it off."""

    rotate_deg: float = Field(0.0, ge=0, le=180, description="turn by up to this many degrees, either way")
    scale: float = Field(0.0, ge=0, lt=1, description="grow or shrink by up to this share")
    translate: float = Field(0.0, ge=0, le=1, description="move by up to this share of the side")
    shear: float = Field(0.0, ge=0, le=1, description="x per y, and y per x")
    flip: float = Field(0.0, ge=0, le=1, description="probability of a mirror image; 0 where left and right differ")
    brightness: float = Field(0.0, ge=0, description="factor 1 +- this")
    contrast: float = Field(0.0, ge=0, description="factor 1 +- this")
    saturation: float = Field(0.0, ge=0, description="factor 1 +- this")
    hue: float = Field(0.0, ge=0, le=0.5, description="turn of the colour wheel, in turns")
    shade: float = Field(0.0, ge=0, lt=1, description="a ramp of light across the image: 1 +- this at its edges")
    grey: float = Field(0.0, ge=0, le=1, description="probability of an image without colour")
    erase: float = Field(0.0, ge=0, le=1, description="probability that a rectangle is overwritten")
    fill: float = Field(1.0, ge=0, le=1, description="value of pixels from outside the image; 1 is white")

    @property
    def is_off(self) -> bool:
        """Whether images stay unchanged."""
        changes = self.model_dump(exclude={"fill"})
        return not any(changes.values())


class DistillSettings(ModelSection):
    """Weights of a teacher's losses, and of the run's own."""

    vectors: float = Field(
        1.0, ge=0, description="weight of 1 - cosine between the student's vector of a row and the teacher's, 0 to 2"
    )
    similarities: float = Field(
        1.0,
        ge=0,
        description="weight of the divergence, in nats, of each row's similarities to the batch from the teacher's",
    )
    temperature: float = Field(0.05, gt=0, description="by which these cosines are divided before the softmax")
    pairs: float = Field(1.0, ge=0, description="weight of the run's own loss, `train.loss`; 0: only the teacher")

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if not self.vectors and not self.similarities:
            raise ValueError(
                "vectors = 0 with similarities = 0: nothing is learnt from the teacher; give one of them a weight, or "
                "leave the teacher out"
            )
        return self


class TrainSettings(ModelSection):
    """One training run; with the weights it starts from and its batches, it determines the result."""

    loss: Loss = Field("clip", description="clip: softmax; siglip: sigmoid of each pair; concepts: against prototypes")
    what: What = Field("all", description="trainable part; layers: only the ranges named below")
    vision_layers: LayerRange = Field(NOTHING, description='vision layers that learn with what = "layers"')
    text_layers: LayerRange = Field(NOTHING, description='text layers that learn with what = "layers"')
    learning_rate: float = Field(1e-3, gt=0, description="at the end of the warm-up")
    final_learning_rate: float = Field(
        0.0, ge=0, description="as a share of learning_rate, reached after the last step"
    )
    weight_decay: float = Field(0.05, ge=0, description="of matrices; norms, biases and tables have none")
    beta2: float = Field(0.98, gt=0, lt=1, description="AdamW's second decay")
    warmup_steps: int = Field(
        MAX_WARMUP_STEPS,
        ge=0,
        description="steps in which the rate rises to learning_rate; left out: a tenth of num_steps, at most 100",
        json_schema_extra={"default": "num_steps / 10, at most 100"},
    )
    num_steps: int = Field(1000, ge=1, description="length of the schedule; steps beyond keep its last rate")
    cooldown_steps: int | None = Field(
        None,
        ge=0,
        description="the rate is constant until this many steps before the end, then falls; none: it falls throughout",
    )
    grad_clip: float = Field(1.0, ge=0, description="largest norm of the gradient; 0: no limit")
    ema_decay: float = Field(0.999, ge=0, lt=1, description="of the averaged weights; 0: the last weights")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="compute dtype; weights stay float32")
    max_logit_scale: float = Field(100.0, gt=0, description="the temperature's inverse is clipped here, as in CLIP")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description='of loss = "concepts"')
    patch_dropout: float = Field(0.0, ge=0, lt=1, description="share of image tokens left out while training")
    num_concepts: int = Field(0, ge=0, description='prototypes of loss = "concepts"')
    alignment: float = Field(
        0.0, ge=0, description='weight of 1 - cosine between a caption and its concepts\' prototypes, with "concepts"'
    )
    train_prototypes: bool = Field(True, description='whether the prototypes learn with loss = "concepts"')
    augmentation: AugmentSettings = AugmentSettings()
    seed: int = Field(0, description="of order, augmentation, captions and fresh weights")

    @model_validator(mode="after")
    def _warm_up_of_length(self) -> Self:
        """Shorten the default warm-up to fit the length of the run."""
        if "warmup_steps" not in self.model_fields_set:
            object.__setattr__(self, "warmup_steps", min(MAX_WARMUP_STEPS, self.num_steps // 10))
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        has_layers = len(self.vision_layers) + len(self.text_layers) > 0
        if (self.what == "layers") != has_layers:
            raise ValueError(
                f'what = "{self.what}" with vision_layers = {_text(self.vision_layers)} and text_layers = '
                f'{_text(self.text_layers)}: ranges of layers go with what = "layers", and it with them; write both'
            )
        if self.warmup_steps > self.num_steps:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} exceeds num_steps = {self.num_steps}; lower warmup_steps, or "
                "leave it out for a tenth of num_steps"
            )
        if (self.loss == "concepts") != (self.num_concepts > 0):
            raise ValueError(
                f'loss = "{self.loss}" with num_concepts = {self.num_concepts}: loss = "concepts" needs num_concepts, '
                "and no other loss has it"
            )
        return self


def _text(layers: LayerRange) -> str:
    return f"[{layers.start}, {layers.stop}]"


def chosen_layers(choice: LayerChoice, num_layers: int | None) -> list[int]:
    """Return the numbers of the layers to keep; `num_layers` is None while the tower isn't known yet.

    Raises `ValueError` if the choice has an unknown form, or chooses no layers or more than there are.
    """
    if not isinstance(choice, str):
        is_rising = all(one < two for one, two in pairwise(choice))
        if not choice or choice[0] < 0 or not is_rising:
            raise ValueError(f"layers {list(choice)}: {_RULE}")
        if num_layers is not None and choice[-1] >= num_layers:
            raise ValueError(
                f"layers {list(choice)}: there are {num_layers}, the last one is {num_layers - 1}; {_RULE}"
            )
        return list(choice)
    if choice == "all":
        return list(range(num_layers or 0))
    if (found := _EVERY.fullmatch(choice)) and int(found[1]):
        return list(range(0, num_layers or 0, int(found[1])))
    if (found := _FIRST.fullmatch(choice)) and int(found[1]):
        if num_layers is not None and int(found[1]) > num_layers:
            raise ValueError(f'layers "{choice}": there are {num_layers}; {_RULE}')
        return list(range(int(found[1])))
    raise ValueError(f'layers "{choice}": {_RULE}')


def learning_rate_at(step: int, settings: TrainSettings) -> float:
    """Compute the learning rate: linear warm-up, then half a cosine down to the final rate, which is then kept.

    With `cooldown_steps` the rate is constant in between, so that a run can be extended without starting again.

    Source of the cool-down: Hu et al. 2024 (MiniCPM), "warmup-stable-decay".
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    begin = settings.warmup_steps
    if settings.cooldown_steps is not None:
        begin = max(begin, settings.num_steps - settings.cooldown_steps)
    done = min(1.0, max(0.0, (step - begin) / max(1, settings.num_steps - begin)))
    share = (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * (settings.final_learning_rate + (1 - settings.final_learning_rate) * share)


def ema_decay_at(step: int, settings: TrainSettings) -> float:
    """Compute the decay of the averaged weights at one step; lower at first, while the weights are still untrained.

    Source: the ramp (1 + t) / (10 + t) of TensorFlow's `ExponentialMovingAverage(num_updates)`.
    """
    return min(settings.ema_decay, (1 + step) / (10 + step))


def is_trainable(name: str, config: ModelConfig, settings: TrainSettings) -> bool:
    """Whether a tensor learns; `name` is as in the model folder, or a loss's parameter (`LOGIT_SCALE` etc.)."""
    if name == TEACHER_MAP:
        return True
    if name in (PROTOTYPES, LOGIT_SCALE, LOGIT_BIAS):
        return settings.train_prototypes or name != PROTOTYPES
    return name.startswith(_trainable_prefixes(config, settings))


def _trainable_prefixes(config: ModelConfig, settings: TrainSettings) -> tuple[str, ...]:
    """Name prefixes of the towers' tensors that learn; for a layer, those of the weights that it applies."""
    match settings.what:
        case "all":
            return ("vision", "text")
        case "vision_frozen":
            return ("text",)
        case "text_frozen":
            return ("vision",)
        case "projections":
            return ("vision_head.projection", "text_head.projection")
        case "layers":
            ranges = {"vision": settings.vision_layers, "text": settings.text_layers}
            return tuple(
                f"{side}.{tower.prefix_of(number)}"
                for side, tower in config.towers.items()
                for number in tower.weight_numbers(ranges[side])
            )


def has_decay(name: str, num_dimensions: int) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases, tables and temperatures."""
    return num_dimensions > 1 and name != PROTOTYPES and not is_table(name)
