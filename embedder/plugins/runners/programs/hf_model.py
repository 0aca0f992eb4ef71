"""Programs of the kind `hf`: models of transformers, version 4.40 or later; Python 3.9.

Legend: `B` rows, `T` tokens, `D` width, `E` embedding size.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from .tensors import images, pixels

BOX_KEYS = ("xmin", "ymin", "xmax", "ymax")


class HfModel:
    """Base of the programs: settings, device, and opening a folder; downloads nothing and runs none of its code."""

    tokenizer: Any
    processor: Any

    def __init__(self, folder: str, **settings: Any) -> None:
        """Note the checkpoint to load, and settings as in `embedder.plugins.runners.hf`."""
        self.folder, self.settings = folder, settings

    def load(self, device: str, num_threads: int) -> None:
        """Load the model and what prepares its inputs."""
        import torch
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(num_threads)
        self.torch, self.device = torch, torch.device(device)
        self.dtype = getattr(torch, self.settings["dtype"])
        self.open()

    def open(self) -> None:
        """Load what the task needs."""
        raise NotImplementedError

    def load_pretrained(self, class_name: str) -> Any:
        """Load the model by a class of transformers, such as `AutoModel`."""
        import transformers

        may_be_pickle = self.settings["allow_pickle"] and not any(Path(self.folder).glob("*.safetensors"))
        weights = {"use_safetensors": not may_be_pickle}
        loader = getattr(transformers, class_name).from_pretrained
        model = loader(self.folder, local_files_only=True, trust_remote_code=False, **weights)
        return model.to(device=self.device, dtype=self.dtype).eval()

    def prepared_by(self, class_name: str) -> Any:
        """Load a tokeniser or processor of the folder by a class such as `AutoTokenizer`."""
        import transformers

        loader = getattr(transformers, class_name).from_pretrained
        return loader(self.folder, local_files_only=True, trust_remote_code=False)

    def tokens(self, texts: list[str]) -> Any:
        """Tokenise texts as the model takes them."""
        limit = {"max_length": self.settings["max_tokens"]} if self.settings["max_tokens"] else {}
        found = self.tokenizer(texts, padding=self.settings["padding"], truncation=True, return_tensors="pt", **limit)
        return found.to(self.device)

    def pixel_values(self, column: Any) -> Any:
        """Make pixels (B, 3, H, W), by the settings or by the model's own image processor."""
        if self.settings["preprocess"] is not None:
            settings = {"preprocess": self.settings["preprocess"], "values": "normalised", "layout": "nchw"}
            found = self.torch.from_numpy(pixels(column, settings))
        else:
            found = self.processor(images(column), return_tensors="pt")["pixel_values"]
        return found.to(device=self.device, dtype=self.dtype)


