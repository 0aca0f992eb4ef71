"""The sections and the Python of docs/servables.md, run as they stand there, on tiny models."""

import re
import sys
import tomllib
import warnings
from pathlib import Path

import exported_towers
import hf_checkpoints
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
import torch
from servable_runs import png
from tiny_models import tiny_config

from embedder.servables import find_kinds
from embedder.servables.predict import ServablePredictor
from shards.fresh import init_model
from shards.train_tokenizer import train_tokenizer

PAGE = (Path(__file__).parents[1] / "docs/servables.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
RUN = [section for section in SECTIONS if 'kind = "vllm"' not in section]  # vLLM needs an environment of its own
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CAPTIONS = ["a red car", None, "two cats", "rain"]


class Means(torch.nn.Module):
    """A few linear features of mean colours."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 5)

    def forward(self, pixels):
        return self.linear(pixels.mean((2, 3)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that the page names, where the examples look for them."""
    models = tmp_path / "models"
    models.mkdir()
    init_model(tiny_config(), models / "tower", seed=0, tokenizer_json=train_tokenizer(samples.SENTENCES, 300))
    hf_checkpoints.image_classifier(models / "classifier")
    hf_checkpoints.detector(models / "detector")
    hf_checkpoints.captioner(models / "captioner")
    with warnings.catch_warnings(action="ignore"):
        exported_towers.export(Means().eval(), models, outputs=("vector",))
    for suffix in ("onnx", "pt2", "pt"):
        (models / f"tower.{suffix}").rename(models / f"graph.{suffix}")
    (own,) = (block for block in PYTHON if block.startswith("# brightness.py"))
    (tmp_path / "brightness.py").write_text(own)
    (tmp_path / "models.toml").write_text("\n".join(RUN).replace("/opt/older/bin/python", sys.executable))
    table = pa.table({"image": [png(0), png(1), None, png(3)], "caption": CAPTIONS, "price": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "photos.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_is_an_example_of_each_kind():
    sections = tomllib.loads("\n".join(SECTIONS))["model"]
    assert {section["kind"] for section in sections} == set(find_kinds())
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| [^|]+ \| [^|]+ \|$", PAGE.partition("## Kinds")[2].partition("###")[0], re.MULTILINE
    )
    assert rows and set(rows) == set(find_kinds())


def test_the_example_of_vllm_is_valid_where_there_is_none(tmp_path, monkeypatch):
    hf_checkpoints.writer(tmp_path / "models/writer")
    monkeypatch.chdir(tmp_path)
    sections = tomllib.loads("\n".join(SECTIONS))["model"]
    (section,) = (section for section in sections if section["kind"] == "vllm")
    (servable,) = ServablePredictor([section]).servables
    assert set(servable.output_columns()) == {"text"}
    assert len(servable.fingerprint()) == 16


@pytest.mark.slow
def test_the_examples_run_as_they_stand(folder, ray_cluster):
    (example,) = (block for block in PYTHON if "from_servables" in block)
    for name in ("photos.parquet", '"found"'):  # Ray's processes work in another folder
        example = example.replace(name, name.replace("photos", f"{folder}/photos").replace("found", f"{folder}/found"))
    exec(compile(example, "docs/servables.md", "exec"), {"__name__": "example"})
    found = pq.read_table(folder / "found").sort_by("price")
    names = [
        section["name"]
        for section in tomllib.loads("\n".join(RUN).replace("/opt/older/bin/python", sys.executable))["model"]
    ]
    for name in names:
        assert found[f"{name}.error"].to_pylist() == [None] * 4, found[f"{name}.error"].to_pylist()
    assert found["decode_error"].null_count == 4
    has_image, has_text = [True, True, False, True], [True, False, True, True]
    expected = {
        "tower.image_embedding": has_image,
        "tower.text_embedding": has_text,
        "classes.labels": has_image,
        "objects.boxes": has_image,
        "captioner.text": has_image,
        "graph.vector": has_image,
        "exported.vector": has_image,
        "scripted.vector": has_image,
        "brightness.mean": has_image,
        "elsewhere.mean": has_image,
    }
    for name, there in expected.items():
        assert [value is not None for value in found[name].to_pylist()] == there, name
    assert all(len(row) == 3 for row in found["classes.labels"].drop_null().to_pylist())
    assert all(0 < value < 1 for value in found["brightness.mean"].drop_null().to_pylist())
    means = [np.array(found[f"{name}.mean"].drop_null().to_pylist()) for name in ("brightness", "elsewhere")]
    assert np.abs(means[0] * 255 - means[1]).max() < 1e-3
    vectors = [np.array(found[f"{name}.vector"].drop_null().to_pylist()) for name in ("graph", "exported", "scripted")]
    assert np.abs(vectors[0] - vectors[1]).max() < 1e-5
    assert np.abs(vectors[0] - vectors[2]).max() < 1e-5
    for text, words in zip(found["captioner.text"].to_pylist(), found["words.text_embedding"].to_pylist(), strict=True):
        assert bool(text) == (words is not None)
