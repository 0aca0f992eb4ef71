"""Workload, and costs of a model on a device and of its items on the host: measured or estimated seconds. No torch."""

import json
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, ClassVar, Literal, Self

from pydantic import TypeAdapter, ValidationError

from shards.costs import BYTES_PER_VALUE, Dtype, tower_costs
from shards.file_schema import describe
from shards.model_config import ModelConfig
from shards.model_errors import ModelError
from shards.planning.devices import GPU_ROWS, DeviceType
from shards.ranges import STRICT, LayerRange
from shards.towers.base import Tower

Source = Literal["measured", "estimated"]


@dataclass(frozen=True)
class TowerSeconds:
    """Seconds of one tower for one input (an image or frame; a caption).

    `front_s` (embeddings, stem) belongs to the first layer, `layer_s` is the mean over layers, `head_s` (norm, pooling,
    projection) belongs to the last layer.
    """

    __pydantic_config__ = STRICT

    front_s: float
    layer_s: float
    head_s: float

    def of(self, layers: LayerRange, depth: int, shares: tuple[float, ...] = ()) -> float:
        """Return the seconds of a range of layers, including front and head where the range holds them.

        `shares` are those of `Tower.layer_shares`, where layers differ.
        """
        front_s = self.front_s if layers.holds_front() else 0.0
        head_s = self.head_s if layers.holds_head(depth) else 0.0
        return front_s + self.layer_s * layers.count(shares) + head_s

    def scale(self, front: float, layer: float, head: float) -> "TowerSeconds":
        """Multiply each part by a factor."""
        return TowerSeconds(self.front_s * front, self.layer_s * layer, self.head_s * head)


