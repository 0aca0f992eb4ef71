"""Encodes queries with a further model of a store: its towers with torch, else the servable that made its vectors.

A store is data that others may have made: readers open only those of its models that are of `DATA_KINDS`. Code comes
from the reader's own configuration, or from the store if the reader has allowed it (`CodeSources`).
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from embedder.compat.locked_property import locked_cached_property
from embedder.encoders.encode_queries import Floats, stripped_texts
from embedder.encoders.query_encoder import QueryEncoder
from embedder.errors import CodeNotAllowedError, ConfigError, StoreError
from embedder.media.given_inputs import image_list
from embedder.media.limits import DecodeLimits
from embedder.media.sandbox import SandboxedDecoder
from embedder.models.model_folder import open_model
from embedder.servables import make_servable
from embedder.servables.order import ERROR
from embedder.storage.printable import printable
from embedder.store.layout import StoreInfo

if TYPE_CHECKING:
    from embedder.media.given_inputs import GivenImage
    from embedder.servables.running_servable import RunningServable
    from embedder.servables.servable import Servable
    from embedder.steps.caption_encoder import CaptionEncoder

TOWERS = "towers"
DATA_KINDS = (TOWERS, "onnx")
"""Kinds that hold no code: safetensors with a description of towers that this package has, and graphs of ONNX.

ONNX operators are ONNX Runtime's own (nobody registers others). The other kinds have code: `python` is a file of it; a
.pt2 has expressions that are evaluated as Python; TorchScript is a program with operators that open files; a checkpoint
of `hf` or `vllm` selects code in other libraries that wasn't written for hostile input.
"""
SIDES = {"image": "images", "text": "texts"}
MAX_SHOWN = 100  # characters of a store's key in a message


@dataclass(frozen=True)
class CodeSources:
    """Places from which a reader takes code of models.

    `own` has sections [[model]] of the reader's own configuration, by name. `allow_store_code` says whether code that a
    store names is run, too.
    """

    own: "Mapping[str, Servable | Mapping[str, Any]]" = field(default_factory=dict)
    allow_store_code: bool = False

    @classmethod
    def of(cls, servables: "Iterable[Servable | Mapping[str, Any]]" = (), allow_store_code: bool = False) -> Self:
        """Make it from servables or their sections, as `embedder.servables.make_servable` takes them."""
        own = {str(each["name"] if isinstance(each, Mapping) else each.name): each for each in servables}
        return cls(own, allow_store_code)

    def servable(self, info: StoreInfo, model: str) -> "Servable":
        """Make a further model's servable, from the store's section if that is data or allowed.

        Raises CodeNotAllowedError if the store's section would run code, and the reader has neither its own section nor
        allowed it.
        """
        section = info.servable or {}
        if not _has_code(section):
            return make_servable(section)
        if model in self.own:
            return make_servable(self.own[model]).absolute()
        if self.allow_store_code:
            return make_servable(section)
        what = printable(str(section.get("kind", TOWERS)), MAX_SHOWN)
        if section.get("python") is not None:
            what += " in its own interpreter"
        raise CodeNotAllowedError(
            f"model {model or section.get('name')} of the store: it is of the kind {what}, which would run code that "
            f"the store names; a store is data, of which readers take only the kinds {' and '.join(DATA_KINDS)}; give "
            "the configuration that has this [[model]] (--config FILE), or run the store's code, if you trust whoever "
            "wrote it (--allow-store-code)"
        )


DATA_ALONE = CodeSources()


def _has_code(section: Mapping[str, Any]) -> bool:
    """Return whether a section names code: by its kind, or as another interpreter, which may be any program."""
    return section.get("kind", TOWERS) not in DATA_KINDS or section.get("python") is not None


def open_servable_encoder(
    info: StoreInfo, model: str = "", code: CodeSources = DATA_ALONE
) -> "QueryEncoder | ServableEncoder":
    """Open the encoder of a further model that has no query towers in the store; loads nothing yet.

    Raises:
        StoreError: its files are now those of another model, or code that nobody allowed.
        ServableError: a file is missing, or belongs to another framework.
        shards.ModelError: its model folder is invalid.
    """
    section = info.servable or {}
    if section.get("kind", TOWERS) == TOWERS:
        return open_towers(info, model)
    return ServableEncoder(info, model, code)


def open_towers(info: StoreInfo, model: str = "") -> QueryEncoder:
    """Open the towers of a further model of that kind.

    Raises:
        StoreError: its model folder is now that of another model.
        ServableError: a file is missing.
        shards.ModelError: the model folder is incomplete.
    """
    return QueryEncoder(open_model(checked_servable(info, model).uri), info.colour)


def checked_servable(info: StoreInfo, model: str = "", code: CodeSources = DATA_ALONE) -> "Servable":
    """Return a further model's servable; a StoreError if its files are another model's, or code nobody allowed."""
    servable = code.servable(info, model)
    if _takes_others(servable):  # whose fingerprints the store's includes
        return servable
    if (found := servable.fingerprint()) != info.model_fingerprint:
        raise StoreError(
            f"{servable.where()}: its fingerprint is {found}, the store's vectors are of {info.model_fingerprint}; "
            "bring that model back, or embed again with `embedder refresh`"
        )
    return servable


def _takes_others(servable: "Servable") -> bool:
    """Return whether an input is made from another servable's output, which queries lack."""
    return any("." in (each.of or "") for each in servable.input_columns().values())


