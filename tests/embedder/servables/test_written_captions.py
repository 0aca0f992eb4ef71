"""A language model in an environment of its own writes captions, which the text tower embeds in the same run.

The tests with a second environment need EMBEDDER_SECOND_PYTHON: an interpreter with torch, transformers, pyarrow and
Pillow, or `make`, which has pip install one with an older transformers and pyarrow next to this one's torch. The one of
vLLM runs where that interpreter has vLLM, too.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version

import hf_checkpoints
import numpy as np
import pyarrow as pa
import pytest
from servable_runs import png, run_servables

import embedder
from embedder.encoders.query_encoder import QueryEncoder
from embedder.models.model_folder import open_model

VARIABLE = "EMBEDDER_SECOND_PYTHON"
OLDER = ("transformers>=4.50,<5", "pyarrow>=16,<20", "pillow")
PROBE = '''
import sys
from importlib.metadata import PackageNotFoundError, version


class Probe:
    """Says where it runs and with which versions."""

    def load(self, device):
        self.seen = [sys.prefix, *map(found, ("transformers", "torch", "pyarrow"))]

    def __call__(self, batch):
        return {"seen": [self.seen] * batch.num_rows}


def found(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
'''


@pytest.fixture(scope="module")
def second_python(tmp_path_factory):
    """The interpreter of the second environment."""
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} names no interpreter; with {VARIABLE}=make one is installed")
    if named == "make":
        return make_environment(tmp_path_factory.mktemp("second") / "env")
    return named


def make_environment(folder):
    """An environment of older packages, behind which those of this one are found; gives its interpreter."""
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet", *OLDER]
    subprocess.run(pip, check=True, timeout=600)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text(sysconfig.get_path("purelib"))
    return str(folder / "bin/python")


def check_embedded(found, giver, model):
    """Each text is embedded as the query encoder embeds it; a row without one has no vector."""
    texts = found[f"{giver}.text"].to_pylist()
    written = [row for row, text in enumerate(texts) if text]
    assert written, found[f"{giver}.error"].to_pylist()
    expected = QueryEncoder(open_model(str(model))).encode_text([texts[row] for row in written])
    vectors = found["words.text_embedding"].to_pylist()
    assert [row for row, vector in enumerate(vectors) if vector is not None] == written
    assert np.abs(np.array([vectors[row] for row in written], np.float32) - expected).max() < 1e-6
    return texts


def words(model, giver):
    return {"name": "words", "kind": "towers", "uri": str(model), "sides": ["text"], "text_of": f"{giver}.text"}


def writer(folder, python, **keys):
    hf_checkpoints.writer(folder)
    section = {"name": "writer", "kind": "hf", "uri": str(folder), "task": "text-generation", "max_new_tokens": 6}
    return section | {"python": str(python), "timeout_s": 120.0, "load_timeout_s": 180.0} | keys


@pytest.mark.medium
def test_captions_of_another_process_are_those_of_this_one_and_are_embedded(tmp_path, tiny_model):
    """The second interpreter is this one: the same versions write the same texts."""
    table = pa.table({"caption": ["a red car", "two cats", None, "fruit on a table"]})
    section = writer(tmp_path / "writer", sys.executable)
    found = run_servables(table, words(tiny_model, "writer"), section)
    texts = check_embedded(found, "writer", tiny_model)
    here = {key: value for key, value in section.items() if key not in ("python", "timeout_s", "load_timeout_s")}
    assert texts == run_servables(table, here)["writer.text"].to_pylist()
    assert texts[2] is None
    assert len(set(texts)) == 4


@pytest.mark.slow
def test_a_generator_of_another_version_writes_captions_that_the_text_tower_embeds(
    second_python, ray_cluster, tmp_path, tiny_model
):
    """Of images and of texts, through Ray, next to a tower here."""
    hf_checkpoints.captioner(tmp_path / "captioner")
    (tmp_path / "probe.py").write_text(PROBE)
    captioner = {"name": "captioner", "kind": "hf", "uri": str(tmp_path / "captioner"), "task": "image-to-text"}
    captioner |= {"max_new_tokens": 6, "python": second_python}
    probe = {"name": "probe", "kind": "python", "uri": f"{tmp_path}/probe.py:Probe", "python": second_python}
    probe |= {"inputs": {"text": {"make": "text"}}, "outputs": {"seen": {"type": "string", "shape": ["any"]}}}
    images = [png(seed, (40 + seed, 30)) for seed in range(20)]
    captions = [f"a red car {number}" for number in range(20)]
    images[3], captions[5] = None, None
    table = pa.table({"image": images, "caption": captions, "number": list(range(20))})
    sections = [words(tiny_model, "captioner"), captioner, writer(tmp_path / "writer", second_python), probe]
    predictor = embedder.BatchPredictor.from_servables(sections)
    dataset = ray_cluster.data.from_arrow(table).repartition(2)
    found = pa.concat_tables(ray_cluster.get(predictor.predict(dataset).to_arrow_refs())).sort_by("number")
    texts = check_embedded(found, "captioner", tiny_model)
    assert texts[3] is None
    assert len(set(texts)) > 5
    assert [row for row in range(20) if found["writer.text"][row].as_py() is None] == [5]
    prefix, transformers, torch, _ = found["probe.seen"][0].as_py()
    assert prefix != sys.prefix
    assert "none" not in (transformers, torch)
    if os.environ[VARIABLE] == "make":
        assert transformers.partition(".")[0] == "4" < version("transformers").partition(".")[0]


@pytest.mark.slow
def test_vllm_writes_captions_that_the_text_tower_embeds(second_python, ray_cluster, tmp_path, tiny_model):
    """Where vLLM is installed in the second environment; it pools vectors there, too."""
    command = [second_python, "-I", "-c", "import importlib.util as u; print(u.find_spec('vllm') is not None)"]
    if subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() != "True":
        pytest.skip(f"vLLM is not installed in the environment that {VARIABLE} names")
    hf_checkpoints.llama_writer(tmp_path / "writer")
    both = {"kind": "vllm", "uri": str(tmp_path / "writer"), "python": second_python, "max_tokens": 64, "eager": True}
    both |= {"dtype": "float32", "cache_gib": 1}
    section = both | {"name": "writer", "max_new_tokens": 6, "prompt": "car {text}"}
    captions = ["a red car", "two cats", None, "fruit on a table"]
    table = pa.table({"caption": captions, "number": list(range(4))})
    pooled = both | {"name": "pooled", "task": "embed"}
    predictor = embedder.BatchPredictor.from_servables([words(tiny_model, "writer"), section, pooled])
    found = ray_cluster.get(predictor.predict(ray_cluster.data.from_arrow(table)).to_arrow_refs())
    found = pa.concat_tables(found).sort_by("number")
    texts = check_embedded(found, "writer", tiny_model)
    prompts = pa.table({"caption": [caption and f"car {caption}" for caption in captions]})
    here = {"name": "here", "kind": "hf", "uri": section["uri"], "task": "text-generation", "max_new_tokens": 6}
    tokens = run_servables(prompts, here)["here.text"].to_pylist()
    assert texts == [text and text.removeprefix("##") for text in tokens]  # vLLM joins the first piece to the prompt
    vectors = np.array(found["pooled.embedding"].drop_null().to_pylist(), np.float32)
    assert vectors.shape == (3, 128)
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5
    assert (vectors @ vectors.T - np.eye(3)).max() < 0.999
