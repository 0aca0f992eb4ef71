"""One tower as cuttable stage, `hf`, .pt2, TorchScript and ONNX gives the same vectors through the same pipeline."""

import os
import subprocess
import sys
import warnings

import numpy as np
import pyarrow as pa
import pytest
from exported_towers import save_everywhere
from servable_runs import png, run_on_each, run_servables, vectors

from embedder.servables import make_servable
from embedder.servables.predict import item_inputs

FRAMEWORKS = ("torch", "timm", "transformers", "onnx", "onnxruntime", "vllm", "ray", "faiss", "PIL", "av")
SIZES = [(32, 32), (150, 90), (90, 151), (47, 231), (17, 11), (400, 64), (60, 60)]


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    with warnings.catch_warnings(action="ignore"):
        return save_everywhere(tmp_path_factory.mktemp("tower"))


@pytest.fixture(scope="module")
def servables(sections):
    """One servable of each kind, named by it; ONNX in batches that leave a last one of a single row."""
    return [make_servable(section | {"name": kind, "batch_size": 3}) for kind, section in sections.items()]


@pytest.mark.slow  # half a minute: torch.compile
def test_all_kinds_agree_and_share_one_decode(servables):
    assert len(item_inputs(servables)) == 1
    table = pa.table({"image": [png(seed, size) for seed, size in enumerate(SIZES)]})
    found = run_servables(table, *servables)
    expected = vectors(found, "towers.image_embedding")
    assert np.abs(expected[1:] - expected[0]).max(1).min() > 1e-2, "inputs that differ must matter"
    for kind in ("hf", "torch_export", "torchscript", "onnx"):
        output = "embedding" if kind == "hf" else "image_embedding"
        others = vectors(found, f"{kind}.{output}")
        assert (expected * others).sum(1).min() >= 0.9999
        assert np.abs(expected - others).max() < 1e-5
        assert np.abs(np.linalg.norm(others, axis=1) - 1).max() < 1e-5


@pytest.mark.medium
def test_a_row_alone_gives_what_it_gives_among_others(servables):
    """But for the compiled one, which is compiled again for each; a slow test has it with a batch of one row."""
    plain = [each for each in servables if each.name != "compiled"]
    images = [png(seed) for seed in range(4)]
    together, *alone = run_on_each(
        [pa.table({"image": each}) for each in (images, *([image] for image in images))], *plain
    )
    for name in [each for each in together.column_names if each.endswith("embedding")]:
        apart = np.concatenate([vectors(each, name) for each in alone])
        assert np.abs(vectors(together, name) - apart).max() < 1e-6


def test_their_own_image_processor_gives_the_same(sections):
    own = {key: value for key, value in sections["hf"].items() if key != "preprocess"}
    table = pa.table({"image": [png(seed, size) for seed, size in enumerate(SIZES)]})
    found = run_servables(table, {**sections["hf"], "name": "ours"}, {**own, "name": "theirs"})
    assert np.abs(vectors(found, "ours.embedding") - vectors(found, "theirs.embedding")).max() < 1e-5


@pytest.mark.medium
def test_nothing_of_a_framework_is_imported_before_load(sections, tmp_path):
    """Configuration, order, fingerprint, packing and sending to another process, where no framework can be imported."""
    program = f"""
import pickle, sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(FRAMEWORKS)}:
            raise ImportError(name + " is forbidden here")

sys.meta_path.insert(0, Forbidden())
from embedder.servables import make_servable
from embedder.servables.order import order_servables
from embedder.servables.predict import ServablePredictor
sections = {sections!r}
servables = [make_servable(section | {{"name": kind}}) for kind, section in sections.items()]
for each in pickle.loads(pickle.dumps(order_servables(servables))):
    print(each.fingerprint(), each.program().name, sorted(each.output_columns()))
assert [len(group.servables) for group in ServablePredictor(servables).groups] == [len(sections)]
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split()[1] for line in lines] == [
        "TowersProgram",
        "HfFeatures",
        "ExportedGraph",
        "ExportedGraph",
        "ScriptedGraph",
        "OnnxGraph",
    ]
    assert len({line.split()[0] for line in lines}) == 6


def test_the_fingerprint_is_that_of_the_content(sections, tmp_path):
    import shutil
    from pathlib import Path

    for kind in ("hf", "torch_export", "onnx"):
        section = sections[kind]
        before = make_servable(section | {"name": "a"}).fingerprint()
        source = Path(section["uri"])
        copy = tmp_path / kind
        if source.is_dir():
            shutil.copytree(source, copy)
        else:
            copy.mkdir()
            for each in source.parent.glob(f"{source.name}*"):
                shutil.copy(each, copy)
            copy = copy / source.name
        moved = section | {"name": "b", "uri": str(copy)}
        assert make_servable(moved).fingerprint() == before
        weights = next(iter(sorted(copy.glob("*.safetensors")))) if copy.is_dir() else sorted(copy.parent.iterdir())[-1]
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        assert make_servable(moved).fingerprint() != before