def _drop_defaults(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Leave out fields that most models don't use, so that files from before those fields stay the same."""
    return {name: value for name, value in fields if value is not None or name != "image_patches"}


class JsonText:
    """A dataclass stored as one JSON object and read strictly.

    `text_kind` names what the text holds and `text_cure` how to make it again, both for messages.
    """

    text_kind: ClassVar[str] = "costs"
    text_cure: ClassVar[str] = "measure again"

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(asdict(self, dict_factory=_drop_defaults), indent=2) + "\n"  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the text of the file; raises a ModelError if it is no such object."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            raise ModelError(f"{cls.text_kind}: {describe(error)}; {cls.text_cure}") from None


@dataclass(frozen=True)
class ModelCosts(JsonText):
    """Seconds of one model on one device, in one replica with its threads.

    `model_fingerprint` is None for an estimate. `device` is "cpu x1" (torch threads), "NVIDIA H200", or a name from the
    table of devices. `image_patches` None is the tower's maximum. `vision` and `text` are for one input;
    `send_s_per_byte` is between stages through the object store, with copies between host and device; `call_s` is fixed
    per batch. Workspace is peak memory beyond the weights and the activations that are sent.
    """

    __pydantic_config__ = STRICT

    model_fingerprint: str | None
    device: str
    dtype: str
    source: Source
    caption_tokens: int
    vision: TowerSeconds
    text: TowerSeconds
    send_s_per_byte: float
    call_s: float
    workspace_bytes_per_image: int
    workspace_bytes_per_caption: int
    image_patches: int | None = None

    def at_mix(self, mix: "DataMix", config: ModelConfig) -> "ModelCosts":
        """Convert to captions and images of another length, by the ratio of operations."""
        return self._at_tokens(mix.caption_tokens, config)._at_patches(mix.image_patches, config)

    def _at_tokens(self, num_tokens: int, config: ModelConfig) -> "ModelCosts":
        if num_tokens == self.caption_tokens or config.text is None:
            return replace(self, caption_tokens=num_tokens)
        new, old = (tower_costs(config, "text", number) for number in (num_tokens, self.caption_tokens))
        tokens = config.text.tokens_in(num_tokens) / config.text.tokens_in(self.caption_tokens)
        return replace(
            self,
            caption_tokens=num_tokens,
            text=self.text.scale(tokens, new.layer / old.layer, 1.0),
            workspace_bytes_per_caption=round(self.workspace_bytes_per_caption * tokens),
        )

    def _at_patches(self, num_patches: int | None, config: ModelConfig) -> "ModelCosts":
        if num_patches == self.image_patches or config.vision is None:
            return replace(self, image_patches=num_patches)
        wanted, known = (config.at_patches(number) for number in (num_patches, self.image_patches))
        new, old = (tower_costs(each, "vision", self.caption_tokens) for each in (wanted, known))
        tokens = wanted.required_vision.num_tokens / known.required_vision.num_tokens
        return replace(
            self,
            image_patches=num_patches,
            vision=self.vision.scale(tokens, new.layer / old.layer, tokens),
            workspace_bytes_per_image=round(self.workspace_bytes_per_image * tokens),
        )


@dataclass(frozen=True)
class DataMix:
    """Means over the items of a run; a negative or non-finite mean, or items without any content, raise a ModelError.

    Images include video frames; `caption_tokens` [CLS], [SEP] and its group's padding. `image_patches` None is the
    maximum.
    """

    __pydantic_config__ = STRICT

    images_per_item: float = 1.0
    captions_per_item: float = 1.0
    caption_tokens: int = 16
    image_patches: int | None = None

    def __post_init__(self) -> None:
        for name in ("images_per_item", "captions_per_item"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ModelError(f"mix: {name} is {value}; it is a mean, so give a number from 0 up")
        if self.images_per_item == 0 and self.captions_per_item == 0:
            raise ModelError("mix: items hold neither images nor captions; give one of the two a mean above 0")
        if self.caption_tokens < 1:
            raise ModelError(f"mix: caption_tokens is {self.caption_tokens}; a caption has at least one token")
        if self.image_patches is not None and self.image_patches < 1:
            raise ModelError(f"mix: image_patches is {self.image_patches}; an image has at least one patch")

    def of_towers(self, config: ModelConfig) -> "DataMix":
        """Drop what the model has no tower for; raises a ModelError if nothing is left."""
        images = self.images_per_item if config.vision is not None else 0.0
        captions = self.captions_per_item if config.text is not None else 0.0
        if images == captions == 0:
            side, inputs = ("text", "captions") if config.vision is None else ("vision", "images")
            raise ModelError(
                f"mix: items without {inputs}, and model {config.name!r} has only a {side} tower; "
                f"give them a mean above 0"
            )
        return replace(self, images_per_item=images, captions_per_item=captions)


@dataclass(frozen=True)
class HostCosts(JsonText):
    """CPU seconds outside the stages.

    Images are decoded from bytes to pixels; an item's rows are written into part files; the engine is Ray's own work;
    `startup_s` is wall clock from the start to the first batch.
    """

    __pydantic_config__ = STRICT

    decode_s_per_image: float
    tokenise_s_per_caption: float
    write_s_per_item: float
    engine_s_per_item: float
    startup_s: float
    source: Source

    def decode_s(self, mix: DataMix) -> float:
        """CPU seconds of decoding and tokenising one item."""
        return mix.images_per_item * self.decode_s_per_image + mix.captions_per_item * self.tokenise_s_per_caption

    def item_s(self, mix: DataMix) -> float:
        """CPU seconds of one item outside the stages."""
        return self.decode_s(mix) + self.write_s_per_item + self.engine_s_per_item


@dataclass(frozen=True)
class DeviceSpeed(JsonText):
    """Speed of a device in one dtype: operations per second of wide matrix products, and bytes per second.

    `memory_bytes_per_s` counts what is read and what is written; `link_bytes_per_s` is one way, to the device.
    """

    product_flops: float
    product_width: float
    memory_bytes_per_s: float
    link_bytes_per_s: float

    def apply_to(self, device: DeviceType, dtype: str) -> DeviceType:
        """Return a table's device with what was measured in place of the datasheet's figures."""
        if device.gpu is None or dtype not in device.gpu.product_flops:
            return device
        widest = self.product_flops * (1 + device.gpu.half_width / self.product_width)
        flops = dict(device.gpu.product_flops) | {dtype: widest}
        gpu = replace(device.gpu, product_flops=flops, memory_bytes_per_s=self.memory_bytes_per_s)
        return replace(device, gpu=gpu, bandwidth_bytes_per_s=self.link_bytes_per_s)


# CPU seconds that Ray takes for each call of a step. Measured on two cores of a cloud server with Ray 2.60, by
# `compare_predictions.py` of commit ebc4ef6. Most of it is one thread's, of the driver that makes all calls.
ENGINE_CALL_S = 0.010


@dataclass(frozen=True)
class CallSizes:
    """Rows of a call of a step: of a block, where the model is `whole` in one stage or `cut`, and of a `part` file."""

    whole: int
    cut: int
    part: int

    def calls_per_item(self, num_stages: int) -> float:
        """Count the calls of decode and of the stages, which take blocks, and of write."""
        return (num_stages + 1) / (self.whole if num_stages == 1 else self.cut) + 1 / self.part


# Guesses for what was not measured, typical of a cloud server's cores.
CALL_S = 3e-3  # one call of an actor: Ray's transfer and the launch of the kernels
COPY_BYTES_PER_S = 5e9  # a copy in host memory; a byte in the object store is written once and read once
IMAGE_DECODE_S = 4e-3  # a 640 x 480 JPEG to 224 px
CAPTION_TOKENISE_S = 5e-5
ITEM_WRITE_S = 3e-4
ITEM_ENGINE_S = 5e-4
STARTUP_S = 11.0


def estimate_costs(
    config: ModelConfig, device: DeviceType, dtype: Dtype, caption_tokens: int = 16, num_rows: int = GPU_ROWS
) -> ModelCosts:
    """Estimate costs by speed, bandwidth and, on a GPU, launches; raises a ModelError for an unsupported dtype."""
    device.flops_in(dtype)
    link_s = 2 / device.bandwidth_bytes_per_s if device.kind == "gpu" else 0.0
    return ModelCosts(
        model_fingerprint=None,
        device=device.name,
        dtype=dtype,
        source="estimated",
        caption_tokens=caption_tokens,
        vision=_seconds(config, "vision", device, dtype, caption_tokens, num_rows),
        text=_seconds(config, "text", device, dtype, caption_tokens, num_rows),
        send_s_per_byte=link_s + 2 / COPY_BYTES_PER_S,
        call_s=CALL_S,
        workspace_bytes_per_image=_workspace_bytes(config.vision, dtype, caption_tokens),
        workspace_bytes_per_caption=_workspace_bytes(config.text, dtype, caption_tokens),
    )


def estimate_host(config: ModelConfig) -> HostCosts:
    """Estimate the CPU seconds of an item outside the stages, scaled by the pixels that the model takes."""
    pixels = (config.vision.side_px / 224) ** 2 if config.vision is not None else 1.0
    # Half of the decoding time depends on the file's own size, which the model doesn't change.
    decode_s = IMAGE_DECODE_S * (0.5 + 0.5 * pixels)
    return HostCosts(decode_s, CAPTION_TOKENISE_S, ITEM_WRITE_S, ITEM_ENGINE_S, STARTUP_S, "estimated")


def _workspace_bytes(tower: Tower | None, dtype: Dtype, caption_tokens: int) -> int:
    return tower.workspace_values(caption_tokens) * BYTES_PER_VALUE[dtype] if tower is not None else 0


def _seconds(
    config: ModelConfig, side: str, device: DeviceType, dtype: Dtype, caption_tokens: int, num_rows: int
) -> TowerSeconds:
    costs, flops, tower = tower_costs(config, side, caption_tokens), device.flops_in(dtype), config.towers.get(side)
    layer_s = costs.layer / flops
    if tower is not None and device.gpu is not None and num_rows:
        number, values = tower.usual_layers or (1, tower.workspace_values(caption_tokens))
        layer_s = number * device.gpu.layer_s(
            costs.layer / number, values, tower.dim, dtype, num_inputs=num_rows, num_kernels=tower.kernels_per_layer
        )
    return TowerSeconds(costs.front / flops, layer_s, costs.head / flops)
