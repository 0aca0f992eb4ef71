"""Kind `hf`: a model of Hugging Face's transformers, by the name of a task."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from embedder.plugins.runners import PROGRAMS
from embedder.servables.program import ServableProgram
from embedder.servables.servable import Servable
from embedder.servables.servable_columns import ADDRESS, ImageInput, InputColumn, OutputColumn, PixelsInput, TextInput
from embedder.servables.servable_errors import ServableError
from embedder.storage.model_download import ALLOWED_FILES, PICKLED_FILES, resolve_checkpoint
from shards.file_schema import read_json
from shards.model_config import CONFIG_FILE
from shards.preprocess import PreprocessConfig

Task = Literal[
    "image-feature-extraction",
    "feature-extraction",
    "image-classification",
    "zero-shot-image-classification",
    "object-detection",
    "zero-shot-object-detection",
    "image-to-text",
    "text-classification",
    "zero-shot-classification",
    "text-generation",
]
FEATURES = ("image-feature-extraction", "feature-extraction")
GENERATED = ("image-to-text", "text-generation")
LABELLED = ("zero-shot-image-classification", "zero-shot-object-detection", "zero-shot-classification")
TEXTS = ("feature-extraction", "text-classification", "zero-shot-classification", "text-generation")
DETECTED = ("object-detection", "zero-shot-object-detection")

_WIDTHS = ("hidden_size", "dim", "d_model", "n_embd", "embed_dim")


@lru_cache(maxsize=16)
def local_checkpoint(uri: str, where: str) -> Path:
    """Find the folder of a checkpoint, downloading it once in a process if it isn't local; ModelError if that fails.

    Raises a ServableError at `where` if the folder has no configuration.
    """
    folder = resolve_checkpoint(uri).absolute()
    if not (folder / CONFIG_FILE).is_file():
        raise ServableError(f"{where}: no {CONFIG_FILE} there; give the folder of a checkpoint of transformers")
    return folder


class HfServable(Servable):
    """Model of transformers: features of images or texts, classes, detected objects, captions.

    Boxes are left, top, right and bottom as parts of the image's sides; labels come with the best first.
    """

    kind: Literal["hf"] = "hf"
    task: Task = Field(description="what it computes, by transformers' name of the task")
    of: str | None = Field(
        None, pattern=ADDRESS, description="column with the images or texts; left out: the item's own image or caption"
    )
    preprocess: PreprocessConfig | None = Field(
        None,
        description="of images: how they are resized and normalised, in the place of the model's own image processor; "
        "one decode then serves all models of that size. Features and classes only",
    )
    max_side_px: int = Field(1333, ge=1, le=8192, description="whole images with a longer side are reduced to it")
    dim: int | None = Field(None, ge=1, description="of features: values of a vector; left out: as config.json has it")
    normalise: bool = Field(True, description="of features: whether vectors get length 1")
    pooling: Literal["auto", "cls", "mean", "pooler"] = Field(
        "auto", description="of features of one tower: first token, mean, or the pooler; auto: pooler if there is one"
    )
    labels: tuple[str, ...] = Field((), description="of the zero-shot tasks: what there may be")
    top_k: int = Field(5, ge=1, description="of classes: how many are kept")
    threshold: float = Field(0.5, ge=0, le=1, description="of detected objects: least score")
    prompt: str = Field("", description="of image-to-text: beginning of each text")
    max_new_tokens: int = Field(32, ge=1, description="of texts: most tokens that are written")
    max_tokens: int | None = Field(None, ge=2, description="longest text, in tokens; left out: as the tokeniser has it")
    padding: Literal["longest", "max_length"] = Field("longest", description="of texts: max_length for SigLIP")
    seed: int = Field(0, description="of texts that are sampled, as the model's generation_config.json may ask for")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="compute dtype")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.task in LABELLED) != bool(self.labels):
            needs = "needs labels" if self.task in LABELLED else "takes no labels: its model has its own"
            raise ValueError(f"labels = {list(self.labels)}: the task {self.task} {needs}")
        if self.preprocess is not None and self.task not in ("image-feature-extraction", "image-classification"):
            raise ValueError(f"preprocess: the task {self.task} takes whole images or texts; leave it out")
        if self.padding == "max_length" and self.max_tokens is None:
            raise ValueError("padding is max_length; write max_tokens, the length")
        return self

    def input_columns(self) -> Mapping[str, InputColumn]:
        """Return the image, whole or resized, or the text."""
        if self.task in TEXTS:
            return {"text": TextInput(of=self.of)}
        if self.preprocess is not None:
            return {"image": PixelsInput(of=self.of, preprocess=self.preprocess)}
        return {"image": ImageInput(of=self.of, max_side_px=self.max_side_px)}

    def output_columns(self) -> Mapping[str, OutputColumn]:
        """Return what the task gives."""
        if self.task in FEATURES:
            return {"embedding": OutputColumn(shape=(self.dim or self._width(),))}
        if self.task in GENERATED:
            return {"text": OutputColumn(type="string")}
        found = {"labels": OutputColumn(type="string", shape=("any",)), "scores": OutputColumn(shape=("any",))}
        return found | {"boxes": OutputColumn(shape=("any", 4))} if self.task in DETECTED else found

    def files(self) -> list[Path]:
        """Return all files of the folder that transformers may read."""
        folder = self._folder()
        weights = sorted(folder.glob("*.safetensors"))
        if not weights:
            weights = sorted(each for pattern in PICKLED_FILES for each in folder.glob(pattern))
            if not weights:
                raise ServableError(f"{self.where()}: no safetensors there; give the folder of a checkpoint")
            if not self.allow_pickle:
                raise ServableError(
                    f"{self.where()}: {weights[0].name} is a pickle, which can run any code; save the model as "
                    "safetensors, or load what you trust with allow_pickle = true"
                )
        plain = [pattern for pattern in ALLOWED_FILES if pattern != "*.safetensors"]
        return [*weights, *sorted(each for pattern in plain for each in folder.glob(pattern))]

    def program(self) -> ServableProgram:
        """Return the program of the task."""
        self.files()
        keys = {"task", "preprocess", "normalise", "pooling", "labels", "top_k", "threshold", "prompt", "seed", "dtype"}
        keys |= {"max_new_tokens", "max_tokens", "padding", "allow_pickle", "batch_size"}
        settings = {"folder": str(self._folder()), **self.model_dump(mode="json", include=keys)}
        name = "HfFeatures" if self.task in FEATURES else "HfTexts" if self.task in GENERATED else "HfPipeline"
        return ServableProgram(str(PROGRAMS / "hf_model.py"), name, settings)

    def _folder(self) -> Path:
        return local_checkpoint(self.uri, self.where())

    def _width(self) -> int:
        """Size of a feature vector, by the model's configuration."""
        config: dict[str, Any] = read_json(self._folder() / CONFIG_FILE, "give a checkpoint of transformers")
        if "format_version" in config and "model_type" not in config:
            raise ServableError(f'{self.where()}: this is a model folder of embedder; write kind = "towers"')
        side = config.get("text_config" if self.task in TEXTS else "vision_config")
        candidates: list[Any] = [config.get("projection_dim")]
        if isinstance(side, dict):
            candidates += [side.get("projection_size"), *(side.get(key) for key in _WIDTHS)]
        candidates += [config.get(key) for key in _WIDTHS]
        found = next((each for each in candidates if isinstance(each, int) and each > 0), None)
        if found is None:
            raise ServableError(f"{self.where()}: {CONFIG_FILE} doesn't say how wide its vectors are; write dim = N")
        return found
