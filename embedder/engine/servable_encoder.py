"""Encoder of queries by a further model of a store: its towers by torch, else the servable that made its vectors."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from embedder.compat.locked_property import locked_cached_property
from embedder.engine.encode_queries import AnyQueryEncoder, Floats
from embedder.engine.model_folder import open_model
from embedder.engine.query_encoder import QueryEncoder
from embedder.errors import ConfigError, StoreError
from embedder.media.given_inputs import image_list, text_list
from embedder.media.limits import DecodeLimits
from embedder.media.sandbox import SandboxedDecoder
from embedder.servables import make_servable
from embedder.servables.order import ERROR
from embedder.storage.printable import is_text
from embedder.store.layout import StoreInfo

if TYPE_CHECKING:
    from embedder.media.given_inputs import GivenImage
    from embedder.servables.base import Servable
    from embedder.servables.run import RunningServable

TOWERS = "towers"
SIDES = {"image": "images", "text": "texts"}


def open_servable_encoder(info: StoreInfo) -> AnyQueryEncoder:
    """Open the encoder of a further model that has no query towers in the store; loads nothing yet.

    Args:
        info: description of the model.

    Raises:
        StoreError: its files are now those of another model.
        ServableError: a file is missing, or of another framework.
        shards.ModelError: its model folder is none.
    """
    section = info.servable or {}
    return open_towers(info) if section.get("kind", TOWERS) == TOWERS else ServableEncoder(info)


def open_towers(info: StoreInfo) -> QueryEncoder:
    """Open the towers of a further model of that kind.

    Args:
        info: description of the model.

    Raises:
        StoreError: its model folder is now that of another model.
        ServableError: a file is missing.
        shards.ModelError: it is no whole model folder.
    """
    return QueryEncoder(open_model(checked_servable(info).uri))


def checked_servable(info: StoreInfo) -> "Servable":
    """Servable of a further model.

    Raises:
        StoreError: its files are now those of another model.
    """
    servable = make_servable(info.servable or {})
    takes_others = any("." in (each.of or "") for each in servable.input_columns().values())
    found = (
        info.model_fingerprint if takes_others else servable.fingerprint()
    )  # else it covers those that it takes from
    if found != info.model_fingerprint:
        raise StoreError(
            f"{servable.where()}: its fingerprint is {found}, the store's vectors are of {info.model_fingerprint}; "
            "bring that model back, or embed anew with `embedder refresh`"
        )
    return servable


def _takes_others(servable: "Servable") -> bool:
    """Whether an input is made from what another servable returns, which no query has."""
    return any("." in (each.of or "") for each in servable.input_columns().values())


class ServableEncoder:
    """Encoder of what a servable takes: images, or texts; the servable is loaded at its first use."""

    kind = "servable"

    def __init__(self, info: StoreInfo) -> None:
        """Check that the servable still is the one that made the vectors.

        Args:
            info: description of the model.

        Raises:
            StoreError: it is another one now.
            ServableError: a file is missing, or of another framework.
        """
        self._servable = checked_servable(info)
        self._turn = threading.Lock()  # one thread calls a servable at a time

    def encode_text(self, texts: Sequence[str]) -> Floats:
        """Embed texts.

        Returns:
            float32 (Q, E), L2-normalised.

        Raises:
            ConfigError: the model embeds no texts, or one of them can't be.
        """
        given = text_list(texts)
        if not all(text.strip() for text in given):
            raise ConfigError("the query is empty; write what the images should show")
        for text in given:
            if not is_text(text):
                raise ConfigError(f"the query {text}: it is not valid UTF-8; type it where UTF-8 is the encoding")
        return self._encoded("text", [text.strip() for text in given], DecodeLimits())

    def encode_image(self, images: "Sequence[GivenImage]", decoder: SandboxedDecoder | None = None) -> Floats:
        """Embed images.

        Args:
            images: the images.
            decoder: whose limits hold; by default those of runs.

        Returns:
            float32 (Q, E), L2-normalised.

        Raises:
            ConfigError: the model embeds no images, or one of them can't be read.
        """
        limits = decoder.limits if decoder is not None else DecodeLimits()
        return self._encoded("image", [_content(each, limits) for each in image_list(images)], limits)

    def warning(self, text: str) -> str | None:
        """Say nothing: which words a servable knows is not known."""
        del text
        return None

    def probability(self, cosine: float) -> float | None:
        """Return None: servables define no probability."""
        del cosine
        return None

    def load_like(self, other: AnyQueryEncoder) -> None:
        """Load the servable where another encoder has loaded its own."""
        if "_running" in vars(other):
            _ = self._running

    @locked_cached_property
    def _running(self) -> "RunningServable":
        from embedder.servables.run import RunningServable

        return RunningServable(self._servable)

    def _encoded(self, side: str, values: Sequence[str | bytes], limits: DecodeLimits) -> Floats:
        """Run the servable on queries of one side.

        Args:
            side: image or text.
            values: file contents, or texts.
            limits: on the decoding of an image.

        Raises:
            ConfigError: the model has no vectors of that side of what a query has, or a query can't be encoded.
        """
        from embedder.engine.further_models import columns_of
        from embedder.servables.predict import DECODE_ERROR, decode_rows

        servable = self._servable
        outputs = [name for name, column in columns_of(servable).items() if column == f"{side}_embedding"]
        if not outputs or _takes_others(servable):
            other = "a text" if side == "image" else "an image"
            cure = "search with a vector" if outputs else f"search with {other}, or with a vector"
            raise ConfigError(f"{servable.where()}: it has no tower that encodes {SIDES[side]} alone; {cure}")
        table = pa.table({"image" if side == "image" else "caption": list(values)})
        with self._turn:
            decoded = decode_rows(table, servables=[servable], image="image", caption="caption", limits=limits)
            found = pa.concat_tables([self._running(part) for part in decoded])
        for problem in [*found[DECODE_ERROR].to_pylist(), *found[f"{servable.name}.{ERROR}"].to_pylist()]:
            if problem:
                raise ConfigError(f"a query can't be encoded: {problem}")
        vectors = np.array(found[f"{servable.name}.{outputs[0]}"].to_pylist(), np.float32)
        unit: Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return unit


def _content(image: Path | bytes, limits: DecodeLimits) -> bytes:
    """Content of an image file.

    Args:
        image: path or content.
        limits: on its size.

    Raises:
        ConfigError: it can't be read, or is too large.
    """
    if isinstance(image, bytes):
        return image
    try:
        size = image.stat().st_size
        if size > limits.max_file_bytes:
            raise ConfigError(f"image {image}: it has {size:,} bytes, {limits.max_file_bytes:,} are read; give another")
        return image.read_bytes()
    except OSError as error:
        raise ConfigError(f"image {image}: it can't be read ({error.strerror}); give an image file") from None
