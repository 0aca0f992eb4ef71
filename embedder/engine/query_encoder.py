"""Encoder of queries into the shared space, in this process and without Ray; each tower is loaded at its first use."""

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embedder.compat.locked_property import locked_cached_property
from embedder.engine.job import Model, resize_spec
from embedder.errors import ConfigError
from embedder.media.errors import DecodeError
from embedder.media.formats import IMAGE_FORMATS
from embedder.media.patches import pixel_columns
from embedder.media.sandbox import SandboxedDecoder
from embedder.steps.captions import CaptionEncoder
from embedder.storage.printable import is_text

if TYPE_CHECKING:
    from shards.ranges import ShardSpec
    from shards.shard import Shard

Floats = np.ndarray[Any, np.dtype[np.float32]]
BATCH_ROWS = 32

NO_TEXT_TOWER = "it has no text tower, so it can't encode texts; give an image"
NO_VISION_TOWER = "it has no vision tower, so it can't encode images; give a text"


class QueryEncoder:
    """Encoder of texts and images with the towers of one model."""

    def __init__(self, model: Model, *, dtype: str = "float32", device: str = "cpu") -> None:
        self.model, self.dtype, self.device = model, dtype, device
        self._decoder_lock = threading.Lock()  # a sandbox serves one thread at a time

    def encode_text(self, texts: Sequence[str]) -> Floats:
        """Embed captions or queries.

        Returns:
            float32 (Q, E), L2-normalised.

        Raises:
            ConfigError: the model has no text tower, or a text is empty, or no UTF-8.
        """
        if self.model.config.text is None:
            raise ConfigError(f"model {self.model.folder}: {NO_TEXT_TOWER}")
        if not all(text.strip() for text in texts):
            raise ConfigError("the query is empty; write what the images should show")
        for text in texts:
            if not is_text(text):
                raise ConfigError(f"the query {text}: it is not valid UTF-8; type it where UTF-8 is the encoding")
        return self._in_batches(self._text_batch, [text.strip() for text in texts])

    def encode_image(self, images: Sequence[str | Path | bytes]) -> Floats:
        """Embed images, given as paths or as file contents.

        Returns:
            float32 (Q, E), L2-normalised.

        Raises:
            ConfigError: the model has no vision tower, or an image can't be read.
        """
        if self.model.config.vision is None:
            raise ConfigError(f"model {self.model.folder}: {NO_VISION_TOWER}")
        return self._in_batches(
            self._image_batch, [image if isinstance(image, bytes) else Path(image) for image in images]
        )

    def probability(self, cosine: float) -> float | None:
        """Compute the probability that a text fits an image, by the cosine of their vectors.

        None of a model that defines none: all but SigLIP's kind.
        """
        if self._sigmoid is None:
            return None
        scale, bias = self._sigmoid
        logit = scale * cosine + bias
        small = math.exp(-abs(logit))
        return (1 if logit >= 0 else small) / (1 + small)

    def load_like(self, other: "QueryEncoder") -> None:
        """Load the towers that another encoder has loaded, so that no query waits for them."""
        for name in ("_captions", "_text_tower", "_vision_tower", "_sigmoid"):
            if name in vars(other):
                getattr(self, name)

    def _in_batches(self, encode: Any, queries: list[Any]) -> Floats:
        width = self.model.config.embedding_dim
        parts = [encode(queries[start : start + BATCH_ROWS]) for start in range(0, len(queries), BATCH_ROWS)]
        return np.concatenate([np.empty((0, width), np.float32), *parts])

    def _text_batch(self, texts: list[str]) -> Floats:
        import torch

        from shards.activations import Batch, TowerState

        ids = [self._captions.encode(text) for text in texts]
        lengths = torch.tensor([len(each) for each in ids])
        with torch.inference_mode():
            state = TowerState(torch.from_numpy(np.concatenate(ids)).to(self.device), lengths)
            return self._embedding(self._text_tower(Batch(vision=None, text=state)).text)

    def _image_batch(self, images: list[Path | bytes]) -> Floats:
        import torch

        from shards.activations import Batch, TowerState

        columns = [pixel_columns(self._pixels(image)[None], resize_spec(self.model)) for image in images]
        values = torch.from_numpy(np.concatenate([each["pixels"] for each in columns])).to(self.device)
        lengths = torch.tensor([len(each["pixels"]) for each in columns])
        has_grids = "image_grid" in columns[0]
        grids = torch.from_numpy(np.stack([each["image_grid"] for each in columns])) if has_grids else None
        with torch.inference_mode():
            state = TowerState(values, lengths, grids)
            return self._embedding(self._vision_tower(Batch(vision=state, text=None)).vision)

    def _embedding(self, state: Any) -> Floats:
        return np.asarray(state.values.cpu().numpy(), np.float32)

    def _pixels(self, image: Path | bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
        try:
            with self._decoder_lock:
                return self._decoder.image(image, resize_spec(self.model))
        except DecodeError as error:
            name = "the image" if isinstance(image, bytes) else str(image)
            *first, last = (each.name for each in IMAGE_FORMATS)
            raise ConfigError(f"{name}: {error.message}; give a {', '.join(first)} or {last} file") from None

    @locked_cached_property
    def _captions(self) -> CaptionEncoder:
        model = self.model
        if model.tokenizer_json is None:
            raise ConfigError(f"model {model.folder}: {NO_TEXT_TOWER}")
        end_id = model.config.required_text.end_id
        return CaptionEncoder(model.tokenizer_json, model.config.preprocess.max_caption_tokens, end_id)

    @locked_cached_property
    def _sigmoid(self) -> tuple[float, float] | None:
        from shards.loading import read_sigmoid

        return read_sigmoid(self.model.folder)

    @locked_cached_property
    def _text_tower(self) -> "Shard":
        from shards.ranges import text_only

        return self._load(text_only(self.model.config))

    @locked_cached_property
    def _vision_tower(self) -> "Shard":
        from shards.ranges import vision_only

        return self._load(vision_only(self.model.config))

    def _load(self, spec: "ShardSpec") -> "Shard":
        from shards.shard import load_shard

        return load_shard(self.model.folder, spec, dtype=self.dtype, device=self.device)

    @locked_cached_property
    def _decoder(self) -> SandboxedDecoder:
        return SandboxedDecoder()