class HfFeatures(HfModel):
    """Features of images or of texts."""

    def open(self) -> None:
        """Load model and tokeniser or image processor."""
        self.is_text = self.settings["task"] == "feature-extraction"
        self.model = self.load_pretrained("AutoModel")
        if self.is_text:
            self.tokenizer = self.prepared_by("AutoTokenizer")
        elif self.settings["preprocess"] is None:
            self.processor = self.prepared_by("AutoImageProcessor")

    def __call__(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """Compute vectors, float32 (B, E)."""
        column = batch.column(0)
        with self.torch.inference_mode():
            if self.is_text:
                inputs = dict(self.tokens(column.to_pylist()))
                if not _takes(self.model, "token_type_ids"):
                    inputs.pop("token_type_ids", None)
            else:
                inputs = {"pixel_values": self.pixel_values(column)}
            found = self._features(inputs).float()
            if self.settings["normalise"]:
                found = self.torch.nn.functional.normalize(found, dim=-1)
            return {"embedding": found.cpu().numpy()}

    def _features(self, inputs: Mapping[str, Any]) -> Any:
        """Pooled features (B, E), with the projection where the model has one."""
        own = getattr(self.model, "get_text_features" if self.is_text else "get_image_features", None)
        if own is not None:
            inputs = {name: values for name, values in inputs.items() if name != "token_type_ids"}
            found = own(**inputs)
            return getattr(found, "pooler_output", found)  # a tensor, up to transformers 4
        out = self.model(**inputs)
        pooling, pooled = self.settings["pooling"], getattr(out, "pooler_output", None)
        if pooling == "pooler" or (pooling == "auto" and pooled is not None):
            if pooled is None:
                raise ValueError("pooling is pooler, and the model has none; write cls or mean")
            return pooled.flatten(1)
        states = out.last_hidden_state
        if pooling == "cls":
            return states[:, 0]
        mask = inputs.get("attention_mask")
        if mask is None:
            return states.mean(1)
        return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class HfPipeline(HfModel):
    """Classes of images or texts, and objects in images."""

    def open(self) -> None:
        """Make transformers' own pipeline."""
        from transformers import pipeline

        task = self.settings["task"]
        is_text = task in ("text-classification", "zero-shot-classification")
        with_labels = task in ("zero-shot-image-classification", "zero-shot-object-detection")
        if is_text or with_labels:
            self.tokenizer = self.prepared_by("AutoTokenizer")
        parts = {"tokenizer": self.tokenizer} if is_text or with_labels else {}
        if not is_text:
            self.processor = parts["image_processor"] = self.prepared_by("AutoImageProcessor")
        self.pipeline = pipeline(task, model=self.load_pretrained(CLASSES[task]), device=self.device, **parts)
        self.is_text = is_text

    def __call__(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """Compute labels with scores, of objects with boxes."""
        column, task = batch.column(0), self.settings["task"]
        if self.settings["preprocess"] is not None:
            return self._classes(column)
        given = column.to_pylist() if self.is_text else images(column)
        labels, size = self.settings["labels"], self.settings["batch_size"]
        if task in ("image-classification", "text-classification"):
            found = self.pipeline(given, top_k=self.settings["top_k"], batch_size=size, **self._truncation())
        elif task == "object-detection":
            found = self.pipeline(given, threshold=self.settings["threshold"], batch_size=size)
        elif task == "zero-shot-object-detection":
            queries = [{"image": image, "candidate_labels": labels} for image in given]
            found = self.pipeline(queries, threshold=self.settings["threshold"])
        else:
            found = self.pipeline(given, candidate_labels=labels)
        rows = [_rank(each, self.settings["top_k"] if "detection" not in task else None) for each in found]
        sizes = None if "detection" not in task else [image.size for image in given]
        return _columns(rows, sizes)

    def _truncation(self) -> dict[str, Any]:
        if not self.is_text:
            return {}
        limit = {"max_length": self.settings["max_tokens"]} if self.settings["max_tokens"] else {}
        return {"truncation": True, **limit}

    def _classes(self, column: Any) -> dict[str, Any]:
        """Classes of pixels that are already resized: the same softmax or sigmoid as the pipeline's."""
        with self.torch.inference_mode():
            logits = self.pipeline.model(pixel_values=self.pixel_values(column)).logits.float()
        config = self.pipeline.model.config
        is_multi = getattr(config, "problem_type", None) == "multi_label_classification" or logits.shape[-1] == 1
        scores = logits.sigmoid() if is_multi else logits.softmax(-1)
        best = scores.topk(min(self.settings["top_k"], scores.shape[-1]))
        names = [[config.id2label[number] for number in row] for row in best.indices.tolist()]
        return {"labels": pa.array(names, pa.list_(pa.string())), "scores": _floats(best.values.tolist())}


class HfTexts(HfModel):
    """Texts that a model writes: about images, or continuing texts."""

    def open(self) -> None:
        """Load the generator with its processor and tokeniser."""
        import transformers

        self.is_text = self.settings["task"] == "text-generation"
        self.tokenizer = self.prepared_by("AutoTokenizer")
        if self.is_text:
            self.model = self.load_pretrained("AutoModelForCausalLM")
            self.tokenizer.padding_side = "left"
            if self.tokenizer.pad_token is None:
                self.tokenizer.pad_token = self.tokenizer.eos_token
        else:
            newer = hasattr(transformers, "AutoModelForImageTextToText")
            self.model = self.load_pretrained("AutoModelForImageTextToText" if newer else "AutoModelForVision2Seq")
            self.processor = self.prepared_by("AutoImageProcessor")

    def __call__(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """Write a text for each row."""
        column, start = batch.column(0), 0
        self.torch.manual_seed(self.settings["seed"])
        if self.is_text:
            inputs = dict(self.tokens(column.to_pylist()))
            start = inputs["input_ids"].shape[1]
        else:
            inputs = {"pixel_values": self.pixel_values(column)}
            if self.settings["prompt"]:
                inputs.update(self.tokens([self.settings["prompt"]] * batch.num_rows))
        inputs.pop("token_type_ids", None)
        with self.torch.inference_mode():
            found = self.model.generate(**inputs, max_new_tokens=self.settings["max_new_tokens"])
        texts = self.tokenizer.batch_decode(found[:, start:], skip_special_tokens=True)
        return {"text": pa.array([text.strip() for text in texts], pa.string())}


CLASSES = {
    "image-classification": "AutoModelForImageClassification",
    "zero-shot-image-classification": "AutoModelForZeroShotImageClassification",
    "object-detection": "AutoModelForObjectDetection",
    "zero-shot-object-detection": "AutoModelForZeroShotObjectDetection",
    "text-classification": "AutoModelForSequenceClassification",
    "zero-shot-classification": "AutoModelForSequenceClassification",
}


def _takes(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _rank(found: Any, most: Any) -> list[dict[str, Any]]:
    """One row's answer as a list with the best first, whatever form the task gives it."""
    if isinstance(found, Mapping) and "labels" in found:
        pairs = range(len(found["labels"]))
        found = [{"label": found["labels"][each], "score": found["scores"][each]} for each in pairs]
    rows: list[dict[str, Any]] = [dict(found)] if isinstance(found, Mapping) else list(found)
    return sorted(rows, key=lambda each: -each["score"])[:most]


def _columns(rows: list[list[dict[str, Any]]], sizes: Any) -> dict[str, Any]:
    labels = [[each["label"] for each in row] for row in rows]
    scores = [[float(each["score"]) for each in row] for row in rows]
    found = {"labels": pa.array(labels, pa.list_(pa.string())), "scores": _floats(scores)}
    if sizes is not None:
        boxes = []
        for number, row in enumerate(rows):
            sides = [*sizes[number], *sizes[number]]
            boxes.append([[float(each["box"][key]) / sides[at] for at, key in enumerate(BOX_KEYS)] for each in row])
        found["boxes"] = pa.array(boxes, pa.list_(pa.list_(pa.float32())))
    return found


def _floats(rows: list[list[float]]) -> Any:
    return pa.array(rows, pa.list_(pa.float32()))