class ServableEncoder:
    """Encoder of what a servable takes: images, or texts; the servable is loaded at its first use."""

    kind = "servable"

    def __init__(self, info: StoreInfo, model: str = "", code: CodeSources = DATA_ALONE) -> None:
        """Check that the servable is still the one that made the vectors.

        Raises:
            StoreError: it is another one now, or code that nobody allowed.
            ServableError: a file is missing, or belongs to another framework.
        """
        self._servable, self._colour = checked_servable(info, model, code), info.colour
        self._turn = threading.Lock()  # one thread calls a servable at a time

    instruction = None
    """Servables take no instruction of queries."""

    def encode_text(self, texts: Sequence[str], instruction: str | None = None) -> Floats:
        """Embed texts; float32 (Q, E), L2-normalised. A ConfigError if the model can't embed them."""
        if instruction is not None:
            raise ConfigError(f"{self._servable.where()} takes no instruction of queries; leave it out")
        return self._encode("text", stripped_texts(texts), DecodeLimits())

    def encode_image(self, images: "Sequence[GivenImage]", decoder: SandboxedDecoder | None = None) -> Floats:
        """Embed images; float32 (Q, E), L2-normalised. A ConfigError if the model can't embed or read them."""
        limits = decoder.limits if decoder is not None else DecodeLimits()
        return self._encode("image", [_content(each, limits) for each in image_list(images)], limits)

    def warning(self, text: str, instruction: str | None = None) -> str | None:
        """Return a line on what is cut of a text; the words that a servable knows are unknown."""
        del instruction
        return self.describe_cut(text)

    def describe_cut(self, text: str) -> str | None:
        """Return a line on what is cut of a text; None if all of it is read, or the servable makes its own tokens."""
        lines = (encoder.describe_cut(text.strip()) for encoder in self._captions)
        return next((line for line in lines if line is not None), None)

    def probability(self, cosine: float) -> float | None:
        """Return None: servables define no probability."""
        del cosine
        return None

    def load_like(self, other: object) -> None:
        """Load the servable if another encoder has loaded its own."""
        if "_running" in vars(other):
            _ = self._running

    @locked_cached_property
    def _captions(self) -> "list[CaptionEncoder]":
        from embedder.servables.prepare import caption_encoder
        from embedder.servables.servable_columns import TokensInput

        return [
            caption_encoder(each) for each in self._servable.input_columns().values() if isinstance(each, TokensInput)
        ]

    @locked_cached_property
    def _running(self) -> "RunningServable":
        from embedder.servables.running_servable import RunningServable

        return RunningServable(self._servable)

    def _encode(self, side: str, values: Sequence[str | bytes], limits: DecodeLimits) -> Floats:
        """Run the servable on queries of one side.

        Raises a ConfigError if the model can't embed that side from only a query, or a query can't be encoded.
        """
        from embedder.models.further_models import columns_of
        from embedder.servables.predict import DECODE_ERROR, decode_rows

        servable = self._servable
        outputs = [name for name, column in columns_of(servable).items() if column == f"{side}_embedding"]
        if not outputs or _takes_others(servable):
            other = "a text" if side == "image" else "an image"
            cure = "search with a vector" if outputs else f"search with {other}, or with a vector"
            raise ConfigError(f"{servable.where()}: it has no tower that encodes {SIDES[side]} alone; {cure}")
        table = pa.table({"image" if side == "image" else "caption": list(values)})
        with self._turn:
            decoded = decode_rows(
                table, servables=[servable], image="image", caption="caption", limits=limits, colour=self._colour
            )
            found = pa.concat_tables([self._running(part) for part in decoded])
        for problem in [*found[DECODE_ERROR].to_pylist(), *found[f"{servable.name}.{ERROR}"].to_pylist()]:
            if problem:
                raise ConfigError(f"a query can't be encoded: {problem}")
        vectors = np.array(found[f"{servable.name}.{outputs[0]}"].to_pylist(), np.float32)
        unit: Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return unit


def _content(image: Path | bytes, limits: DecodeLimits) -> bytes:
    """Read an image file; a ConfigError if it can't be read, or is too large."""
    if isinstance(image, bytes):
        return image
    try:
        size = image.stat().st_size
        if size > limits.max_file_bytes:
            raise ConfigError(f"image {image}: it has {size:,} bytes, {limits.max_file_bytes:,} are read; give another")
        return image.read_bytes()
    except OSError as error:
        raise ConfigError(f"image {image}: it can't be read ({error.strerror}); give an image file") from None
