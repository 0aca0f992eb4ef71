"""Kind `vllm`: a language model run by vLLM, which batches the requests of a whole block itself.

Nothing here imports vLLM: with `python`, only that interpreter needs it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from embedder.plugins.runners import PROGRAMS
from embedder.plugins.runners.hf import local_checkpoint
from embedder.servables.program import ServableProgram
from embedder.servables.servable import Servable
from embedder.servables.servable_columns import ADDRESS, ImageInput, InputColumn, OutputColumn, TextInput
from embedder.servables.servable_errors import ServableError
from embedder.storage.model_download import ALLOWED_FILES
from shards.file_schema import read_json
from shards.model_config import CONFIG_FILE


class VllmServable(Servable):
    """Language model of vLLM: writes a text for each row, or pools a vector of it. Weights are safetensors.

    Each request is sampled with the same seed, so that a row's text does not depend on the rows next to it.
    """

    kind: Literal["vllm"] = "vllm"
    task: Literal["generate", "embed"] = Field("generate", description="whether it writes texts or pools vectors")
    takes: Literal["text", "image", "both"] = Field(
        "text", description="what a row is made of; an image needs a model that takes images, and their mark in prompt"
    )
    text_of: str | None = Field(
        None, pattern=ADDRESS, description="column with the texts; left out: the item's own caption"
    )
    image_of: str | None = Field(
        None, pattern=ADDRESS, description="column with the images; left out: the item's own image"
    )
    prompt: str = Field("{text}", description="of each row, with its text in the place of {text}")
    max_side_px: int = Field(1333, ge=1, le=8192, description="images with a longer side are reduced to it")
    max_new_tokens: int = Field(32, ge=1, description="of texts: most tokens that are written")
    temperature: float = Field(0.0, ge=0, description="of texts: 0 takes the likeliest token, more samples")
    top_p: float = Field(1.0, gt=0, le=1, description="of texts that are sampled: the likeliest tokens of this mass")
    top_k: int | None = Field(None, ge=1, description="of texts that are sampled: as many tokens; left out: all")
    stop: tuple[str, ...] = Field((), description="of texts: strings that end one")
    seed: int = Field(0, ge=0, description="of texts that are sampled, for each row the same")
    dim: int | None = Field(None, ge=1, description="of vectors: values; left out: hidden_size of config.json")
    max_tokens: int | None = Field(
        None, ge=2, description="longest request with its answer, in tokens; left out: as config.json has it"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="compute dtype")
    gpu_memory: float = Field(0.9, gt=0, le=1, description="part of the GPU's memory that vLLM takes")
    cache_gib: int = Field(4, ge=1, description="without a GPU: memory of its cache of keys and values, in GiB")
    eager: bool = Field(False, description="without graphs and compilation: starts sooner, runs slower")
    batch_size: int = Field(4096, ge=1, description="most rows that are handed over at once; vLLM batches them itself")

    UNHASHED = Servable.UNHASHED | {"gpu_memory", "cache_gib", "eager"}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.takes != "image" and "{text}" not in self.prompt:
            raise ValueError(f"prompt = {self.prompt!r}: the text has no place; write {{text}} where it belongs")
        if self.takes == "image" and ("{text}" in self.prompt or self.text_of):
            raise ValueError('takes is "image", and prompt or text_of names a text; write takes = "both", or a prompt')
        if self.takes == "text" and self.image_of:
            raise ValueError('image_of is set, and takes is "text"; write takes = "both"')
        if self.allow_pickle:
            raise ValueError("allow_pickle is true; the kind vllm loads only safetensors, leave it out")
        return self

    def input_columns(self) -> Mapping[str, InputColumn]:
        """Return text, image, or both."""
        inputs: dict[str, InputColumn] = {}
        if self.takes != "image":
            inputs["text"] = TextInput(of=self.text_of)
        if self.takes != "text":
            inputs["image"] = ImageInput(of=self.image_of, max_side_px=self.max_side_px)
        return inputs

    def output_columns(self) -> Mapping[str, OutputColumn]:
        """Return the text or the vector."""
        if self.task == "generate":
            return {"text": OutputColumn(type="string")}
        return {"embedding": OutputColumn(shape=(self.dim or self._width(),))}

    def files(self) -> list[Path]:
        """Return weights, configuration and tokeniser."""
        folder = self._folder()
        if not any(folder.glob("*.safetensors")):
            raise ServableError(f"{self.where()}: no safetensors there; save the model as safetensors")
        return sorted({each for pattern in ALLOWED_FILES for each in folder.glob(pattern)})

    def size_bytes(self) -> int:
        """Memory that it takes: without a GPU, including its cache."""
        return self.memory_bytes or super().size_bytes() + (0 if self.num_gpus else self.cache_gib << 30)

    def program(self) -> ServableProgram:
        """Return the program that runs the engine."""
        self.files()
        keys = {"task", "prompt", "max_new_tokens", "temperature", "top_p", "top_k", "stop", "seed", "max_tokens"}
        keys |= {"dtype", "gpu_memory", "cache_gib", "eager"}
        settings = {"folder": str(self._folder()), **self.model_dump(mode="json", include=keys)}
        return ServableProgram(str(PROGRAMS / "vllm_engine.py"), "VllmEngine", settings)

    def _folder(self) -> Path:
        return local_checkpoint(self.uri, self.where())

    def _width(self) -> int:
        config: dict[str, Any] = read_json(self._folder() / CONFIG_FILE, "give a checkpoint of transformers")
        own = config.get("text_config")
        found = (own if isinstance(own, dict) else config).get("hidden_size")
        if not isinstance(found, int) or found < 1:
            raise ServableError(f"{self.where()}: {CONFIG_FILE} doesn't say how wide its vectors are; write dim = N")
        return found
