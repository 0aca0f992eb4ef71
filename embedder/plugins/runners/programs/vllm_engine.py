"""Program of the kind `vllm`: vLLM's engine in this process, which gets all rows of a block at once; Python 3.9.

Legend: `B` rows, `E` embedding size.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
import pyarrow as pa

TEXT = "{text}"


class VllmEngine:
    """Engine of a language model; a request for each row, batched by vLLM as their lengths allow."""

    def __init__(self, folder: str, **settings: Any) -> None:
        """Note the checkpoint to load, and settings as in `embedder.plugins.runners.vllm`."""
        self.folder, self.settings = folder, settings

    def load(self, device: str, num_threads: int) -> None:
        """Load the model without downloads, usage reports or the checkpoint's code; vLLM takes its build's device."""
        # Read when vLLM is imported. In one process: an engine in its own process would outlive this one.
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_DO_NOT_TRACK="1", HF_HUB_OFFLINE="1"
        )
        if device == "cpu":  # by default it takes nine tenths of the machine's memory, and a core for each thread
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(self.settings["cache_gib"]))
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        import torch
        from vllm import LLM, EngineArgs, SamplingParams  # type: ignore[import-not-found,unused-ignore]

        torch.set_num_threads(num_threads)
        settings = self.settings
        engine: dict[str, Any] = {"dtype": settings["dtype"], "seed": settings["seed"], "trust_remote_code": False}
        engine["enforce_eager"] = settings["eager"]
        engine["load_format"] = "safetensors"
        if settings["max_tokens"]:
            engine["max_model_len"] = settings["max_tokens"]
        if device.startswith("cuda"):
            engine["gpu_memory_utilization"] = settings["gpu_memory"]
        if settings["task"] == "embed":
            is_newer = "runner" in inspect.signature(EngineArgs).parameters  # since 0.10; before, a task
            engine.update({"runner": "pooling"} if is_newer else {"task": "embed"})
        self.engine = LLM(model=self.folder, **engine)
        self.sampling = SamplingParams(
            temperature=settings["temperature"],
            top_p=settings["top_p"],
            top_k=settings["top_k"] or -1,
            max_tokens=settings["max_new_tokens"],
            stop=list(settings["stop"]) or None,
            seed=settings["seed"],
        )

    def __call__(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """Write texts, or compute vectors, float32 (B, E)."""
        given = requests(batch, self.settings["prompt"])
        if self.settings["task"] == "embed":
            found = self.engine.embed(given, use_tqdm=False)
            return {"embedding": np.array([each.outputs.embedding for each in found], np.float32)}
        found = self.engine.generate(given, self.sampling, use_tqdm=False)
        return {"text": pa.array([each.outputs[0].text.strip() for each in found], pa.string())}


def requests(batch: pa.RecordBatch, prompt: str) -> list[dict[str, Any]]:
    """Make vLLM's requests from rows, in their order.

    The batch has a column `text`, `image`, or both; `prompt` is of each row, with {text} replaced by its text.
    """
    names = batch.schema.names
    texts = batch.column("text").to_pylist() if "text" in names else [""] * batch.num_rows
    made: list[dict[str, Any]] = [{"prompt": prompt.replace(TEXT, text)} for text in texts]
    if "image" in names:
        from .tensors import images

        for row, image in enumerate(images(batch.column("image"))):
            made[row]["multi_modal_data"] = {"image": image}
    return made
