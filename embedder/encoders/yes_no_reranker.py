"""Re-ranker of Qwen3-VL-Reranker's form: a decoder with eyes scores pairs of a query and a picture, or a caption."""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from embedder.compat.locked_property import locked_cached_property
from embedder.encoders.query_encoder import image_batch, text_batch
from embedder.errors import ConfigError
from embedder.models.model_folder import open_model, resize_spec
from embedder.steps.caption_encoder import CaptionEncoder
from embedder.steps.stage_contract import Stage
from shards.model_settings import ModelSettings, ids_before_pictures, split_address
from shards.preprocess import QUERY_PLACE

if TYPE_CHECKING:
    import pyarrow as pa

    from shards.activations import Batch
    from shards.shard import Shard

BATCH_PAIRS, LONGEST_PX = 8, 512


class YesNoReranker(Stage):
    """Scores, from 0 to 1, how well a picture fits a query; where there is no picture, its caption.

    `model` is a folder that `embedder model import --reranker` made, `dtype` the compute dtype.
    """

    columns_in = ("query",)
    columns_optional = ("image", "caption")
    columns_out: ClassVar[Mapping[str, str]] = {"score": "float32"}
    resources: ClassVar[Mapping[str, float]] = {"batch_size": BATCH_PAIRS, "max_side_px": LONGEST_PX}

    def __init__(self, model: str, *, dtype: str = "float32") -> None:
        """Read the model's description; `load` reads the weights.

        Raises:
            ConfigError: the model is no re-ranker, or has settings.
            ModelError: the model folder is missing or incomplete.
        """
        place, settings = split_address(model)
        if settings != ModelSettings():
            raise ConfigError(f"model {model}: a re-ranker makes no vectors and takes no settings; give only {place}")
        self.model, self.dtype, self._turn = open_model(model), dtype, threading.Lock()
        if not self.model.config.preprocess.scores_queries:
            raise ConfigError(
                f"model {self.model.uri}: it is no re-ranker; give a folder of `embedder model import --reranker`"
            )

    def setup(self) -> None:
        """Load the weights."""
        _ = self._shard

    def process(self, rows: "pa.RecordBatch") -> dict[str, "pa.FloatArray"]:
        """Score pairs of one query or several; null where there is neither picture nor caption.

        Raises:
            ConfigError: the query fills what the model reads.
        """
        import pyarrow as pa

        scores = np.zeros(rows.num_rows, np.float32)
        queries, images, captions = (rows[name].to_pylist() for name in ("query", "image", "caption"))
        with self._turn:
            for query in dict.fromkeys(queries):
                own = [place for place, each in enumerate(queries) if each == query]
                shown = [place for place in own if images[place] is not None]
                read = [place for place in own if images[place] is None and captions[place] is not None]
                encoder = self._ask(query)
                for some in _batches(shown):
                    scores[some] = _scores(self._shard(self._pictures([images[each] for each in some])).vision)
                for some in _batches(read):
                    ids = [encoder.encode(captions[each]) for each in some]
                    scores[some] = _scores(self._shard(text_batch(ids)).text)
        is_empty = [image is None and caption is None for image, caption in zip(images, captions, strict=True)]
        return {"score": pa.array(scores, mask=np.array(is_empty, bool))}

    def _ask(self, query: str) -> CaptionEncoder:
        """Put a query in front of pictures, and return the tokeniser of captions behind it."""
        config, own = self.model.config, self.model.config.preprocess.caption_prompt
        prompt = own.replace(QUERY_PLACE, query.strip())
        encoder = self._captions.with_prompt(prompt)
        if encoder.room < 1:
            raise ConfigError(f"the query fills the {encoder.max_tokens:,} tokens that the re-ranker reads; shorten it")
        vision = config.required_vision
        ids = ids_before_pictures(self.model.folder, vision.model_dump()["ids_before"], own, prompt)
        self._shard.config = config.model_copy(update={"vision": vision.model_copy(update={"ids_before": ids})})
        return encoder

    def _pictures(self, images: list[dict[str, Any]]) -> "Batch":
        from embedder.media.images import resize_image
        from embedder.media.patches import pixel_columns

        rule, columns = resize_spec(self.model), []
        for image in images:
            pixels = np.frombuffer(image["pixels"], np.uint8).reshape(image["height"], image["width"], -1)
            sized = resize_image(pixels, rule)
            resized = np.frombuffer(sized.data, np.uint8).reshape(1, sized.size[1], sized.size[0], 3)
            columns.append(pixel_columns(resized, rule))
        return image_batch(columns)

    @locked_cached_property
    def _captions(self) -> CaptionEncoder:
        config = self.model.config
        return CaptionEncoder(
            str(self.model.tokenizer_json), config.preprocess.max_caption_tokens, config.required_text.end_id
        )

    @locked_cached_property
    def _shard(self) -> "Shard":
        from shards.shard import load_shard
        from shards.shard_specs import whole_model

        spec = whole_model(self.model.config)
        return load_shard(self.model.folder, spec, dtype=self.dtype, device=self.device)


def _batches(places: list[int]) -> list[list[int]]:
    return [places[start : start + BATCH_PAIRS] for start in range(0, len(places), BATCH_PAIRS)]


def _scores(state: Any) -> NDArray[np.float32]:
    """Return the sigmoid of the first values, of vectors (P, 2) whose second was 1 before they had length 1."""
    values = state.values.double().cpu().numpy()
    scores: NDArray[np.float32] = (1 / (1 + np.exp(-values[:, 0] / values[:, 1]))).astype(np.float32)
    return scores
